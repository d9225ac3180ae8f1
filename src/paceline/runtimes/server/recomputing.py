"""Pushes of a crashed run's log, computed again by the workers that are back, while the server takes them in log order.

Each live worker stands in for the logged worker of its number; what nobody stands in for is computed in this process.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from paceline.core.buffers import Sizes
from paceline.core.failure_detector import Deadlines
from paceline.core.messages import Push, Reply
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.errors import ProtocolError, differing
from paceline.runs.arrival_log import Record
from paceline.runtimes.server.remote_service import ClusterService
from paceline.runtimes.server.service import Control, Line, Service
from paceline.system.environment import machine_kind, package_version
from paceline.transports.listener import Applicant, Listener
from paceline.transports.shared_memory import Hello, ServerDoor
from paceline.transports.tcp_server import TcpServerDoor

AnyDoor = ServerDoor | TcpServerDoor
LOOK_SECONDS = 0.25


class Adopting(Protocol):
    """Whoever goes on with the workers once the log is at its end."""

    def adopt(self, door: Any, hello: Hello | None) -> None: ...


class Part:
    """A logged worker. Its seat in this process always has its weights; its states where nobody else computed last."""

    def __init__(self, seat: Seat, company: Company) -> None:
        self._seat, self._company = seat, company
        self.join, self.memory = seat.join, seat.memory
        self.pending: Reply | None = None
        self.is_away = False
        """Whether a stand-in made the last push, so that our own seat is behind."""

    def recall(self, own: Tensor) -> None:
        """Put the worker's own state back to what these bytes say."""
        self._seat.recall(own)
        self.memory.kept(self._company.server.members[self.join.worker].seq).copy_(own)

    def push(self) -> Push | None:
        """The push that the pending reply is worth, by a stand-in or by ourselves."""
        reply = self.pending
        assert reply is not None
        push = self._company.push_of(self)
        self.pending = None
        if push is not None:
            return push
        if self.is_away:
            self._catch_up(reply)
        self._seat.pending = reply
        return self._seat.push()

    def _catch_up(self, reply: Reply) -> None:
        """A stand-in is lost: our own seat goes on from the last push that was taken."""
        self.is_away = False
        server, worker, memory = self._company.server, reply.worker, self.memory
        if server.differences is not None:
            memory.weights.copy_(server.differences.held[worker])
            memory.num_pulled = 0
        if worker in server.worker_states:
            memory.state.copy_(server.worker_states[worker])
        if memory.sizes.own:
            self._seat.recall(memory.kept(reply.serial - 1))


class StandIn:
    """A live worker that computes for its number's part: it has been sent one reply at most that it owes a push for."""

    def __init__(self, door: AnyDoor) -> None:
        self.door = door
        self.hello: Hello | None = None
        self.part: Part | None = None
        """Whose states it has; None: nobody's yet."""
        self.owes = False
        self.push: Push | None = None
        """What came and was not taken yet."""

    def send(self, part: Part, reply: Reply, server: Server) -> None:
        """Have the push computed that `reply` is worth; the worker waits, so its memory is ours."""
        slot, memory, door = self.door.slot, part.memory, self.door
        assert slot is not None and not self.owes
        door.anew = self.part is not part
        encoded = server.differences is not None and reply.serial > 0 and not door.anew
        if encoded:
            slot.pulled.copy_(memory.pulled)
            slot.num_pulled = memory.num_pulled
        else:
            held = server.differences.held[reply.worker] if server.differences is not None else memory.weights
            slot.weights.copy_(held)
            slot.num_pulled = 0
        if door.anew and reply.serial:
            if reply.worker in server.worker_states:
                slot.state.copy_(server.worker_states[reply.worker])
            slot.kept(reply.serial - 1).copy_(memory.kept(reply.serial - 1))
        if isinstance(door, TcpServerDoor):
            door.wants_own = bool(slot.sizes.own)
        self.part, self.owes = part, True
        door.answer(reply)

    def take(self) -> Push:
        """The push that came, as the logged worker's; its own state is kept here too, should we lose this one."""
        push, self.push = self.push, None
        assert push is not None and self.part is not None and self.door.slot is not None
        self.part.memory.kept(push.seq).copy_(self.door.slot.kept(push.seq))
        self.part.is_away = True
        return push._replace(incarnation=self.part.join.incarnation)


class Company:
    """The workers that are here while the log is computed again; to be looked after between its records."""

    def __init__(self, line: Line, limits: tuple[float, float, float], note: Callable[[str], None]) -> None:
        self._line, self._note = line, note
        self._deadlines = Deadlines(*limits)
        self._stand_ins: dict[int, StandIn] = {}
        self._parts: dict[int, Part] = {}
        self._poll = select.epoll()
        self._poll.register(line.fileno(), select.EPOLLIN)
        self.num_pushes = 0
        """That workers computed."""
        self.first_incarnation = 0
        """Of a worker that joins the run that goes on."""
        self._expected: dict[str, Any] = {}
        self._odd: set[int] = set()

    def meet(self, welcome: dict[str, Any], expected: dict[str, Any], largest: Sizes) -> None:
        """What newcomers are told, what they must have in common with the run, and the most memory they may ask for."""
        self._expected = expected

    def begin(self, server: Server, records: Iterable[Record], incarnation: int, threads: int) -> None:
        """Before the first record: what is to be fed, and to whom; threads are those of joins that did not say."""
        self.server, self.first_incarnation, self._threads = server, incarnation, threads
        self._needed = {(one.worker, one.incarnation, one.seq) for one in records if one.kind == "push"}
        self._wanted = {worker for worker, _, _ in self._needed}

    def part(self, seat: Seat) -> Part:
        """The part of a worker that joins as logged."""
        self._parts[seat.join.worker] = part = Part(seat, self)
        return part

    def send(self, reply: Reply) -> None:
        """A reply is pending: where its push is logged too, let a stand-in compute it."""
        part, stand_in = self._parts[reply.worker], self._stand_ins.get(reply.worker)
        is_needed = (reply.worker, part.join.incarnation, reply.serial) in self._needed and not reply.over
        if stand_in is not None and is_needed and not stand_in.owes and self._fits(stand_in, part):
            stand_in.send(part, reply, self.server)
            self._turn(stand_in)

    def _fits(self, stand_in: StandIn, part: Part) -> bool:
        """Whether the bits come out as logged there."""
        hello, logged = stand_in.hello, part.join.threads or self._threads
        if hello is None or hello.slot.sizes != part.memory.sizes or differing(self._expected, hello.facts):
            return False
        if hello.join.threads != logged and part.join.worker not in self._odd:
            self._odd.add(part.join.worker)
            text = f"computes on {hello.join.threads} threads, in the log on {logged}: its pushes are computed here"
            self._note(f"worker {part.join.worker} {text}")
        return hello.join.threads == logged

    def push_of(self, part: Part) -> Push | None:
        """The push that a stand-in was asked for, waited for; None where there is none to wait for."""
        worker = part.join.worker
        while True:
            stand_in = self._stand_ins.get(worker)
            if stand_in is None or stand_in.part is not part or not (stand_in.owes or stand_in.push):
                return None
            if stand_in.push is not None:
                self.num_pushes += 1
                return stand_in.take()
            self.look(LOOK_SECONDS)

    def look(self, seconds: float = 0.0) -> None:
        """Hear what has come, from those who are here and from those who come."""
        lines = {one.door.fileno(): one for one in self._stand_ins.values()}
        for number, _ in self._poll.poll(seconds):
            if number == self._line.fileno():
                self._let_in()
            elif number in lines:
                self._hear(lines[number])
        for worker in self._deadlines.due(time.monotonic()):
            self._lose(self._stand_ins[worker])

    def _hear(self, stand_in: StandIn) -> None:
        door = stand_in.door
        if isinstance(door, TcpServerDoor) and door.wants_write:
            door.flush()
        try:
            message = door.receive()
        except ProtocolError as error:
            self._note(str(error))
            message = None
        if message is None:
            self._lose(stand_in)
            return
        if isinstance(message, Push):
            stand_in.owes, stand_in.push = False, message
        elif isinstance(message, Hello):
            stand_in.hello = message
        self._turn(stand_in)
        if isinstance(message, Hello):
            self._offer(door.worker)

    def _offer(self, worker: int) -> None:
        """Somebody is ready: it takes over where our own seat is."""
        part = self._parts.get(worker)
        if part is not None and part.pending is not None:
            self.send(part.pending)

    def _turn(self, stand_in: StandIn) -> None:
        """Heard of, or asked: silence counts from now on, while it owes something; and what is there to be sent?"""
        door, now = stand_in.door, time.monotonic()
        self._deadlines.heard(door.worker, now)
        if stand_in.owes:
            self._deadlines.asked(door.worker, now)
        sends = isinstance(door, TcpServerDoor) and door.wants_write
        self._poll.modify(door.fileno(), select.EPOLLIN | (select.EPOLLOUT if sends else 0))

    def _lose(self, stand_in: StandIn) -> None:
        worker = stand_in.door.worker
        self._note(f"worker {worker} was lost while the log is computed again: its pushes are computed here")
        self._poll.unregister(stand_in.door.fileno())
        stand_in.door.close()
        self._deadlines.forget(worker)
        del self._stand_ins[worker]

    def _welcome(self, door: AnyDoor) -> None:
        self._stand_ins[door.worker] = StandIn(door)
        self._poll.register(door.fileno(), select.EPOLLIN)
        self._turn(self._stand_ins[door.worker])

    def _let_in(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """The log is at its end: whoever still computes something has lost its race with us, and is waited for."""
        while any(one.owes for one in self._stand_ins.values()):
            self.look(LOOK_SECONDS)

    def _let_join(self, service: Adopting) -> None:
        """All who are here join the run that goes on; who stood in for somebody begins anew."""
        self._poll.close()
        for stand_in in self._stand_ins.values():
            stand_in.door.anew = stand_in.part is not None
            service.adopt(stand_in.door, stand_in.hello)


class LocalCompany(Company):
    """Workers of this machine: the supervisor sends their connections; what else it says waits for the service."""

    LIMITS = (60.0, 60.0, 60.0)
    """They send no signs of life, and the first push of a large model takes long."""

    def __init__(self, control: Control) -> None:
        super().__init__(control.connection, self.LIMITS, lambda text: control.send({"kind": "note", "text": text}))
        self._control = control
        self._orders: list[tuple[dict[str, Any], list[int]]] = []

    def _let_in(self) -> None:
        order, fds = self._control.receive()
        if order["kind"] == "worker" and order["worker"] not in self._stand_ins:
            self._welcome(ServerDoor(socket.socket(fileno=fds[0]), order["worker"], order["incarnation"]))
        else:
            self._orders.append((order, fds))

    def hand_over(self, service: Service) -> None:
        """Let all who are here join, then do what the supervisor asked for meanwhile."""
        self._let_join(service)
        for order, fds in self._orders:
            service.obey(order, fds)


class ClusterCompany(Company):
    """Workers that find back over the network. Who may differ from the log's, in the last bit even, waits instead."""

    LIMITS = (10.0, 5.0, 60.0)

    def __init__(self, listener: Listener, report: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(listener, self.LIMITS, lambda text: report({"kind": "note", "text": text}))
        self._listener = listener
        self._waiting: list[Applicant] = []

    def meet(self, welcome: dict[str, Any], expected: dict[str, Any], largest: Sizes) -> None:
        """Over a network newcomers are told all of it."""
        super().meet(welcome, expected, largest)
        self._told, self._largest = welcome, largest

    def _let_in(self) -> None:
        for applicant in self._listener.serve():
            worker = self._number_for(applicant.fields)
            if worker is None:
                self._waiting.append(applicant)
                continue
            known = {"worker": worker, "incarnation": self.first_incarnation}
            self._welcome(applicant.welcome({**self._told, **known}, self._largest))
            self.first_incarnation += 1  # none is ever used twice

    def _number_for(self, fields: dict[str, Any]) -> int | None:
        """Its old number where that is free, else one that is needed; None for who cannot help."""
        again = bool(fields.get("again"))
        alike = again or fields.get("kind") == f"{machine_kind()}, cpu"
        if fields.get("version") != package_version("paceline") or not alike or {"shard", "observer"} & set(fields):
            return None
        free = [worker for worker in range(self.server.places) if worker not in self._stand_ins]
        asked = fields.get("worker")
        if asked in free:
            return int(asked)
        if asked is not None and not again:
            return None
        return next((worker for worker in (*sorted(self._wanted), *free) if worker in free), None)

    def hand_over(self, service: ClusterService) -> None:
        """Let all who are here join, then look at those who waited and have not gone since."""
        self._let_join(service)
        service.look_at([one for one in self._waiting if not one.connection.is_closed()])
