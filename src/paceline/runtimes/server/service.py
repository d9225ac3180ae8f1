"""Serve workers on this machine: one thread owns the weights and handles messages in order of arrival."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from paceline.core.messages import Leave, OwnLoopInput, Push
from paceline.core.step_balancing import StepBalancer
from paceline.errors import ProtocolError, mismatched_keys
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import Peers
from paceline.system.event_loop import EventLoop
from paceline.system.signals import TERMINATED
from paceline.system.strict_json import to_json
from paceline.transports.protocol import Hello, Peer, ReportedFigures
from paceline.transports.shared_memory import SharedMemoryPeer

GRACE_SECONDS = 5.0  # after the end of training: how long to wait until every worker has its last reply

LocalPeers: TypeAlias = Peers[SharedMemoryPeer]


class SupervisorChannel:
    """The connection to the supervisor: it sends workers' connections and stops, the server sends progress."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, row: dict[str, Any]) -> None:
        """Send a message. Progress is dropped if the supervisor is slow; everything else waits."""
        flags = socket.MSG_DONTWAIT if row["kind"] == "progress" else 0
        try:
            self.connection.send(to_json(row).encode(), flags)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    def note(self, text: str) -> None:
        """Show the user one line."""
        self.send({"kind": "note", "text": text})

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next order and its descriptors; ends this process if the supervisor is gone."""
        packet, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, 1)
        if not packet:
            os._exit(1)
        order: dict[str, Any] = json.loads(packet)
        return order, fds


class Dispatcher:
    """Turns what workers send into inputs of the host, and tells the supervisor when the training clock runs."""

    def __init__(self, host: Host, control: SupervisorChannel, expected: dict[str, Any]) -> None:
        """`expected` are the facts about model and data in which every worker must agree with the run."""
        self._host, self._control, self._expected = host, control, expected
        self.note = control.note
        self._pacing = StepBalancer() if host.config.local_steps == "speed" else None
        self._clock_runs = False

    def push(self, peer: Peer, push: Push) -> None:
        """Hand a push to the host. ProtocolError if it cannot be decoded; then nothing has changed."""
        host, worker, timing = self._host, push.worker, peer.timing
        member = host.server.members.get(worker)
        steps = max(1, member.steps) if member is not None else 1
        host.timings.add(worker, timing, steps)
        if self._pacing is not None:
            change = self._pacing.look(host.server, worker, timing.wall / steps)
            if change is not None:
                host.handle(change)
        try:
            host.handle(push)
        except ProtocolError as error:
            raise ProtocolError(f"worker {worker}: {error}") from None

    def is_expelled(self, worker: int) -> bool:
        """Whether the server has turned a worker out; then its connection is closed."""
        member = self._host.server.members.get(worker)
        return member is not None and member.expelled

    def join(self, hello: Hello, capacities: tuple[int | None, int | None]) -> str | None:
        """Let a worker join. Returns why not if its model, data or codecs differ from this run's."""
        if self.is_expelled(hello.join.worker):
            return "this run has expelled it"
        wrong = mismatched_keys(self._expected, hello.facts)
        if hello.slot.sizes[0] != self._host.server.weights.numel():
            wrong.append("size")
        if hello.slot.sizes[2:4] != capacities:
            wrong.append("codecs")
        if wrong:
            return f"it differs from this run in {' and '.join(wrong)}"
        self._host.memories[hello.join.worker] = hello.slot
        self._host.handle(hello.join)
        self.tell_clock()
        return None

    def leave(self, worker: int, incarnation: int) -> None:
        """Let a worker leave the run."""
        self._host.handle(Leave(worker, incarnation))
        self.tell_clock()

    def miss(self, worker: int) -> None:
        """Stop waiting for a worker that has not joined."""
        member = self._host.server.members.get(worker)
        self._host.handle(Leave(worker, member.incarnation + 1 if member is not None else 0))

    def tell_clock(self) -> None:
        """Tell the supervisor if the training clock has started or stopped: it injects faults by this clock."""
        runs = self._host.server.started and not self._host.server.finished
        if self._clock_runs != runs:
            self._clock_runs = runs
            self._control.send({"kind": "clock", "now": self._host.clock.now(), "runs": runs})


def serve_until(
    host: Host, loop: EventLoop, all_know: Callable[[float], bool], check: Callable[[], float] | None = None
) -> None:
    """Serve until training is over and `all_know` that, given the end of the grace period.

    `check` is called between messages when it is due; it returns the time (`perf_counter`) of its next call.
    """
    next_check = 0.0 if check is not None else float("inf")
    deadline: float | None = None
    while True:
        if host.unsent:
            host.commit()
        if host.server.finished:
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if all_know(deadline):
                return
        seconds = min(host.next_due, next_check) - time.perf_counter()
        loop.poll(seconds if deadline is None else min(seconds, 0.5))
        now = time.perf_counter()
        if now >= host.next_due:
            host.housekeep()
        if check is not None and now >= next_check:
            next_check = check()


class Service:
    """Serves workers over shared memory; the supervisor starts them and passes their connections on."""

    def __init__(
        self, host: Host, peers: LocalPeers, control: SupervisorChannel, expected: dict[str, Any], patient: bool = False
    ) -> None:
        """`peers` is the host's runtime. A patient service runs until every worker has left."""
        self._host, self._peers, self._control, self._patient = host, peers, control, patient
        self._dispatcher = Dispatcher(host, control, expected)
        self._returning: set[int] = set()  # workers that the supervisor will start again
        self._loop = EventLoop()
        self._loop.register(control.connection, self._on_order)
        self._wakeup, writer = socket.socketpair()
        writer.setblocking(False)
        self._loop.register(self._wakeup, self._on_sigterm)
        signal.set_wakeup_fd(writer.detach())
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def run(self) -> None:
        """Serve until training is over and every worker knows it."""
        serve_until(self._host, self._loop, self._all_know)
        for peer in self._peers.by_worker.values():
            peer.close()

    def _all_know(self, deadline: float) -> bool:
        self._dispatcher.tell_clock()
        if self._patient:
            return not self._peers.by_worker
        return self._peers.by_worker.keys() <= self._peers.released or time.monotonic() > deadline

    def admit(self, peer: SharedMemoryPeer) -> None:
        """Listen to one more worker."""
        self._peers.add(peer)
        self._returning.discard(peer.worker)
        self._loop.register(peer, functools.partial(self._on_message, peer))

    def _on_order(self) -> None:
        order, fds = self._control.receive()
        if order["kind"] == "worker":
            self.admit(SharedMemoryPeer(socket.socket(fileno=fds[0]), order["worker"], order["incarnation"]))
        elif order["kind"] == "stop":
            self._host.stop(order["reason"])
        elif order["kind"] == "expected":
            self._returning.add(order["worker"])
        elif order["kind"] == "fault":
            self._on_fault(order["fault"], order["returns"])

    def _on_fault(self, fault: dict[str, Any], returns: bool) -> None:
        """Record an injected fault; if its worker `returns`, the run waits for it even without other workers."""
        if returns:
            self._returning.add(fault["worker"])
        elif fault["kind"] == "join":
            self._returning.discard(fault["worker"])  # it has joined already
        self._host.note_fault(fault)
        if fault["kind"] == "drain":
            self._host.drain(fault["worker"])

    def _on_sigterm(self) -> None:
        """End the run between two inputs."""
        self._wakeup.recv(64)
        self._host.stop(TERMINATED)

    def _on_message(self, peer: SharedMemoryPeer) -> None:
        """Handle a worker's next message. A malformed one, or a closed connection, ends the worker's membership."""
        try:
            message = peer.receive()
            if isinstance(message, Push):
                self._dispatcher.push(peer, message)
                if self._dispatcher.is_expelled(peer.worker):
                    self.remove(peer)
                return
        except ProtocolError as error:
            self._control.note(str(error))
            message = None
        if message is None:
            self.remove(peer)
        elif isinstance(message, Hello):
            self.join(peer, message)
        elif isinstance(message, ReportedFigures):
            self._host.note_figures(message.worker, message.values)
        else:
            self.take_setting(peer, message)

    def take_setting(self, peer: SharedMemoryPeer, message: OwnLoopInput) -> None:
        """Take a message that only a user's own loop sends."""
        self._host.handle(message)

    def join(self, peer: SharedMemoryPeer, hello: Hello) -> None:
        """Let a worker join, or refuse and disconnect it."""
        if (why_not := self._dispatcher.join(hello, self._host.server.codecs.capacities)) is not None:
            self._control.note(f"worker {peer.worker} was refused: {why_not}")
            self.remove(peer)

    def miss(self, worker: int) -> None:
        """Stop waiting for a worker that has not joined."""
        self._dispatcher.miss(worker)

    def remove(self, peer: SharedMemoryPeer) -> None:
        """Disconnect a worker; stop the run if it was the last and none will return."""
        self._loop.unregister(peer)
        peer.close()
        self._peers.remove(peer)
        self._dispatcher.leave(peer.worker, peer.incarnation)
        if not self._peers.by_worker and not self._returning and not self._host.server.finished:
            self._host.stop(ALL_GONE)
