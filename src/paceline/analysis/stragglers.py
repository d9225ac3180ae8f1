"""Finds stragglers and their cause: compares each worker with the median of the others. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.status import WorkerStatus

SLOW_THRESHOLD = 1.5  # A worker is slow if it takes this many times the median of the others
MIN_STEPS = 3
GONE = ("paused", "stalled", "lost")
DRAINED = "drained"  # it left by request: it delays nobody, and its figures end before those of the others
MIN_SHARE, MIN_SECONDS = 0.1, 0.5
"""A worker is reported if its excess over the others is at least this share of its whole time, and so many seconds."""


@dataclass(frozen=True)
class Straggler:
    """A worker that delays the others, with the cause: `compute`, `link`, `paused`, `stalled` or `lost`."""

    worker: int
    cause: str
    seconds: float | None = None  # seconds of its step, of sending a push, of its silence, or without a step
    usual: float | None = None  # the median of the others, or what is normal for itself

    @property
    def times(self) -> float | None:
        """How many times slower than usual."""
        return self.seconds / self.usual if self.seconds is not None and self.usual else None


def stragglers(workers: Sequence[WorkerStatus]) -> list[Straggler]:
    """Return every worker that is paused, stalled, lost, or slower than the others; the worst first.

    >>> busy = {"computing": 1.0}
    >>> [found.cause for found in stragglers([WorkerStatus(n, "live", busy, 1.0 + n, steps=9) for n in (0, 0, 1)])]
    ['compute']
    """
    gone = [worker for worker in workers if worker.state in GONE]
    missing = [Straggler(worker.worker, worker.state, worker.silent, worker.normal) for worker in gone]
    steady = [worker for worker in workers if worker.steps >= MIN_STEPS and worker.state not in (*GONE, DRAINED)]
    slow = _slower("compute", "computing", [(worker, worker.step_seconds) for worker in steady])
    slow += _slower("link", "sending", [(worker, worker.sending_seconds) for worker in steady])
    return missing + sorted(slow, key=lambda found: -(found.times or 0.0))


def _slower(cause: str, part: str, measured: Sequence[tuple[WorkerStatus, float | None]]) -> list[Straggler]:
    """Return the workers that take longer than the others, if enough of their time goes there to be sure."""
    known = [(worker, seconds) for worker, seconds in measured if seconds is not None]
    if len(known) < 2:
        return []
    ranked, found = sorted(seconds for _, seconds in known), []
    for worker, seconds in known:
        usual = _median_of_others(ranked, seconds)
        if not 0 < SLOW_THRESHOLD * usual <= seconds:
            continue
        share = worker.shares.get(part, 0.0) * (1 - usual / seconds)
        if share >= MIN_SHARE and worker.steps * (seconds - usual) >= MIN_SECONDS:
            found.append(Straggler(worker.worker, cause, seconds, usual))
    return found


def _median_of_others(ranked: list[float], own: float) -> float:
    """Return the median without one `own`, without a copy per worker: there may be ten thousand.

    >>> [_median_of_others([1.0, 2.0, 4.0, 8.0], own) for own in (1.0, 2.0, 8.0)]
    [4.0, 4.0, 2.0]
    >>> _median_of_others([1.0, 3.0, 5.0], 1.0)
    4.0
    """
    place, count = bisect_left(ranked, own), len(ranked) - 1
    middle = [one if one < place else one + 1 for one in ((count - 1) // 2, count // 2)]
    return (ranked[middle[0]] + ranked[middle[1]]) / 2
