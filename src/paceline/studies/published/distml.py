"""Published all-reduce trainer (JAX on Ray): its 34 rows and our settings for each.

Batch 128 per GPU, Adam with lr .01 x GPUs and no warm-up; every worker passes over the whole train set each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import RunConfig
from paceline.studies.published.rows import MachineSpec, RowOptions, percent, read_table

EPOCHS = 4.0
LR = 0.01
MAX_LENGTH = 256
COLUMNS = (str, str, str, int, str, int, float, float, float, percent)


@dataclass(frozen=True)
class DistmlRow:
    """One published run."""

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
    test_accuracy: float | None  # percent after four epochs; None for the transformer, for which none was published

    @property
    def name(self) -> str:
        """The row's unique name, as in 19-resnet18-mnist-1+1-lm1+lm6."""
        return f"{self.number:02d}-{self.model}-{self.dataset}-{self.gpus}-{self.machine}"

    @property
    def workers(self) -> int:
        return sum(int(part) for part in self.gpus.split("+"))

    def why_not(self, machine: MachineSpec) -> str | None:
        """Return why the row cannot run here: it measures speed, so each published GPU needs its own device."""
        if self.nodes > 1:
            return f"needs {self.nodes} machines ({self.machine}), and this is one"
        if self.workers > machine.num_devices:
            return f"needs {self.workers} devices, and this machine has {machine}"
        return None

    def config(self, options: RowOptions) -> RunConfig:
        """Return our config; rows that differ only in the published machine share one run."""
        config = RunConfig(
            dataset=self.dataset,
            data_dir=options.data_dir,
            split="full",
            model=self.model,
            strategy="classic" if self.workers == 1 else "allreduce",
            workers=self.workers,
            average="none",
            optimizer="adam",
            lr=LR,
            scale_lr=str(float(self.workers)) if self.workers > 1 else "none",
            batch_size=self.batch,
            epochs=options.epochs or EPOCHS,
            steps=options.steps,
            epoch_mode="own" if options.steps is None else "shared",
            eval_every=float(self.workers) if options.steps is None else None,
            max_length=MAX_LENGTH,
            score="test",
            device=options.device,
            threads=1 if options.device == "cpu" else None,  # a core stands for a GPU
            name=f"{self.model}-{self.dataset}-{self.workers}",
            runs=options.runs,
        )
        settings = dict(options.settings)
        if self.workers == 1:
            settings.pop("strategy", None)  # one worker always runs `classic`
        return replace(config, **settings)  # type: ignore[arg-type]


def published_rows() -> list[DistmlRow]:
    """Return the published rows in their order."""
    return [DistmlRow(number, *cells) for number, cells in enumerate(read_table("distml.csv", COLUMNS), 1)]
