"""Who is slow, and why: each worker beside the median of the others. Pure: statuses in, findings out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.status import WorkerStatus

SLOWER = 1.5
"""Times the median of the others."""
FEWEST_STEPS = 3
GONE = ("paused", "lost")
LEAST_SHARE = 0.1
"""A link is worth naming when what it takes longer than the others' is so much of the worker's time."""


@dataclass(frozen=True)
class Straggler:
    """A worker that holds the others up, with the cause: `compute`, `link`, `paused` or `lost`."""

    worker: int
    cause: str
    seconds: float | None = None
    """Of its step, of sending its push, or of its silence."""
    usual: float | None = None
    """Of the others (the median), or for itself."""

    @property
    def times(self) -> float | None:
        """How many times slower than usual."""
        return self.seconds / self.usual if self.seconds is not None and self.usual else None

    @property
    def excess(self) -> float:
        """Seconds more than usual."""
        return (self.seconds or 0.0) - (self.usual or 0.0)


def stragglers(workers: Sequence[WorkerStatus]) -> list[Straggler]:
    """Everybody who is paused, lost, or slower than the others; the worst first.

    >>> [found.cause for found in stragglers([WorkerStatus(n, "live", {}, 1.0 + n, steps=9) for n in (0, 0, 1)])]
    ['compute']
    """
    missing = [_missing(worker) for worker in workers if worker.state in GONE]
    steady = [worker for worker in workers if worker.steps >= FEWEST_STEPS and worker.state not in GONE]
    slow = _slower("compute", [(worker, worker.step_seconds) for worker in steady])
    spent = {worker.worker: (worker.step_seconds or 0.0) + (worker.sending_seconds or 0.0) for worker in steady}
    for found in _slower("link", [(worker, worker.sending_seconds) for worker in steady]):
        if found.excess >= LEAST_SHARE * spent[found.worker]:
            slow.append(found)
    return missing + sorted(slow, key=lambda found: -(found.times or 0.0))


def _missing(worker: WorkerStatus) -> Straggler:
    return Straggler(worker.worker, worker.state, worker.silent, worker.normal)


def _slower(cause: str, measured: Sequence[tuple[WorkerStatus, float | None]]) -> list[Straggler]:
    known = [(worker.worker, seconds) for worker, seconds in measured if seconds is not None]
    if len(known) < 2:
        return []
    ranked, found = sorted(seconds for _, seconds in known), []
    for worker, seconds in known:
        usual = _median_of_others(ranked, seconds)
        if usual > 0 and seconds >= SLOWER * usual:
            found.append(Straggler(worker, cause, seconds, usual))
    return found


def _median_of_others(ranked: list[float], own: float) -> float:
    """Without a copy of all others for each: there may be ten thousand.

    >>> [_median_of_others([1.0, 2.0, 4.0, 8.0], own) for own in (1.0, 2.0, 8.0)]
    [4.0, 4.0, 2.0]
    >>> _median_of_others([1.0, 3.0, 5.0], 1.0)
    4.0
    """
    place, count = bisect_left(ranked, own), len(ranked) - 1
    middle = [one if one < place else one + 1 for one in ((count - 1) // 2, count // 2)]
    return (ranked[middle[0]] + ranked[middle[1]]) / 2
