"""The CIFAR-10 table of the DANA paper (arXiv 1907.11612): its rows, second-hand, and our settings for each.

ResNet-20, 160 epochs, batch 128 per worker, lr .1 divided by 10 at epochs 80 and 120, Nesterov momentum .9, weight
decay 1e-4, crops and mirrored images, warm-up over 5 epochs; batch times follow gamma distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config import RunConfig
from paceline.studies.published.rows import choose, figure, read_table

EPOCHS = 160.0
WARM_UP = 5.0 / 160.0
MILESTONES = (0.5, 0.75)
"""Shares of the run after which lr is divided by 10."""
SPEEDS = {"homogeneous": "gamma:1s,.1,.1", "heterogeneous": "gamma:1s,.1,.6"}
"""Spread of the batch times of a worker, and of the workers' means."""
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"strategy": "classic", "average": "none", "nesterov": True},
    "auto": {"strategy": "async", "rule": "auto"},
    "dana": {"strategy": "async", "rule": "dana", "average": "none"},
    "sync": {"strategy": "sync", "scale_lr": "auto", "average": "none", "nesterov": True},
    "plain": {"strategy": "async", "rule": "plain", "average": "none", "nesterov": True},
}
"""Our settings for each method; `dana` and `auto` look ahead themselves, as Nesterov momentum does with one worker."""


@dataclass(frozen=True)
class DanaRow:
    """One method at one number of workers; the published accuracy of `dana` is that of DANA-DC."""

    number: int
    method: str
    workers: int
    test_accuracy: float | None  # in percent; None if there is no figure

    @property
    def name(self) -> str:
        """The row's unique name, as in 08-dana-16."""
        return f"{self.number:02d}-{self.method}-{self.workers}"

    def config(self, seed: int, epochs: float, speeds: str, data_dir: str | None, runs: str) -> RunConfig:
        """Return our config; in a shorter run, warm-up and steps of lr keep their shares."""
        return RunConfig(
            dataset="cifar10",
            data_dir=data_dir,
            split="full",
            model="resnet20",
            workers=self.workers,
            optimizer="sgd",
            lr=0.1,
            momentum=0.9,
            weight_decay=1e-4,
            schedule="steps:" + ",".join(f"{epochs * share:g}" for share in MILESTONES),
            warmup=WARM_UP,
            batch_size=128,
            epochs=epochs,
            seed=seed,
            threads=1,
            speeds=SPEEDS[speeds],
            name=f"{self.name}-seed{seed}",
            runs=runs,
            **SETTINGS[self.method],
        )


def published_rows() -> list[DanaRow]:
    """Return the rows in their order."""
    return [DanaRow(number, *cells) for number, cells in enumerate(read_table("dana.csv", [str, int, figure]), 1)]


def choose_rows(text: str | None) -> list[DanaRow]:
    """Return all rows, or those that `text` selects.

    >>> [row.name for row in choose_rows("dana")]
    ['06-dana-4', '07-dana-8', '08-dana-16', '09-dana-32']
    """
    return choose(published_rows(), text)
