"""Admit workers that come over TCP: check them, give them a number, and warn about the machines they are on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from paceline.config import RunConfig, to_dict
from paceline.core.buffers import BufferSizes
from paceline.core.membership import Member
from paceline.runs.folder import NOT_COME, RunFolder
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import Peers, TcpPeers
from paceline.runtimes.server.service import Dispatcher
from paceline.system.environment import machine_name, package_version
from paceline.system.terminal import seconds_text
from paceline.transports.auth import worker_command
from paceline.transports.listener import JoinRequest
from paceline.transports.tcp_server import TcpPeer

CEILING_SECONDS = 60.0  # the longest that a silent worker is waited for
REMIND_SECONDS, RAREST_SECONDS = 30.0, 1800.0
"""When the user is first reminded of workers that have not joined, and the longest pause between two reminders."""
SKEW_SECONDS = 10.0  # clocks that differ by less are taken as equal, since the message itself was under way


class WorkerHost(NamedTuple):
    """Where a worker computes. Workers of one process take turns and share its threads."""

    machine: str
    cores: int
    process: int
    threads: int
    clock: float  # seconds since 1970 by that machine's clock


def own_place(threads: int) -> dict[str, Any]:
    """What a worker reports about this process when it asks to join."""
    return WorkerHost(machine_name(), os.cpu_count() or 1, os.getpid(), threads, time.time())._asdict()


class WorkerHosts:
    """The machine of each worker. Warns once a machine about too few cores and a clock that is off."""

    def __init__(self) -> None:
        self._places: dict[int, WorkerHost] = {}
        self._crowded, self._off = set[str](), set[str]()  # machines that a warning was given about

    def come(self, worker: int, place: WorkerHost, now: float, since: float | None = None) -> list[str]:
        """Note which machine a new worker computes on; returns warnings about that machine.

        The report was made between `since` and `now`, by the clock here: this process may have been stopped meanwhile.

        >>> machines, here = WorkerHosts(), WorkerHost("m", cores=2, process=71, threads=2, clock=70.0)
        >>> machines.come(0, here, 70.1), machines.come(1, here, 70.1)
        ([], [])
        >>> print(*machines.come(2, here._replace(process=72), 70.1))
        workers 0, 1 and 2 share the 2 cores of a machine with 4 threads, and wait for each other: give each --threads 1
        """
        self._places[worker] = place
        return [*self._crowd(place), *self._skew(worker, place, now, now if since is None else since)]

    def leave(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._places.pop(worker, None)

    def _crowd(self, place: WorkerHost) -> Iterator[str]:
        here = {number: one for number, one in self._places.items() if one.machine == place.machine}
        threads = {one.process: one.threads for one in here.values()}
        total = sum(threads.values())
        if total > place.cores and len(threads) > 1 and place.machine not in self._crowded:
            self._crowded.add(place.machine)
            *others, last = sorted(here)
            what = f"workers {', '.join(map(str, others))} and {last} share the {place.cores} cores of a machine with"
            each = max(1, place.cores // len(threads))
            use = f"give each --threads {each}" if max(threads.values()) > each else "use fewer workers or more cores"
            yield f"{what} {total} threads, and wait for each other: {use}"

    def _skew(self, worker: int, place: WorkerHost, now: float, since: float) -> Iterator[str]:
        behind = since - place.clock if place.clock < since else min(0.0, now - place.clock)
        if abs(behind) > SKEW_SECONDS and place.machine not in self._off:
            self._off.add(place.machine)
            off = f"{seconds_text(round(abs(behind)))} {'behind' if behind > 0 else 'ahead of'} ours"
            what = f"the clock of worker {worker}'s machine is {off}: training does not mind, but dates of files and"
            yield f"{what} certificates will not agree; set it right"


class KnownMembers(Protocol):
    """What the admission of workers reads of a server."""

    finished: bool

    @property
    def members(self) -> Mapping[int, Member]:
        """The workers that have joined, by number."""

    @property
    def max_workers(self) -> int:
        """How many workers may be there at once."""


class JoinableRun(Protocol):
    """What the admission of workers reads of a run: of a Host, or of a run that waits for its first worker."""

    config: RunConfig
    folder: RunFolder
    first_incarnation: int
    on_gpu: set[int]

    @property
    def server(self) -> KnownMembers:
        """The server of the run, or what stands for it."""


class Admission:
    """Decides on a worker's request to join: its number and incarnation, or why it is refused."""

    def __init__(
        self,
        host: JoinableRun,
        peers: Peers[TcpPeer],
        largest: BufferSizes | None,
        welcome: Mapping[str, Any],
        note: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        """`largest` bounds a worker's memory. `welcome` is sent to every worker in addition to the settings.

        `complain` collects refused requests, which may be many.
        """
        self._host, self._peers, self._largest, self._note, self._complain = host, peers, largest, note, complain
        self._welcome = {"config": to_dict(host.config), "run": host.folder.path.name, **welcome}
        self._machines = WorkerHosts()

    def known(self, fields: Mapping[str, Any]) -> TcpPeer | None:
        """The peer of a worker that reconnects; None if this server does not know that very worker."""
        peer = self._peers.by_worker.get(fields.get("worker", -1)) if fields.get("again") else None
        return peer if peer is not None and peer.is_of(fields) else None

    def number_for(self, fields: Mapping[str, Any]) -> int | str:
        """The number that a new worker gets, or why it is refused."""
        if (why_not := self._why_not(fields)) is not None:
            return why_not
        wanted = fields.get("worker")
        number = self._free_number(wanted)
        if number is None and fields.get("again"):  # another worker has its number: any other will do
            wanted, number = None, self._free_number(None)
        return number if number is not None else self._no_place(wanted)

    def admit(self, applicant: JoinRequest, worker: int) -> TcpPeer:
        """Welcome a new worker under a free number."""
        member, least = self._host.server.members.get(worker), self._host.first_incarnation
        incarnation = max(least, member.incarnation + 1) if member is not None else least
        device = applicant.fields.get("device", "cpu")
        (self._host.on_gpu.discard if device == "cpu" else self._host.on_gpu.add)(worker)
        if device != "cpu":
            self._note(f"worker {worker} computes on {device}: 'paceline replay' will differ from its first push on")
        if (place := applicant.fields.get("place")) is not None:
            for warning in self._machines.come(worker, WorkerHost(**place), time.time(), applicant.accepted_at):
                self._note(warning)
        return applicant.welcome({**self._welcome, "worker": worker, "incarnation": incarnation}, self._largest)

    def turn_away(self, applicant: JoinRequest, why: str) -> None:
        """Refuse a request, and tell the user of this server."""
        applicant.refuse(why)
        self._complain(f"{applicant.peer} was turned away: {why}")

    def leave(self, worker: int) -> None:
        """Forget the machine of a worker that has left."""
        self._machines.leave(worker)

    def _why_not(self, fields: Mapping[str, Any]) -> str | None:
        version = package_version("paceline")
        if fields.get("version") != version:
            return f"it has paceline {fields.get('version')}, and this run is served by {version}: install the same"
        device = fields.get("device", "cpu")
        if device != "cpu" and self._host.config.recovery == "log":
            what = f"it computes on {device}, and after a crash the server cannot recompute its pushes bit for bit"
            return f"{what}: start the server with --recovery checkpoint"
        return "training is over" if self._host.server.finished else None

    def _free_number(self, wanted: Any) -> int | None:
        """The lowest number (or the wanted one) that has work left and no worker, or a disconnected one."""
        members, free, disconnected = self._host.server.members, [], []
        for worker in range(self._host.server.max_workers):
            member = members.get(worker)
            if wanted not in (None, worker) or (member is not None and (member.quota_reached or member.expelled)):
                continue
            if worker not in self._peers.by_worker:
                free.append(worker)
            elif self._peers.by_worker[worker].fileno() < 0:
                disconnected.append(worker)
        return next(iter(free + disconnected), None)

    def _no_place(self, wanted: Any) -> str:
        last = self._host.server.max_workers - 1
        members = self._host.server.members.values()
        if wanted is not None:
            if wanted not in range(last + 1):
                return f"this run has workers 0 to {last}, and no worker {wanted}: leave --worker out"
            if wanted in self._peers.by_worker:
                return f"worker {wanted} is here already: leave --worker out"
            member = self._host.server.members.get(wanted)
            return f"worker {wanted} {'was expelled' if member and member.expelled else 'has done its work'}"
        if expelled := sum(member.expelled for member in members):
            return f"no place is free: {expelled} of {last + 1} workers were expelled, and stay out until a resume"
        return f"all {last + 1} workers of this run are here: start the server with a larger --max-workers"


class StartBarrier:
    """Watches a run that has not started: reminds the user of missing workers, and does not wait for lost ones."""

    def __init__(
        self, host: Host, peers: TcpPeers, dispatcher: Dispatcher, address: str, wait_seconds: float | None = None
    ) -> None:
        """After `wait_seconds` the run stops if not all workers have joined."""
        self._host, self._peers, self._dispatcher = host, peers, dispatcher
        self._address, self._wait_seconds = address, wait_seconds
        self._since, self._remind_after = time.monotonic(), REMIND_SECONDS
        self._joined_at: float | None = None  # when the first worker was seen at the start barrier of a resumed run

    def check(self, now: float) -> None:
        """Do what is due at `now`, by the monotonic clock."""
        if not self._host.server.started:
            self._remind(now - self._since)
        self.give_up_lost(now)

    def _remind(self, seconds: float) -> None:
        if self._wait_seconds is not None and seconds > self._wait_seconds:
            self._host.stop(NOT_COME)
        elif seconds > self._remind_after:
            self._remind_after += min(self._remind_after, RAREST_SECONDS)
            here, expected = len(self._peers.by_worker), self._host.server.num_workers
            what = f"{here} of {expected} workers are here after {seconds_text(round(seconds))}"
            how = worker_command(self._address, self._host.folder.path, expected)
            self._dispatcher.note(f"{what}: start the others with {how}")

    def give_up_lost(self, now: float) -> None:
        """Start a resumed run without workers that do not come back in time; they may still join later."""
        server = self._host.server
        if server.started or not self._host.first_incarnation:  # a new run waits for all its workers
            self._joined_at = None
            return
        if self._joined_at is None and server.num_live:
            self._joined_at = now
        if self._joined_at is None or now < self._joined_at + CEILING_SECONDS:
            return
        for worker in server.pending_workers:
            if worker not in self._peers.by_worker:
                what = f"worker {worker} did not come back within {CEILING_SECONDS:g} s"
                self._dispatcher.note(f"{what}: the run goes on without it")
                self._dispatcher.miss(worker)
