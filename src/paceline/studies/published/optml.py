"""Published parameter server (PyTorch RPC): its 55 rows (one without figures) and our settings for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import RunConfig
from paceline.studies.published.rows import choose, figure, read_table

EPOCHS = 6.0
BETAS = [0.99, 0.999]
JITTER = "lognormal:1s,.2"


@dataclass(frozen=True)
class PublishedRow:
    """One published run; its figures are None if they were not published."""

    number: int
    mode: str
    workers: int
    split: str
    model: str
    optimizer: str
    lr: float
    momentum: float
    seconds: float | None
    train_accuracy: float | None
    train_loss: float | None
    test_accuracy: float | None
    test_loss: float | None

    @property
    def name(self) -> str:
        """The row's unique name, as in 23-async-2-labels-cnn-sgd."""
        return f"{self.number:02d}-{self.mode}-{self.workers}-{self.split}-{self.model}-{self.optimizer}"

    @property
    def diverged(self) -> bool:
        """Whether the published run ended at chance level, as after a NaN."""
        return self.test_accuracy is not None and self.test_accuracy <= 10.0

    def config(self, seed: int, epochs: float, data_dir: str | None, runs: str) -> RunConfig:
        """Return our config: one shared optimizer, live weights, every worker its own epochs, the same lr."""
        return RunConfig(
            dataset="fashion-mnist",
            data_dir=data_dir,
            split=self.split,
            model=self.model,
            strategy=self.mode,
            workers=self.workers,
            rule="plain",
            optimizer=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            betas=BETAS,
            epochs=epochs,
            epoch_mode="own",
            batch_size=32,
            train_score="all",
            seed=seed,
            threads=1,
            speeds=JITTER,
            name=f"{self.name}-seed{seed}",
            runs=runs,
        )


def automatic(row: PublishedRow, seed: int, epochs: float, data_dir: str | None, runs: str) -> RunConfig:
    """Return the config with Paceline's defaults for the row's strategy, workers, data and model.

    Rows that agree in these four share one run.
    """
    usual = RunConfig()
    settings: dict[str, Any] = {"rule": "auto"} if row.mode == "async" else {"average": "on"}
    if row.mode == "sync":
        settings["scale_lr"] = "auto"
    for name in ("optimizer", "lr", "momentum", "betas"):
        settings[name] = getattr(usual, name)
    name = f"auto-{row.mode}-{row.workers}-{row.split}-{row.model}-seed{seed}"
    return replace(row.config(seed, epochs, data_dir, runs), **settings, name=name)


def published_rows() -> list[PublishedRow]:
    """Return the published rows in their order."""
    kinds: list[Callable[[str], Any]] = [str, int, str, str, str, float, lambda cell: float(cell or 0.0), *[figure] * 5]
    return [PublishedRow(number, *cells) for number, cells in enumerate(read_table("optml.csv", kinds), 1)]


def choose_rows(text: str | None) -> list[PublishedRow]:
    """Return all rows, or those that `text` selects.

    >>> [row.number for row in choose_rows("1,3-4")]
    [1, 3, 4]
    """
    return choose(published_rows(), text)
