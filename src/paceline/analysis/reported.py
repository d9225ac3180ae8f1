"""The one value of a metric that own loops report: the lowest-numbered worker that reported it and was not lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, float | None]


@dataclass(frozen=True)
class ReportedValue:
    """The latest value of one metric, and the worker that reported it. None: it is not finite."""

    worker: int
    value: float | None


class ReportedMetrics:
    """The latest reports of all workers. Which value holds does not depend on the order in which workers report."""

    def __init__(self) -> None:
        self.by_worker: dict[int, dict[str, float | None]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()

    def add(self, worker: int, values: Values) -> None:
        """Take one report."""
        self.by_worker.setdefault(worker, {}).update(values)
        self._counts.update((worker, name) for name in values)

    def add_row(self, worker: Any, values: Any) -> None:
        """Take one report as a file holds it; skip what is damaged."""
        if str(worker).isdecimal() and isinstance(values, dict):
            self.add(int(worker), {name: value for name, value in values.items() if _is_value(value)})

    def values(self, lost: Collection[Any] = ()) -> dict[str, ReportedValue]:
        """The value that holds for each metric, by name; a lost worker counts only if no other reported the metric.

        >>> metrics = ReportedMetrics()
        >>> metrics.add(1, {"accuracy": 87.8}), metrics.add(0, {"accuracy": 90.2})
        (None, None)
        >>> metrics.values()["accuracy"]
        ReportedValue(worker=0, value=90.2)
        """
        found: dict[str, ReportedValue] = {}
        for worker in sorted(self.by_worker, key=lambda worker: (worker in lost, worker)):
            for name, value in self.by_worker[worker].items():
                found.setdefault(name, ReportedValue(worker, value))
        return found

    def rows(self, lost: Collection[Any] = ()) -> dict[str, Any]:
        """Rows of the result: the value that holds for each metric, and all by worker; none without a report."""
        found = self.values(lost)
        if not found:
            return {}
        reported = {str(worker): self.by_worker[worker] for worker in sorted(self.by_worker)}
        return {"metrics": {name: one.value for name, one in found.items()}, "reported": reported}

    def goal_value(self, metric: str, lost: Collection[Any] = ()) -> float | None:
        """The value that a target is compared with.

        A value of another worker than 0 counts from its second report on: after the first, worker 0's may be on the
        way, and the run must not end or go on by which of the two arrives earlier.
        """
        found = self.values(lost).get(metric)
        if found is None or (found.worker != 0 and self._counts[found.worker, metric] < 2):
            return None
        return found.value


def read_reported(result: Mapping[str, Any]) -> dict[str, ReportedValue]:
    """The values that hold, from the `reported` and `lost_workers` of a result."""
    reported, lost = result.get("reported"), result.get("lost_workers")
    metrics = ReportedMetrics()
    for worker, values in reported.items() if isinstance(reported, dict) else ():
        metrics.add_row(worker, values)
    return metrics.values(lost if isinstance(lost, list) else ())


def reported_so_far(events: Iterable[Mapping[str, Any]]) -> dict[str, ReportedValue]:
    """The values that hold, from the events of a run without a result."""
    metrics, lost = ReportedMetrics(), set()
    for row in events:
        if row.get("kind") == "reported":
            metrics.add_row(row.get("worker"), row.get("figures"))
        elif row.get("kind") == "worker_lost":
            lost.add(row.get("worker"))
    return metrics.values(lost)


def _is_value(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
