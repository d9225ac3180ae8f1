"""The server process: one thread owns the weights and takes what the workers bring, in order of arrival."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from paceline.core.messages import Leave, Push, Rate, Reply
from paceline.core.step_balancing import Pacing
from paceline.errors import ProtocolError, mismatched_keys
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.accounting import ROW_SECONDS
from paceline.runtimes.server.host import Host
from paceline.system.signals import TERMINATED
from paceline.transports.protocol import Hello, Timing
from paceline.transports.shared_memory import ServerDoor

GRACE_SECONDS = 5.0


class Control:
    """The line to the supervisor: it sends workers' connections and stops; we send progress and the end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, row: dict[str, Any]) -> None:
        """Progress may be lost when the supervisor is slow; everything else waits until it is taken."""
        flags = socket.MSG_DONTWAIT if row["kind"] == "progress" else 0
        try:
            self.connection.send(json.dumps(row).encode(), flags)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next order; when the supervisor is gone there is nobody to train for."""
        packet, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, 1)
        if not packet:
            os._exit(1)
        order: dict[str, Any] = json.loads(packet)
        return order, fds


class Line(Protocol):
    """What can be polled."""

    def fileno(self) -> int: ...


class Door(Line, Protocol):
    """One worker's connection, as a service sees it."""

    worker: int
    incarnation: int
    timing: Timing

    def answer(self, reply: Reply) -> None: ...

    def close(self) -> None: ...


class Service:
    """The event loop: doors in, replies out."""

    def __init__(self, host: Host, control: Control, expected: dict[str, Any], patient: bool = False) -> None:
        self.host = host
        host.send = self._answer
        host.in_groups = True
        self._expected = expected
        self.control = control
        self._patient = patient
        self._pacing = Pacing() if host.config.local_steps == "speed" else None
        self.doors: dict[int, Door] = {}
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._listen(control.connection, self._order)
        self._dismissed: set[int] = set()
        self._returning: set[int] = set()
        self._clock_runs = False
        self._listen_to_signals()

    def _listen_to_signals(self) -> None:
        """A SIGTERM wakes the loop up."""
        self._wakeup, writer = socket.socketpair()
        writer.setblocking(False)
        self._listen(self._wakeup, self._terminate)
        signal.set_wakeup_fd(writer.detach())
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def _listen(self, line: Line, callback: Callable[[], None]) -> None:
        self._callbacks[line.fileno()] = callback
        self._poll.register(line.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Serve until training is over and every worker knows (a patient service: until every worker has left)."""
        deadline: float | None = None
        while True:
            self.host.commit()
            if self.host.server.over:
                if deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
                    self._tell_clock()
                if self._all_know(deadline):
                    break
            patience = min(self._patience(), self.host.seconds_left)
            for line, _ in self._poll.poll(0.5 if deadline is not None else patience):
                if line in self._callbacks:  # else it was hung up on meanwhile
                    self._callbacks[line]()
            self.host.look_at_the_clock()
            self._look_around()
            self.host.tick()
        for door in self.doors.values():
            door.close()

    def _patience(self) -> float:
        """How long to wait for the next message."""
        return ROW_SECONDS

    def _look_around(self) -> None:
        """Between messages: what time alone brings about."""

    def _all_know(self, deadline: float) -> bool:
        if self._patient:
            return not self.doors
        return all(worker in self._dismissed for worker in self.doors) or time.monotonic() > deadline

    def admit(self, door: ServerDoor) -> None:
        """Listen to one more worker."""
        self.doors[door.worker] = door
        self._returning.discard(door.worker)
        self._dismissed.discard(door.worker)
        self._listen(door, lambda: self._serve(door))

    def _order(self) -> None:
        """Do what the supervisor asks for."""
        order, fds = self.control.receive()
        if order["kind"] == "worker":
            self.admit(ServerDoor(socket.socket(fileno=fds[0]), order["worker"], order["incarnation"]))
        elif order["kind"] == "stop":
            self.host.stop(order["reason"])
        elif order["kind"] == "expected":
            self._returning.add(order["worker"])
        elif order["kind"] == "fault":
            self._note_fault(order["fault"], order["returns"])

    def _note_fault(self, fault: dict[str, Any], returns: bool) -> None:
        """A fault was fired on purpose; a worker who is to come back is waited for, even when nobody else is left."""
        if returns:
            self._returning.add(fault["worker"])
        elif fault["kind"] == "join":
            self._returning.discard(fault["worker"])  # it is here already
        self.host.note_fault(fault)
        if fault["kind"] == "drain":
            self.host.drain(fault["worker"])

    def _tell_clock(self) -> None:
        """Tell the supervisor when training begins and when it is over: faults come by this clock."""
        runs = self.host.server.started and not self.host.server.over
        if self._clock_runs != runs:
            self._clock_runs = runs
            self.control.send({"kind": "clock", "now": self.host.clock.now(), "runs": runs})

    def _terminate(self) -> None:
        """A SIGTERM came: end at this safe moment between two inputs."""
        self._wakeup.recv(64)
        self.host.stop(TERMINATED)

    def _serve(self, door: ServerDoor) -> None:
        try:
            message = door.receive()
        except ProtocolError as error:
            self.control.send({"kind": "note", "text": str(error)})
            message = None
        if isinstance(message, Push):
            self._take(door, message)
        elif isinstance(message, Rate):
            self.host.handle(message)
        elif message is None:
            self._send_off(door)
        elif isinstance(message, Hello):
            self.welcome(door, message)
        else:
            self.host.note_figures(message.worker, message.values)

    def _keep_time(self, worker: int, timing: Timing) -> None:
        """Before a push counts: what it took, and whether its worker should make fewer local steps from now on."""
        steps = self.host.server.steps_of(worker)
        self.host.timekeeper.add(worker, timing, steps)
        told = self._pacing.look(self.host.server, worker, timing.wall / steps) if self._pacing is not None else None
        if told is not None:
            self.host.handle(told)

    def _take(self, door: Door, push: Push) -> None:
        """A push whose bytes are none is its worker's fault: nothing has changed, and the worker is sent away."""
        self._keep_time(push.worker, door.timing)
        try:
            self.host.handle(push)
        except ProtocolError as error:
            self.control.send({"kind": "note", "text": f"worker {door.worker}: {error}"})
            self._send_off(door)

    def welcome(self, door: Door, hello: Hello) -> None:
        """Let a worker join, if it brings the model and the data that this run is about."""
        wrong = mismatched_keys(self._expected, hello.facts)
        if hello.slot.sizes[0] != self.host.server.weights.numel():
            wrong.append("size")
        if hello.slot.sizes[2:4] != self._capacities():
            wrong.append("codecs")
        if wrong:
            self._refuse(door, f"it differs from this run in {' and '.join(wrong)}")
            return
        self.host.memories[door.worker] = hello.slot
        self.host.handle(hello.join)
        self._tell_clock()

    def _capacities(self) -> tuple[int | None, int | None]:
        """The most bytes of an encoded push and of an encoded reply, as workers must know them too."""
        return self.host.server.codecs.capacities

    def _refuse(self, door: Door, why: str) -> None:
        self.control.send({"kind": "note", "text": f"worker {door.worker} was refused: {why}"})
        self._send_off(door)

    def miss(self, worker: int) -> None:
        """A worker that was awaited will never come."""
        member = self.host.server.members.get(worker)
        self.host.handle(Leave(worker, member.incarnation + 1 if member is not None else 0))

    def _stop_listening(self, line: Line) -> None:
        self._poll.unregister(line.fileno())
        del self._callbacks[line.fileno()]

    def _send_off(self, door: Door) -> None:
        """A worker is gone for good, or is to be."""
        self._stop_listening(door)
        door.close()
        if self.doors.get(door.worker) is door:  # not yet its next incarnation's
            del self.doors[door.worker]
        server = self.host.server
        self.host.handle(Leave(door.worker, door.incarnation))
        self._tell_clock()
        if not self.doors and not self._returning and not server.over:
            self._nobody_left()

    def _nobody_left(self) -> None:
        """The last worker is gone, and nobody is to come back."""
        self.host.stop(ALL_GONE)

    def _answer(self, reply: Reply) -> None:
        door = self.doors.get(reply.worker)
        if door is not None and door.incarnation == reply.incarnation:
            door.answer(reply)
            if reply.over:
                self._dismissed.add(reply.worker)
