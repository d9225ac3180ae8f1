"""Where a real run's time goes: the server's account of the timings that workers send with their pushes."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from paceline.system.cpu import cores
from paceline.transports.protocol import Timing

KEPT, RECENT, WARM_UP = 2000, 33, 10  # steps of one worker: kept, used for medians, left out at the start
LEVELS = 33


class WorkerReport(NamedTuple):
    """A worker's reports so far: seconds it computed, seconds it waited for replies, in so many steps."""

    computing: float
    waited: float
    steps: int
    longest: float  # seconds that it computed for one push
    recent: tuple[tuple[float, float], ...]  # of its latest pushes: seconds of a step, and of the wait before it


class RecentSteps:
    """The latest steps of one worker, without its first few."""

    def __init__(self) -> None:
        self.kept: deque[Timing] = deque(maxlen=KEPT)
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self.pushes = self.steps = 0
        self.computing = self.longest = self.waiting = 0.0

    def row(self) -> dict[str, Any]:
        """Seconds of a step and of an exchange, and the quantiles of a step's processor time over its mean."""
        if not self.kept:
            return {"steps": self.pushes}
        cpu, wall, waited = np.array(self.kept).T
        mean = float(cpu.mean()) or 1e-9
        return {
            "steps": self.pushes,
            "cpu": round(mean, 9),
            "wall": round(float(wall.mean()), 9),
            "waited": round(float(np.median(waited)), 9),
            "waited_least": round(float(np.quantile(waited, 0.1)), 9),
            "quantiles": [round(float(q), 4) for q in np.quantile(cpu / mean, np.linspace(0.0, 1.0, LEVELS))],
        }


class TimingCollector:
    """The server's record: what workers report of their steps, and its own processor time without scoring."""

    def __init__(self) -> None:
        self._workers: defaultdict[int, RecentSteps] = defaultdict(RecentSteps)
        self._began = self._scoring = 0.0
        self._cores = cores()

    def add(self, worker: int, timing: Timing, steps: int = 1) -> None:
        """Record the time that a push of `steps` local steps took."""
        if not self._workers:
            self._began = time.process_time()
        times = self._workers[worker]
        times.pushes += 1
        times.steps += steps
        times.computing += timing.wall
        times.longest = max(times.longest, timing.wall)
        times.waiting += timing.waited
        times.recent.append((timing.wall / steps, timing.waited))
        if times.pushes > WARM_UP:
            times.kept.append(timing._replace(cpu=timing.cpu / steps, wall=timing.wall / steps))

    def report(self, worker: int) -> WorkerReport | None:
        """Sums of this worker's reports; None if it makes none, as in one process."""
        times = self._workers.get(worker)
        if times is None:
            return None
        return WorkerReport(times.computing, times.waiting, times.steps, times.longest, tuple(times.recent))

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Leave the processor time of this block out: the server is scoring, not serving."""
        began = time.process_time()
        try:
            yield
        finally:
            self._scoring += time.process_time() - began

    def row(self, pushes: int) -> dict[str, Any] | None:
        """The fields of a `timing` event; None if no worker reported anything, as in one process."""
        if not self._workers:
            return None
        cpu = time.process_time() - self._began - self._scoring
        rows = {str(worker): times.row() for worker, times in sorted(self._workers.items())}
        return {"server_cpu": round(cpu / max(1, pushes), 9), "cores": self._cores, "workers": rows}

    def shares(self, num_workers: int) -> list[dict[str, float]]:
        """The share of its time that each worker computed and waited, late joiners included."""
        shares = []
        for worker in range(max(num_workers, 1 + max(self._workers, default=0))):
            times = self._workers.get(worker, RecentSteps())
            whole = times.computing + times.waiting or 1.0
            shares.append({"computing": round(times.computing / whole, 4), "waiting": round(times.waiting / whole, 4)})
        return shares


class TrainingClock:
    """Counts seconds of training by `source`. It starts halted, at `seconds` if the run is resumed."""

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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Halt for this block; afterwards go on if the clock was running."""
        was_running = self._since is not None
        self.halt()
        yield
        if was_running:
            self.go()
