"""What a simulated cluster shares: links and cores, each a capacity divided evenly over whoever uses it just now."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.errors import UserError
from paceline.settings.fault_table import Fault
from paceline.settings.notation import bytes_per_second, seconds
from paceline.simulation.event_queue import Action, Agenda


@dataclass(frozen=True)
class Link:
    """A full-duplex link: bytes a second each way, and how long a message is under way besides."""

    bandwidth: float
    latency: float = 0.0


def parse_link(text: str) -> Link:
    """`BANDWIDTH[,LATENCY]`.

    >>> parse_link("1gbit,0.2ms")
    Link(bandwidth=125000000.0, latency=0.0002)
    """
    parts = text.split(",")
    try:
        if len(parts) > 2:
            raise UserError("there are more than two parts")
        return Link(bytes_per_second(parts[0]), seconds(parts[1]) if len(parts) == 2 else 0.0)
    except UserError as error:
        raise UserError(f"--link '{text}': {error}; give BANDWIDTH,LATENCY as in 1gbit,0.2ms") from None


def ring_seconds(num_workers: int, nbytes: int, link: Link) -> float:
    """A ring all-reduce: 2 (n - 1) steps, each of which sends an n-th of the bytes over every link at once.

    >>> ring_seconds(4, 1000, Link(1000.0, 0.5))
    4.5
    """
    steps = 2 * (num_workers - 1)
    return steps * (nbytes / num_workers / link.bandwidth + link.latency)


class Job:
    """One user's share of a capacity; it may be called off."""

    __slots__ = ("action", "argument", "off")

    def __init__(self, action: Action, argument: Any) -> None:
        self.action, self.argument = action, argument
        self.off = False


class Shared:
    """A capacity divided evenly over its jobs; no job can use more than `most`, and taking turns wastes `turns` of it.

    All jobs are served at the same rate, so the service a job has received since the beginning is one number for all:
    a job that needs `work` ends when that number has grown by `work`. That makes a change cost O(log jobs).
    """

    def __init__(self, agenda: Agenda, capacity: float, most: float, turns: float = 0.0) -> None:
        self._agenda = agenda
        self._in_turns = capacity * (1.0 - turns)
        self._capacity, self._most = capacity, most
        self._service = self._since = 0.0
        self._rate = most
        self._jobs: list[tuple[float, int, Job]] = []
        self._num_jobs = self._serial = 0
        self._next_look = math.inf

    def add(self, work: float, action: Action, argument: Any) -> Job:
        """Do `work`, then call `action(argument)`."""
        self._settle()
        job = Job(action, argument)
        self._serial += 1
        self._count(1)
        heapq.heappush(self._jobs, (self._service + work, self._serial, job))
        self._plan_next()
        return job

    def call_off(self, job: Job) -> None:
        """Give the capacity of a job that will not be finished back to the others."""
        if not job.off:
            self._settle()
            job.off = True
            self._count(-1)
            self._plan_next()

    def _count(self, change: int) -> None:
        """One job more or less, and what each of them is served a second from now on."""
        self._num_jobs += change
        if self._num_jobs:
            alone = self._capacity >= self._num_jobs * self._most
            self._rate = self._most if alone else self._in_turns / self._num_jobs

    def _settle(self) -> None:
        """Bring the service up to now."""
        now = self._agenda.now
        if self._num_jobs:
            self._service += (now - self._since) * self._rate
        self._since = now

    def _plan_next(self) -> None:
        """Plan to look when the next job ends, unless a look is planned before: that one will plan again."""
        jobs = self._jobs
        while jobs and jobs[0][2].off:
            heapq.heappop(jobs)
        if jobs:
            missing = jobs[0][0] - self._service
            end = self._agenda.now + (missing / self._rate if missing > 0.0 else 0.0)
            if end < self._next_look:
                self._next_look = end
                self._agenda.at(end, self._look, end)

    def _look(self, planned: float) -> None:
        if planned != self._next_look:
            return  # an earlier look was planned since
        self._next_look = math.inf
        self._settle()
        jobs = self._jobs
        while jobs and jobs[0][2].off:
            heapq.heappop(jobs)
        if not jobs:
            return
        missing, now = jobs[0][0] - self._service, self._agenda.now
        if missing > 0.0 and now + missing / self._rate > now:
            self._plan_next()  # others came meanwhile, so it takes longer
        else:
            self._finish(*heapq.heappop(jobs))

    def _finish(self, end: float, serial: int, job: Job) -> None:
        self._service = max(self._service, end)
        job.off = True
        self._count(-1)
        self._plan_next()
        job.action(job.argument)


UP, DOWN = "push", "reply"


@dataclass(slots=True)
class Line:
    """One worker's connection, over all its incarnations."""

    cut_until: float = -1.0
    astray: dict[str, list[Fault]] = field(default_factory=lambda: {UP: [], DOWN: []})
    under_way: float = 0.0
    """Seconds that messages have spent on it."""


Cargo: TypeAlias = tuple[Line, tuple[str, int] | None, Action, Any, float]
"""Whose line, which way with how many bytes on the link, to whom, what, and since when."""


class Wire:
    """Carries messages: their bytes over the link's direction that all workers share, then the latency."""

    def __init__(self, agenda: Agenda, bandwidth: float | None, latency: float, num_workers: int) -> None:
        self._agenda, self._latency = agenda, latency
        self._shared: dict[str, Shared] = {}
        if bandwidth is not None:
            self._shared = {way: Shared(agenda, bandwidth, bandwidth) for way in (UP, DOWN)}
        self.lines = [Line() for _ in range(num_workers)]
        self.is_down = False

    def carry(
        self, worker: int, way: str, arrive: Action, message: Any, lost: Action, asked: Any, nbytes: int | None
    ) -> None:
        """Bring `message` to `arrive`, or call `lost(asked)` where it goes astray; one without `nbytes` is light."""
        line, now = self.lines[worker], self._agenda.now
        if self.is_down or now < line.cut_until:
            lost(asked)
            return
        astray = line.astray[way]
        fault = astray.pop(0) if astray and nbytes is not None else None
        cargo = (line, (way, nbytes) if nbytes and self._shared else None, arrive, message, now)
        if fault is None:
            self._load(cargo)
        elif fault.kind == "lose":
            lost(asked)
        else:
            self._agenda.at(now + fault.lasts, self._load, cargo)
            if fault.kind == "duplicate":
                self._load(cargo)

    def _load(self, cargo: Cargo) -> None:
        load = cargo[1]
        if load is None:
            self._unload(cargo)
        else:
            way, nbytes = load
            self._shared[way].add(nbytes, self._unload, cargo)

    def _unload(self, cargo: Cargo) -> None:
        line, _, arrive, message, since = cargo
        there = self._agenda.now + self._latency
        line.under_way += there - since
        if self._latency:
            self._agenda.at(there, arrive, message)
        else:
            arrive(message)
