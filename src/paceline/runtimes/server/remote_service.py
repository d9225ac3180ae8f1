"""The server of workers on other machines: they come over TCP, may lose their connection, and find back.

A worker that is silent for longer than its own past explains is gone; one that comes back in time has missed nothing.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from paceline.config import to_dict
from paceline.core.buffers import Sizes
from paceline.core.failure_detector import Deadlines
from paceline.core.messages import Push, Reply
from paceline.errors import ProtocolError
from paceline.runs.folder import ALL_GONE, NOT_COME
from paceline.runtimes.server.file_service import Observers
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.service import GRACE_SECONDS, Control, Line, Service
from paceline.runtimes.server.worker_hosts import Machines
from paceline.system.environment import package_version
from paceline.transports.connection import ANYWHERE, parse_address
from paceline.transports.listener import Applicant, Listener
from paceline.transports.protocol import Heard, Hello, Peer
from paceline.transports.tcp_server import TcpPeer

FIRST_SECONDS, FLOOR_SECONDS, CEILING_SECONDS = 10.0, 5.0, 60.0
"""How long a silence may last before anything was learned, at least, and at most."""
LOOK_SECONDS, BUSY_SECONDS = 0.25, 1.0
"""Time passes even when nobody says anything; a longer look away than this was our own doing."""
ABANDONED_SECONDS = 120.0
REMIND_SECONDS, RAREST_SECONDS = 30.0, 1800.0
"""When the user is first told that workers are still awaited, and how rarely at last."""
SIGN_SECONDS = 0.5
"""Signs of life that come faster than this teach nothing new."""


class OwnLine(Control):
    """Stands for the line to a supervisor where the server is a command of its own: it reports, and stops itself."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        connection, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(connection)
        self._report = report

    def send(self, row: dict[str, Any]) -> None:
        """What a supervisor would tell the user."""
        if row["kind"] != "clock":
            self._report(row)

    def stop(self, reason: str) -> None:
        """End the run at the next safe moment; may be called by a signal's handler."""
        self._other.send(json.dumps({"kind": "stop", "reason": reason}).encode())


class ClusterService(Service):
    """Doors over TCP. Who applies gets a number; who is cut off keeps its place until its deadline."""

    def __init__(self, host: Host, line: OwnLine, expected: dict[str, Any], largest: Sizes, listener: Listener) -> None:
        super().__init__(host, line, expected)
        self._listener, self._largest = listener, largest
        self.observers = Observers(host.folder)
        host.accounts.way = "sending"
        self._tcp: dict[int, TcpPeer] = {}
        self._writing: set[int] = set()
        """Lines that wake us when they can be written."""
        self._deadlines = Deadlines(FIRST_SECONDS, FLOOR_SECONDS, CEILING_SECONDS)
        self._signs: dict[int, float] = {}
        self._machines = Machines()
        self._empty_since: float | None = None
        self._line_since: float | None = None
        """Since when somebody waits at the starting line of a run that goes on."""
        self._looked = self._since = time.monotonic()
        self._next_look = 0.0
        self._remind_after = REMIND_SECONDS
        self.wait_seconds: float | None = None
        """Until not all workers have come in vain."""
        self._welcome: dict[str, Any] = {"config": to_dict(host.config), "run": host.folder.path.name}
        if largest.own:
            host.may_be_cut = self._own_states_are_here
        self._listen(listener, self._let_in)

    def _listen_to_signals(self) -> None:
        """The command that started us has handlers already, and stops us by the line."""

    def _patience(self) -> float:
        return LOOK_SECONDS

    def _all_know(self, deadline: float) -> bool:
        """Until all have hung up: what is still on its way to a worker would be lost with us."""
        here = [door for door in self._tcp.values() if door.fileno() >= 0]
        patience = max((door.last_heard + GRACE_SECONDS for door in here), default=deadline)
        if time.monotonic() > max(deadline, patience):
            return True
        return not here and super()._all_know(deadline)

    def _look_around(self) -> None:
        now = time.monotonic()
        if now - self._looked > BUSY_SECONDS:  # scoring, say: what came meanwhile is not read yet
            self._deadlines.excuse(now - self._looked)
        self._looked = now
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        self._listener.expire(now)
        for text in self._listener.complaints():
            self.host.events.write("turned_away", self.host.clock.now(), text=text)
            self._note(text)
        if self.host.server.over:
            return
        self.host.look_for_requests()  # also while nobody pushes
        if not self.host.server.started:
            self._await_workers(now - self._since)
        for worker in self._deadlines.due(now):
            self._give_up(worker, now)
        self._begin_without_the_lost(now)
        if self._empty_since is not None and now > self._empty_since + ABANDONED_SECONDS:
            self.host.stop(ALL_GONE)

    def _begin_without_the_lost(self, now: float) -> None:
        """After a restart nobody is waited for longer than for a worker that fell silent; it may join later."""
        server = self.host.server
        if server.started or not self.host.first_incarnation:  # a new run waits for all that it was promised
            self._line_since = None
            return
        if self._line_since is None and server.num_live:
            self._line_since = now
        if self._line_since is None or now < self._line_since + CEILING_SECONDS:
            return
        for worker in server.awaited:
            if worker not in self.doors:
                self._note(
                    f"worker {worker} did not come back within {CEILING_SECONDS:g} s: the run goes on without it"
                )
                self.miss(worker)

    def _await_workers(self, seconds: float) -> None:
        """Training has not begun: say so now and then, or give up where that was asked for."""
        if self.wait_seconds is not None and seconds > self.wait_seconds:
            self.host.stop(NOT_COME)
        elif seconds > self._remind_after:
            self._remind_after += min(self._remind_after, RAREST_SECONDS)
            here, all_of_them = len(self.doors), self.host.server.num_workers
            host, port = parse_address(self._listener.address)
            where = f"{socket.gethostname()}:{port}" if host in ANYWHERE else self._listener.address
            way = f"'paceline worker --connect {where}'"
            self._note(f"{here} of {all_of_them} workers are here after {seconds:.0f} s: start the others with {way}")

    def _give_up(self, worker: int, now: float) -> None:
        door = self._tcp[worker]
        self._note(f"worker {worker} was silent for {now - door.last_heard:.1f} s: it is taken for lost")
        self._send_off(door)

    def _nobody_left(self) -> None:
        """Others may come yet: whoever starts workers may start them again."""
        self._empty_since = time.monotonic()
        self._note(f"no worker is left: waiting {ABANDONED_SECONDS:g} s for one to come")

    def _note(self, text: str) -> None:
        self.control.send({"kind": "note", "text": text})

    def _watch(self, door: TcpPeer) -> None:
        """Be woken when the door can be read, and when it can be written where something waits to be sent."""
        line, wants = door.fileno(), door.wants_write
        if line >= 0 and wants is not (line in self._writing):
            self._poll.modify(line, select.EPOLLIN | (select.EPOLLOUT if wants else 0))
            (self._writing.add if wants else self._writing.discard)(line)

    def _hear(self, worker: int) -> None:
        """A sign of life; the next is expected from now on."""
        now = time.monotonic()
        if now - self._signs.get(worker, 0.0) > SIGN_SECONDS:
            self._signs[worker] = now
            self._deadlines.heard(worker, now)
            self.host.accounts.deadlines.beat(worker, self.host.clock.source())
        self._deadlines.asked(worker, now)

    # applicants

    def _let_in(self) -> None:
        self.look_at(self._listener.serve())

    def look_at(self, applicants: list[Applicant]) -> None:
        """Give each a place, its old one or a new one, or tell it why not."""
        for applicant in applicants:
            known = self._known(applicant) if applicant.fields.get("again") else None
            if applicant.fields.get("observer"):
                self.observers.admit(applicant)
            elif applicant.fields.get("shard"):
                self._turn_away(applicant, self._no_room_for_servers())
            elif known is not None:
                self._take_back(applicant, known)
            else:
                self._consider(applicant)

    def _no_room_for_servers(self) -> str:
        return "one server has all weights of this run: --servers S makes it several"

    def _known(self, applicant: Applicant) -> TcpPeer | None:
        """The door of a worker that was here before; None where this server is another than it knew."""
        door = self._tcp.get(applicant.fields.get("worker", -1))
        return door if door is not None and door.incarnation == applicant.fields.get("incarnation") else None

    def _consider(self, applicant: Applicant) -> None:
        wanted = applicant.fields.get("worker")
        if applicant.fields.get("again") and self._free_number(wanted) is None:
            wanted = None  # another has its place: any will do
        why_not = self._why_not(applicant.fields)
        worker = self._free_number(wanted) if why_not is None else None
        if worker is None:
            self._turn_away(applicant, why_not or self._no_place(wanted))
            return
        if worker in self._tcp:  # a newcomer is sure, and that the other comes back is not
            self._send_off(self._tcp[worker])
        member = self.host.server.members.get(worker)
        least = self.host.first_incarnation
        incarnation = max(least, member.incarnation + 1) if member is not None else least
        known = {"worker": worker, "incarnation": incarnation}
        device = applicant.fields.get("device", "cpu")
        if device != "cpu":
            self._note(f"worker {worker} computes on {device}: 'paceline replay' will depart from its first push on")
        for oddity in self._machines.come(worker, applicant.fields.get("place"), time.time()):
            self._note(oddity)
        door = applicant.welcome({**self._welcome, **known}, self._largest)
        self._seat(door)

    def _turn_away(self, applicant: Applicant, why: str) -> None:
        applicant.refuse(why)
        self.host.events.write("turned_away", self.host.clock.now(), text=f"{applicant.peer}: {why}")
        self._note(f"{applicant.peer} was turned away: {why}")

    def _why_not(self, fields: dict[str, Any]) -> str | None:
        version = package_version("paceline")
        if fields.get("version") != version:
            return f"it has paceline {fields.get('version')}, and this run is served by {version}: install the same"
        device = fields.get("device", "cpu")
        if device != "cpu" and self.host.config.recovery != "checkpoint":
            return (
                f"it computes on {device}, and what is made there cannot be made again here bit for bit after a crash: "
                "start the server with --recovery checkpoint"
            )
        return "training is over" if self.host.server.over else None

    def _free_number(self, wanted: Any) -> int | None:
        """The number asked for, or the lowest that still has work and nobody has, or somebody who is cut off."""
        members, free, cut_off = self.host.server.members, [], []
        for worker in range(self.host.server.places):
            if wanted not in (None, worker) or (worker in members and members[worker].spent):
                continue
            if worker not in self.doors:
                free.append(worker)
            elif self._tcp[worker].fileno() < 0:
                cut_off.append(worker)
        return next(iter(free + cut_off), None)

    def _no_place(self, wanted: Any) -> str:
        last = self.host.server.places - 1
        if wanted is not None:
            return f"worker {wanted} of 0 to {last} is here already, has done its work, or does not exist"
        return f"all {last + 1} workers of this run are here: start the server with a larger --max-workers"

    def _take_back(self, applicant: Applicant, door: TcpPeer) -> None:
        """A worker whose connection broke goes on where it was."""
        self._cut_off(door)
        applicant.welcome_back(door, {})
        self._listen(door, lambda: self._serve_tcp(door))
        self._watch(door)
        self._hear(door.worker)
        self._note(f"worker {door.worker} is back after its connection broke")

    # workers

    def _seat(self, door: TcpPeer) -> None:
        """One more worker."""
        self.doors[door.worker] = self._tcp[door.worker] = door
        self._empty_since = None
        self._dismissed.discard(door.worker)
        self._listen(door, lambda: self._serve_tcp(door))
        self._watch(door)
        self._hear(door.worker)

    def _serve_tcp(self, door: TcpPeer) -> None:
        if door.wants_write:
            door.flush()
        try:
            message = door.receive()
        except ProtocolError as error:
            self._note(str(error))
            self._send_off(door)
            return
        if message is None:
            self._lose(door)
            return
        self._hear(door.worker)
        if isinstance(message, Push):
            self._take(door, message)
        elif isinstance(message, Hello):
            self.welcome(door, message)
        elif not isinstance(message, Heard):
            self.host.note_figures(message.worker, message.values)
        self._watch(door)

    def _lose(self, door: TcpPeer) -> None:
        """The connection broke: wait for it to come back, unless there is nothing to come back for."""
        if self.host.server.over or door.left or door.worker in self._dismissed or door.slot is None:
            self._send_off(door)
        else:
            self._cut_off(door)

    def _cut_off(self, door: TcpPeer) -> None:
        self._stop_listening(door)
        door.close()

    def _stop_listening(self, line: Line) -> None:
        if line.fileno() >= 0:  # else its connection broke before
            self._writing.discard(line.fileno())
            super()._stop_listening(line)

    def _send_off(self, door: Peer) -> None:
        """The worker leaves the run."""
        self._deadlines.forget(door.worker)
        self._signs.pop(door.worker, None)
        self._machines.leave(door.worker)
        if self._tcp.get(door.worker) is door:
            del self._tcp[door.worker]
        super()._send_off(door)

    def _refuse(self, door: Peer, why: str) -> None:
        self._tcp[door.worker].dismiss(f"{why}: give it the same code and the same data")
        super()._refuse(door, why)

    def _answer(self, reply: Reply) -> None:
        door = self._tcp.get(reply.worker)
        if door is None:
            return
        door.wants_own = bool(self._largest.own) and self.host.is_cut_due
        super()._answer(reply)
        self._watch(door)

    def _own_states_are_here(self) -> bool:
        """Whether every worker's latest push brought its own state along, as they do once a cut is due."""
        members = self.host.server.members
        return all(
            door.own_seq == members[worker].seq or members[worker].seq < 0
            for worker, door in self._tcp.items()
            if worker in members and members[worker].live and not members[worker].done
        )
