"""The published all-reduce trainer in JAX on Ray: its 34 rows, and our settings for each.

Batch 128 a GPU, Adam with lr .01 x GPUs and no warm-up, every worker through the whole train set each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import RunConfig
from paceline.studies.published.rows import Asked, Machine, cells_of, figure

EPOCHS = 4.0
LR = 0.01
MAX_LENGTH = 256


@dataclass(frozen=True)
class DistmlRow:
    """One run of theirs."""

    number: int
    model: str
    dataset: str
    gpus: str
    nodes: int
    machine: str
    batch: int
    samples_per_second: float
    speedup: float
    baseline: float
    test_accuracy: float | None
    """In percent, after four epochs; the transformer's was never printed."""

    @property
    def name(self) -> str:
        """As in 19-resnet18-mnist-1+1-lm1+lm6; unique by its number."""
        return f"{self.number:02d}-{self.model}-{self.dataset}-{self.gpus}-{self.machine}"

    @property
    def workers(self) -> int:
        return sum(int(part) for part in self.gpus.split("+"))

    def why_not(self, machine: Machine) -> str | None:
        """Their subject is speed, so that each GPU of theirs needs a device of its own."""
        if self.nodes > 1:
            return f"needs {self.nodes} machines ({self.machine}), and this is one"
        if self.workers > machine.num_devices:
            return f"needs {self.workers} devices, and this machine has {machine}"
        return None

    def config(self, asked: Asked) -> RunConfig:
        """The same on this machine's devices; rows of their two machines are one run here."""
        config = RunConfig(
            dataset=self.dataset,
            data_dir=asked.data_dir,
            split="full",
            model=self.model,
            strategy="classic" if self.workers == 1 else "allreduce",
            workers=self.workers,
            optimizer="adam",
            lr=LR,
            scale_lr=str(float(self.workers)) if self.workers > 1 else "none",
            batch_size=self.batch,
            epochs=asked.epochs or EPOCHS,
            steps=asked.steps,
            epoch_mode="own" if asked.steps is None else "shared",
            eval_every=float(self.workers) if asked.steps is None else None,
            max_length=MAX_LENGTH,
            score="test",
            device=asked.device,
            threads=1 if asked.device == "cpu" else None,  # a core stands for a GPU
            name=f"{self.model}-{self.dataset}-{self.workers}",
            runs=asked.runs,
        )
        settings = dict(asked.settings)
        if self.workers == 1:
            settings.pop("strategy", None)  # one worker has nobody to keep pace with
        return replace(config, **settings)  # type: ignore[arg-type]


def published_rows() -> list[DistmlRow]:
    """The table, in its own order."""
    rows = []
    for number, cells in enumerate(cells_of("distml.csv"), 1):
        accuracy = figure(cells["test_accuracy_epoch_3"])
        rows.append(
            DistmlRow(
                number,
                cells["model"],
                cells["dataset"],
                cells["gpus"],
                int(cells["nodes"]),
                cells["machine"],
                int(cells["batch_per_gpu"]),
                float(cells["samples_per_second"]),
                float(cells["speedup"]),
                float(cells["baseline"]),
                None if accuracy is None else 100.0 * accuracy,
            )
        )
    return rows
