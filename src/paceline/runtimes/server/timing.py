"""Where a real run's time goes: the server's account of the timings that workers send with their pushes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from paceline.transports.protocol import Timing

KEPT = 2000
WARM_UP = 10
LEVELS = 33
RECENT = 33


class Told(NamedTuple):
    """What a worker has said so far: seconds it computed, seconds it waited for replies, in so many steps."""

    computing: float
    waited: float
    steps: int
    recent: tuple[tuple[float, float], ...]
    """Of its latest pushes: seconds of a step, and of the wait before it."""


class WorkerTimes:
    """The latest steps of one worker, its first few left out."""

    def __init__(self) -> None:
        self._steps: deque[Timing] = deque(maxlen=KEPT)
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._seen = self.steps = 0
        self.computing = self.waiting = 0.0

    def add(self, timing: Timing, steps: int) -> None:
        self._seen += 1
        self.steps += steps
        self.computing += timing.wall
        self.waiting += timing.waited
        self.recent.append((timing.wall / steps, timing.waited))
        if self._seen > WARM_UP:
            self._steps.append(timing._replace(cpu=timing.cpu / steps, wall=timing.wall / steps))

    def row(self) -> dict[str, Any]:
        """Seconds of a step and of an exchange, and the spread of a step's processor time over its mean."""
        if not self._steps:
            return {"steps": self._seen}
        cpu, wall, waited = np.array(self._steps).T
        mean = float(cpu.mean()) or 1e-9
        return {
            "steps": self._seen,
            "cpu": round(mean, 9),
            "wall": round(float(wall.mean()), 9),
            "waited": round(float(np.median(waited)), 9),
            "waited_least": round(float(np.quantile(waited, 0.1)), 9),
            "quantiles": [round(float(q), 4) for q in np.quantile(cpu / mean, np.linspace(0.0, 1.0, LEVELS))],
        }


class Timekeeper:
    """The server's account: what workers say of their steps, and its own processor time, scoring left out."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerTimes] = {}
        self._began = self._scoring = 0.0
        self._cores = len(os.sched_getaffinity(0))

    def add(self, worker: int, timing: Timing, steps: int = 1) -> None:
        """A push of so many steps came, and with it the time they took."""
        if worker not in self._workers:
            self._workers[worker] = WorkerTimes()
            self._began = self._began or time.process_time()
        self._workers[worker].add(timing, steps)

    def told(self, worker: int) -> Told | None:
        """Sums of what this worker has said; None where it says nothing, as in one process."""
        times = self._workers.get(worker)
        return Told(times.computing, times.waiting, times.steps, tuple(times.recent)) if times is not None else None

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Meanwhile the server does not serve."""
        began = time.process_time()
        try:
            yield
        finally:
            self._scoring += time.process_time() - began

    def row(self, pushes: int) -> dict[str, Any] | None:
        """The fields of a `timing` event; None where nobody told anything, as in one process."""
        if not self._workers:
            return None
        cpu = time.process_time() - self._began - self._scoring
        rows = {str(worker): times.row() for worker, times in sorted(self._workers.items())}
        return {"server_cpu": round(cpu / max(1, pushes), 9), "cores": self._cores, "workers": rows}

    def shares(self, num_workers: int) -> list[dict[str, float]]:
        """What part of its time each worker computed and waited, newcomers included."""
        shares = []
        for worker in range(max(num_workers, 1 + max(self._workers, default=0))):
            times = self._workers.get(worker, WorkerTimes())
            whole = times.computing + times.waiting or 1.0
            shares.append({"computing": round(times.computing / whole, 4), "waiting": round(times.waiting / whole, 4)})
        return shares


class TrainingClock:
    """Seconds of training so far; made standing still, perhaps not at zero (a resumed run).

    `source` is what it counts by: a simulated run gives its virtual time.
    """

    def __init__(self, seconds: float = 0.0, source: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self.source = seconds, source
        self._since: float | None = None

    def now(self) -> float:
        return self._seconds + (self.source() - self._since if self._since is not None else 0.0)

    def go(self) -> None:
        if self._since is None:
            self._since = self.source()

    def halt(self) -> None:
        self._seconds, self._since = self.now(), None
