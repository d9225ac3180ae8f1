"""Who is slow, and why: each worker beside the median of the others. Pure: statuses in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.runs.status import WorkerStatus

SLOWER = 1.5
"""Times the median of the others."""
FEWEST_STEPS = 3
LEAST_SHARE = 0.1
"""A link is worth naming when so much of the worker's time goes into it."""


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


def stragglers(workers: Sequence[WorkerStatus]) -> list[Straggler]:
    """Everybody who is paused, lost, or slower than the others; the worst first.

    >>> [found.cause for found in stragglers([WorkerStatus(n, "live", {}, 1.0 + n, steps=9) for n in (0, 0, 1)])]
    ['compute']
    """
    missing = [_missing(worker) for worker in workers if worker.state in ("paused", "lost")]
    steady = [worker for worker in workers if worker.steps >= FEWEST_STEPS and worker.state != "paused"]
    links = [worker for worker in steady if worker.shares.get("sending", 0.0) >= LEAST_SHARE]
    slow = _slower(steady, steady, "compute", lambda worker: worker.step_seconds)
    slow += _slower(links, steady, "link", lambda worker: worker.sending_seconds)
    return missing + sorted(slow, key=lambda found: -(found.times or 0.0))


def _missing(worker: WorkerStatus) -> Straggler:
    return Straggler(worker.worker, worker.state, worker.silent, worker.normal)


def _slower(
    suspects: Sequence[WorkerStatus],
    everybody: Sequence[WorkerStatus],
    cause: str,
    measure: Callable[[WorkerStatus], float | None],
) -> list[Straggler]:
    known = [(worker, seconds) for worker in everybody if (seconds := measure(worker)) is not None]
    if len(known) < 2:
        return []
    ranked, names = sorted(seconds for _, seconds in known), {worker.worker for worker in suspects}
    found = []
    for worker, seconds in known:
        if worker.worker in names:
            usual = _median_of_others(ranked, seconds)
            if usual > 0 and seconds >= SLOWER * usual:
                found.append(Straggler(worker.worker, cause, seconds, usual))
    return found


def _median_of_others(ranked: list[float], own: float) -> float:
    others = ranked.copy()
    others.remove(own)
    return median(others)
