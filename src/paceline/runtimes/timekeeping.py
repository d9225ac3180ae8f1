"""Where a real run's time goes: a stopwatch in each worker, and the server's account of what they tell it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from paceline.transports.shared_memory import Timing

KEPT = 2000
WARM_UP = 10
LEVELS = 33


class Stopwatch:
    """Started by each reply; `step()` ends a step, and says how long the exchange before it took."""

    def __init__(self) -> None:
        self._pushed = time.perf_counter()
        self.replied()

    def step(self) -> Timing:
        """The step is done and about to be pushed."""
        self._pushed = time.perf_counter()
        return Timing(time.process_time() - self._cpu, self._pushed - self._began, self._waited)

    def replied(self) -> None:
        """The reply has come: the next step begins."""
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._waited = self._began - self._pushed


class WorkerTimes:
    """The latest steps of one worker, its first few left out."""

    def __init__(self) -> None:
        self._steps: deque[Timing] = deque(maxlen=KEPT)
        self._seen = 0
        self.computing = self.waiting = 0.0

    def add(self, timing: Timing, steps: int) -> None:
        self._seen += 1
        self.computing += timing.wall
        self.waiting += timing.waited
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
