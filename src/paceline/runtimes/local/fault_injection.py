"""Inject a table of faults into the processes of a run: kill, pause, slow, start and drain workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunConfig, max_workers_of
from paceline.errors import UserError
from paceline.settings.fault_table import Fault, read_faults
from paceline.settings.strategies import on_ring

PERIOD = 0.02  # seconds: a slowed process is stopped for a part of every period


def faults_for_processes(config: RunConfig) -> tuple[Fault, ...]:
    """Read the config's table of faults, if any. Raise UserError for faults that need the simulator."""
    if config.faults is None:
        return ()
    faults = read_faults(Path(config.faults), max_workers_of(config))
    ring = on_ring(config)
    for fault in faults:
        why = _impossible(fault, ring)
        if why is not None:
            raise UserError(f"{config.faults}: {fault.kind} at {fault.at:g} s: {why}")
    return faults


def _impossible(fault: Fault, ring: bool) -> str | None:
    """Why a fault cannot be injected into processes and what to do instead, or None if it can."""
    kind, returns, simulate = fault.kind, fault.restart_after is not None, "try it in 'paceline simulate'"
    known, sync = kind in ("crash", "pause", "slow", "join", "drain"), "or choose --strategy sync"
    kills_host = kind == "crash" and fault.worker == 0
    reasons = (
        (not known, f"processes of one machine cannot have the fault '{kind}'; {simulate}"),
        (kind == "slow" and fault.factor < 1, f"a process cannot be made faster (factor {fault.factor:g}); {simulate}"),
        (fault.noticed_after, f"a killed process is noticed at once; leave noticed_after out, or {simulate}"),
        (ring and kind in ("join", "drain"), f"no worker can join or leave a ring; leave it out, {sync}"),
        (ring and returns, f"no worker can return to a ring; leave restart_after out, {sync}"),
        (ring and kills_host, f"worker 0 of a ring keeps the run's folder; kill another, {sync}"),
    )
    return next((reason for holds, reason in reasons if holds), None)


@dataclass(frozen=True)
class PeriodicStop:
    """A worker that is stopped for a share of every period, from `begin` to `end`. A pause is a share of 1."""

    worker: int
    begin: float
    end: float
    share: float

    def stops(self, now: float) -> bool:
        """Whether the worker is stopped at `now`."""
        return self.begin <= now < self.end and self._phase(now) < self.share * PERIOD

    def next_change(self, now: float) -> float:
        """When the worker is next stopped or continued."""
        if self.share == 1:
            return self.end
        phase = self._phase(now)
        return min(self.end, now - phase + (self.share * PERIOD if phase < self.share * PERIOD else PERIOD))

    def _phase(self, now: float) -> float:
        return (now - self.begin) % PERIOD


class FaultInjector:
    """Injects the faults of a table at their times, and continues every process that it stopped.

    `tell` gets a fault, its description, and whether a killed worker will return. `restart` starts a worker.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        tell: Callable[[Fault, str, bool], None],
        restart: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._due = deque(faults)
        self._tell, self._restart, self._clock, self._kill = tell, restart, clock, kill
        self._zero: float | None = None
        self._pids: dict[int, int] = {}
        self._killed: dict[int, tuple[Fault, float]] = {}
        self._restarts: list[tuple[float, int]] = []
        self._holds: list[PeriodicStop] = []
        self._stopped: dict[int, int] = {}
        self._over = False

    def set_clock(self, now: float, runs: bool) -> tuple[Fault, ...]:
        """Set the run's clock to `now`. If it runs no more, training is over: return the faults still to come."""
        self._zero, left = self._clock() - now, tuple(self._due)
        if runs:
            return ()
        self.close()
        return left

    def correct(self, now: float) -> None:
        """Set the run's clock again: it stops during evaluations, which are not reported."""
        if self._zero is not None:
            self._zero = self._clock() - now

    def started(self, worker: int, pid: int) -> None:
        """Note the process of a worker."""
        self._pids[worker] = pid

    def ended(self, pid: int) -> tuple[str, ...]:
        """Note that a process ended. If a fault killed it, return words for it, and restart it if the table asks."""
        for worker in [worker for worker, own in self._pids.items() if own == pid]:
            del self._pids[worker]
            self._stopped.pop(worker, None)
        if pid not in self._killed:
            return ()
        fault, when = self._killed.pop(pid)
        assert fault.worker is not None
        if fault.restart_after is None or self._over:
            return ("by the table of faults",)
        self._restarts.append((when + fault.restart_after, fault.worker))
        return ("by the table of faults", "to come back")

    def timeout(self) -> float | None:
        """Seconds until the next action, or None if there is none."""
        now = self._clock()
        times = [when for when, _ in self._restarts] + [hold.next_change(now) for hold in self._holds]
        if self._due and self._zero is not None:
            times.append(self._zero + self._due[0].at)
        return max(0.0, min(times) - now) if times else None

    def act(self) -> None:
        """Do everything that is due."""
        now = self._clock()
        while self._due and self._zero is not None and self._zero + self._due[0].at <= now:
            self._fire(self._due.popleft(), now)
        due = [worker for when, worker in self._restarts if when <= now]
        self._restarts = [(when, worker) for when, worker in self._restarts if when > now]
        for worker in due:
            self._restart(worker)
        self._holds = [hold for hold in self._holds if now < hold.end]
        self._hold({hold.worker for hold in self._holds if hold.stops(now)})

    def close(self) -> None:
        """Continue all stopped processes and inject nothing more, because training is over or has failed."""
        self._over = True
        self._due.clear()
        self._restarts.clear()
        self._holds.clear()
        self._hold(set())

    def _fire(self, fault: Fault, now: float) -> None:
        assert fault.worker is not None, "a table that was checked names a worker"
        name, pid = f"worker {fault.worker}", self._pids.get(fault.worker)
        if fault.kind in ("join", "drain"):
            comes = fault.kind == "join" and pid is None
            what = "is to be drained" if fault.kind == "drain" else "joins" if comes else "is here already"
            self._tell(fault, f"fault at {fault.at:g} s: {name} {what}", comes)
            if comes:
                self._restart(fault.worker)
        elif fault.kind != "crash":
            share = 1.0 if fault.kind == "pause" else 1 - 1 / fault.factor
            self._holds.append(PeriodicStop(fault.worker, now, now + fault.lasts, share))
            how = "stands still" if fault.kind == "pause" else f"is slowed {fault.factor:g} times"
            what = f"{how} for {fault.lasts:g} s" if pid is not None else f"is not there for the {fault.kind}"
            self._tell(fault, f"fault at {fault.at:g} s: {name} {what}", False)
        elif pid is None or pid in self._killed:
            self._tell(fault, f"fault at {fault.at:g} s: {name} is not there to be killed", False)
        else:
            back = f", to come back {fault.restart_after:g} s later" if fault.restart_after is not None else ""
            self._killed[pid] = fault, now
            self._tell(fault, f"fault at {fault.at:g} s: {name} is killed{back}", bool(back))
            self._signal(pid, signal.SIGKILL)

    def _hold(self, workers: set[int]) -> None:
        """Stop these workers' processes and continue all others that were stopped."""
        for worker in self._stopped.keys() - workers:
            self._signal(self._stopped[worker], signal.SIGCONT)
            del self._stopped[worker]
        for worker in workers & self._pids.keys() - self._stopped.keys():
            self._stopped[worker] = self._pids[worker]  # first, so that `close` continues it after an interrupt here
            self._signal(self._pids[worker], signal.SIGSTOP)

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # its end will be reported
            self._kill(pid, number)
