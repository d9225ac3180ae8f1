"""Several runs of one setting, which differ in seed or fold, as one: mean, spread, and how many came to nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Several:
    """The results of the runs, as `result.json` has them; only finished ones count in a mean."""

    results: list[dict[str, Any]]

    def values(self, figure: str) -> list[float]:
        """Of the runs that finished and have one."""
        found = [result.get(figure) for result in self.results if result["status"] == "finished"]
        return [float(value) for value in found if value is not None]

    def mean(self, figure: str) -> float | None:
        values = self.values(figure)
        return statistics.fmean(values) if values else None

    def spread(self, figure: str) -> float | None:
        """The sample standard deviation; None for fewer than two runs."""
        values = self.values(figure)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def num_diverged(self) -> int:
        return sum(result["status"] == "diverged" for result in self.results)

    @property
    def unfinished(self) -> str:
        """As in `2 diverged`; empty when all finished."""
        counts = Counter(result["status"] for result in self.results)
        return ", ".join(f"{counts[status]} {status}" for status in ("diverged", "stopped") if counts[status])

    def text(self, figure: str, form: str = ".2f") -> str:
        """Mean and spread, or a dash.

        >>> Several([{"status": "finished", "loss": 1.0}, {"status": "finished", "loss": 2.0}]).text("loss")
        '1.50 ± 0.71'
        """
        mean, spread = self.mean(figure), self.spread(figure)
        if mean is None:
            return "-"
        return format(mean, form) + (f" ± {format(spread, form)}" if spread is not None else "")
