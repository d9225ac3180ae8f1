"""The simulated network, and capacities (links, cores) that concurrent users share evenly."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.errors import UserError
from paceline.settings.fault_table import Fault
from paceline.settings.notation import bytes_per_second, seconds
from paceline.simulation.event_queue import Action, EventQueue


@dataclass(frozen=True)
class NetworkLink:
    """A full-duplex link: bytes per second each way, plus a latency per message."""

    bandwidth: float
    latency: float = 0.0


def parse_link(text: str) -> NetworkLink:
    """Parse `BANDWIDTH[,LATENCY]`.

    >>> parse_link("1gbit,0.2ms")
    NetworkLink(bandwidth=125000000.0, latency=0.0002)
    """
    parts = text.split(",")
    try:
        if len(parts) > 2:
            raise UserError("there are more than two parts")
        return NetworkLink(bytes_per_second(parts[0]), seconds(parts[1]) if len(parts) == 2 else 0.0)
    except UserError as error:
        raise UserError(f"--link '{text}': {error}; give BANDWIDTH,LATENCY as in 1gbit,0.2ms") from None


def ring_seconds(num_workers: int, nbytes: int, link: NetworkLink) -> float:
    """Return the time of a ring all-reduce: 2 (n - 1) steps, each sends 1/n of the bytes over every link at once.

    >>> ring_seconds(4, 1000, NetworkLink(1000.0, 0.5))
    4.5
    """
    return 2 * (num_workers - 1) * (nbytes / num_workers / link.bandwidth + link.latency)


@dataclass(slots=True, eq=False)
class CapacityShare:
    """One job on a shared capacity; it can be cancelled."""

    action: Action
    argument: Any
    ended: bool = False


class SharedCapacity:
    """Divides a capacity evenly among its jobs, at most `max_rate` each; sharing loses the part `switching_loss` of it.

    All jobs get the same rate, so one number counts the service per job since the start: a job that needs `work` ends
    when this number has grown by `work`. A change therefore costs O(log jobs).
    """

    def __init__(self, queue: EventQueue, capacity: float, max_rate: float, switching_loss: float = 0.0) -> None:
        self._queue, self._capacity, self._max_rate, self._rate = queue, capacity, max_rate, max_rate
        self._shared_capacity = capacity * (1.0 - switching_loss)
        self._service = self._since = 0.0
        self._jobs: list[tuple[float, int, CapacityShare]] = []
        self._num_jobs = self._serial = 0
        self._next_check = math.inf

    def add(self, work: float, action: Action, argument: Any) -> CapacityShare:
        """Start a job of size `work`; call `action(argument)` when it is done."""
        self._update_service()
        job = CapacityShare(action, argument)
        self._serial += 1
        self._count(1)
        heapq.heappush(self._jobs, (self._service + work, self._serial, job))
        self._plan_next()
        return job

    def cancel(self, job: CapacityShare) -> None:
        """Cancel a job and give its capacity to the others."""
        if not job.ended:
            self._update_service()
            job.ended = True
            self._count(-1)
            self._plan_next()

    def _count(self, change: int) -> None:
        """Change the number of jobs and recompute the rate of each."""
        self._num_jobs += change
        if self._num_jobs:
            alone = self._capacity >= self._num_jobs * self._max_rate
            self._rate = self._max_rate if alone else self._shared_capacity / self._num_jobs

    def _update_service(self) -> None:
        """Advance the service counter to the current time."""
        now = self._queue.now
        if self._num_jobs:
            self._service += (now - self._since) * self._rate
        self._since = now

    def _plan_next(self) -> None:
        """Plan a check at the end of the next job, unless an earlier check is planned: that one plans the next."""
        jobs = self._jobs
        while jobs and jobs[0][2].ended:
            heapq.heappop(jobs)
        if jobs:
            missing = jobs[0][0] - self._service
            end = self._queue.now + (missing / self._rate if missing > 0.0 else 0.0)
            if end < self._next_check:
                self._next_check = end
                self._queue.at(end, self._check, end)

    def _check(self, planned: float) -> None:
        if planned != self._next_check:
            return  # an earlier check has replaced this one
        self._next_check = math.inf
        self._update_service()
        jobs = self._jobs
        while jobs and jobs[0][2].ended:
            heapq.heappop(jobs)
        if not jobs:
            return
        missing, now = jobs[0][0] - self._service, self._queue.now
        if missing > 0.0 and now + missing / self._rate > now:
            self._plan_next()  # jobs added meanwhile made this one slower
        else:
            end, _, job = heapq.heappop(jobs)
            self._service = max(self._service, end)
            job.ended = True
            self._count(-1)
            self._plan_next()
            job.action(job.argument)


@dataclass(slots=True)
class WorkerLink:
    """The network link of one worker, over all its incarnations."""

    down_until: float = -1.0
    message_faults: dict[str, list[Fault]] = field(default_factory=lambda: {"push": [], "reply": []})
    seconds_in_flight: float = 0.0  # total seconds that messages have spent on the link


Transfer: TypeAlias = tuple[WorkerLink, tuple[str, int] | None, Action, Any, float]
"""Link, (`push` or `reply`, bytes) if the bandwidth counts, recipient, message, start time."""


class SimulatedNetwork:
    """Delivers messages: all workers share the bandwidth of each direction; the latency is added."""

    def __init__(self, queue: EventQueue, bandwidth: float | None, latency: float, num_workers: int) -> None:
        self._queue, self._latency = queue, latency
        self._shared: dict[str, SharedCapacity] = {}
        if bandwidth is not None:
            self._shared = {way: SharedCapacity(queue, bandwidth, bandwidth) for way in ("push", "reply")}
        self.links = [WorkerLink() for _ in range(num_workers)]
        self.server_down = False

    def send(
        self, worker: int, way: str, arrive: Action, message: Any, lost: Action, request: Any, nbytes: int | None
    ) -> None:
        """Send `message` to `arrive`, or call `lost(request)` if it is lost; without `nbytes` it takes no bandwidth."""
        link, now = self.links[worker], self._queue.now
        if self.server_down or now < link.down_until:
            lost(request)
            return
        faults = link.message_faults[way]
        fault = faults.pop(0) if faults and nbytes is not None else None
        transfer = (link, (way, nbytes) if nbytes and self._shared else None, arrive, message, now)
        if fault is None:
            self._begin(transfer)
        elif fault.kind == "lose":
            lost(request)
        else:
            self._queue.at(now + fault.lasts, self._begin, transfer)
            if fault.kind == "duplicate":
                self._begin(transfer)

    def _begin(self, transfer: Transfer) -> None:
        if (load := transfer[1]) is None:
            self._end(transfer)
        else:
            self._shared[load[0]].add(load[1], self._end, transfer)

    def _end(self, transfer: Transfer) -> None:
        link, _, arrive, message, since = transfer
        arrival = self._queue.now + self._latency
        link.seconds_in_flight += arrival - since
        if self._latency:
            self._queue.at(arrival, arrive, message)
        else:
            arrive(message)
