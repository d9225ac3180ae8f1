"""The published key-value store on ps-lite: its runs by epoch, the async ones on CIFAR-10 it left empty, our settings.

SGD with momentum .9, weight decay 1e-5 and one lr; a batch is a machine's, and an epoch one pass of all together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import RunConfig
from paceline.studies.published.rows import Asked, Machine, cells_of

STRATEGIES = {"single": "classic", "sync": "sync", "async": "async"}
EMPTY_EPOCHS = 40.0
"""Of the rows they left empty: as many as their others have."""


@dataclass(frozen=True)
class Figures:
    """What they print of one epoch; accuracies in percent."""

    train_accuracy: float
    valid_accuracy: float
    seconds: float


@dataclass(frozen=True)
class MxnetRow:
    """One run of theirs; nothing in `epochs` where they left the section empty."""

    number: int
    model: str
    dataset: str
    machines: int
    gpus: int
    mode: str
    batch: int
    lr: float
    epochs: tuple[tuple[int, Figures], ...]

    @property
    def name(self) -> str:
        """As in 03-inception-28-small-cifar10-sync-5-512-0.1; unique by its number."""
        return f"{self.number:02d}-{self.model}-{self.dataset}-{self.mode}-{self.machines}-{self.batch}-{self.lr:g}"

    def why_not(self, machine: Machine) -> str | None:
        """Accuracy needs no five machines: their workers may share this one."""
        return None

    def config(self, asked: Asked) -> RunConfig:
        """Each of their machines is a worker here, with the machine's batch."""
        last = float(self.epochs[-1][0]) if self.epochs else EMPTY_EPOCHS
        config = RunConfig(
            dataset="imagenet" if self.dataset == "ilsvrc12" else self.dataset,
            data_dir=asked.data_dir,
            split="iid",
            model=self.model,
            strategy=STRATEGIES[self.mode],
            workers=self.machines,
            rule="plain",
            average="none",
            optimizer="sgd",
            lr=self.lr,
            momentum=0.9,
            weight_decay=1e-5,
            batch_size=self.batch,
            epochs=asked.epochs or last,
            steps=asked.steps,
            eval_every=1.0 if asked.steps is None else None,
            eval_train=asked.steps is None,
            score="test",
            device=asked.device,
            name=self.name,
            runs=asked.runs,
        )
        return replace(config, **asked.settings)  # type: ignore[arg-type]


def published_rows() -> list[MxnetRow]:
    """The runs in the table's order, the empty ones on CIFAR-10 behind the sync ones they belong to."""
    runs: dict[tuple[str, ...], list[tuple[int, Figures]]] = {}
    for cells in cells_of("mxnet.csv"):
        key = tuple(cells[name] for name in ("model", "dataset", "machines", "gpus", "mode", "batch_per_machine", "lr"))
        accuracies = [100.0 * float(cells[f"{part}_accuracy"]) for part in ("train", "valid")]
        found = Figures(accuracies[0], accuracies[1], float(cells["epoch_seconds"]))
        runs.setdefault(key, []).append((int(cells["epoch"]), found))
    left_empty = [(*key[:4], "async", *key[5:]) for key in runs if key[1] == "cifar10" and key[4] == "sync"]
    keys = [key for key in runs if key[1] == "cifar10"] + left_empty + [key for key in runs if key[1] != "cifar10"]
    return [_row(number, *key, epochs=runs.get(key, [])) for number, key in enumerate(keys, 1)]


def _row(number: int, *key: str, epochs: list[tuple[int, Figures]]) -> MxnetRow:
    model, dataset, machines, gpus, mode, batch, lr = key
    return MxnetRow(number, model, dataset, int(machines), int(gpus), mode, int(batch), float(lr), tuple(epochs))
