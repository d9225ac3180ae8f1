"""Published key-value store (ps-lite): its runs by epoch and our settings for each.

SGD with momentum .9, weight decay 1e-5 and a constant lr; batch sizes are per machine, an epoch is one pass of all
machines together. The publication leaves its async section on CIFAR-10 empty; we run it as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.config import RunConfig
from paceline.studies.published.rows import MachineSpec, RowOptions, percent, read_table

STRATEGIES = {"single": "classic", "sync": "sync", "async": "async"}
COLUMNS = (str, str, int, int, str, int, float, int, percent, percent, float)
EMPTY_EPOCHS = 40.0  # epochs of the rows published without figures: the same as the other rows


@dataclass(frozen=True)
class EpochFigures:
    """Published figures of one epoch; accuracies in percent."""

    train_accuracy: float
    valid_accuracy: float
    seconds: float


@dataclass(frozen=True)
class MxnetRow:
    """One published run; `epochs` is empty if no figures were published."""

    number: int
    model: str
    dataset: str
    machines: int
    gpus: int
    mode: str
    batch: int
    lr: float
    epochs: tuple[tuple[int, EpochFigures], ...]

    @property
    def name(self) -> str:
        """The row's unique name, as in 03-inception-28-small-cifar10-sync-5-512-0.1."""
        return f"{self.number:02d}-{self.model}-{self.dataset}-{self.mode}-{self.machines}-{self.batch}-{self.lr:g}"

    def why_not(self, machine: MachineSpec) -> str | None:
        """Return None: the rows measure accuracy, so their workers may share one machine."""
        return None

    def config(self, options: RowOptions) -> RunConfig:
        """Return our config: one worker per published machine, with the machine's batch size."""
        last = float(self.epochs[-1][0]) if self.epochs else EMPTY_EPOCHS
        config = RunConfig(
            dataset="imagenet" if self.dataset == "ilsvrc12" else self.dataset,
            data_dir=options.data_dir,
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
            epochs=options.epochs or last,
            steps=options.steps,
            eval_every=1.0 if options.steps is None else None,
            eval_train=options.steps is None,
            score="test",
            device=options.device,
            name=self.name,
            runs=options.runs,
        )
        return replace(config, **options.settings)  # type: ignore[arg-type]


def published_rows() -> list[MxnetRow]:
    """Return the published runs in their order, with the async CIFAR-10 rows after the sync ones."""
    runs: dict[tuple[Any, ...], list[tuple[int, EpochFigures]]] = {}
    for *key, epoch, train, valid, seconds in read_table("mxnet.csv", COLUMNS):
        runs.setdefault(tuple(key), []).append((epoch, EpochFigures(train, valid, seconds)))
    left_empty = [(*key[:4], "async", *key[5:]) for key in runs if key[1] == "cifar10" and key[4] == "sync"]
    keys = [key for key in runs if key[1] == "cifar10"] + left_empty + [key for key in runs if key[1] != "cifar10"]
    return [MxnetRow(number, *(*key, tuple(runs.get(key, ())))) for number, key in enumerate(keys, 1)]
