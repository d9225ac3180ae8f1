"""Statistics over runs that differ only in seed or fold: mean, spread, number of failed runs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from paceline.analysis.scored_weights import BY_WEIGHTS, by_weights

FAILED = ("diverged", "collapsed")


@dataclass(frozen=True)
class RunStatistics:
    """The results of the runs, as in `result.json`; only finished runs count in a mean."""

    results: list[dict[str, Any]]

    def values(self, figure: str) -> list[float]:
        """Return the figure of each finished run that has it, also under the names of `by_weights`."""
        finished = [result for result in self.results if result["status"] == "finished"]
        found = [(by_weights(result) if figure in BY_WEIGHTS else result).get(figure) for result in finished]
        return [float(value) for value in found if value is not None]

    def mean(self, figure: str) -> float | None:
        values = self.values(figure)
        return statistics.fmean(values) if values else None

    def spread(self, figure: str) -> float | None:
        """Return the sample standard deviation, or None for fewer than two runs."""
        values = self.values(figure)
        return statistics.stdev(values) if len(values) > 1 else None

    def count(self, status: str) -> int:
        """Return how many runs have this status."""
        return sum(result["status"] == status for result in self.results)

    @property
    def num_failed(self) -> int:
        """Return how many runs diverged or collapsed."""
        return sum(map(self.count, FAILED))

    @property
    def unfinished(self) -> str:
        """Numbers of unfinished runs, as in `2 diverged`; empty if all finished."""
        return ", ".join(f"{number} {status}" for status in (*FAILED, "stopped") if (number := self.count(status)))

    def text(self, figure: str, form: str = ".2f") -> str:
        """Return mean and spread, or a dash.

        >>> RunStatistics([{"status": "finished", "loss": 1.0}, {"status": "finished", "loss": 2.0}]).text("loss")
        '1.50 ± 0.71'
        """
        mean, spread = self.mean(figure), self.spread(figure)
        if mean is None:
            return "-"
        return format(mean, form) + (f" ± {format(spread, form)}" if spread is not None else "")
