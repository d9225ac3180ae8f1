"""Serve workers on other machines: they come over TCP, and reconnect if their connection breaks.

A worker that is silent for longer than its own past explains is lost; one that reconnects in time has missed nothing.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.core.buffers import BufferSizes
from paceline.core.failure_detector import FailureDetector
from paceline.core.messages import Push
from paceline.errors import ProtocolError
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.admission import CEILING_SECONDS, Admission, StartBarrier
from paceline.runtimes.server.file_service import FileService
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import TcpPeers
from paceline.runtimes.server.service import GRACE_SECONDS, Dispatcher, SupervisorChannel, serve_until
from paceline.system.strict_json import to_json
from paceline.transports.listener import JoinRequest, Listener
from paceline.transports.protocol import Hello, Keepalive
from paceline.transports.tcp_server import TcpPeer

FIRST_SECONDS, FLOOR_SECONDS = 10.0, 5.0
"""How long a silence may last before anything was learned, and at least; CEILING_SECONDS at most."""
LOOK_SECONDS, BUSY_SECONDS = 0.25, 1.0
"""How often time alone is checked; after a longer gap the server itself was busy, and no worker was silent."""
ABANDONED_SECONDS = 120.0
SIGN_SECONDS = 0.5  # heartbeats that come faster than this are not learned from


class ForegroundChannel(SupervisorChannel):
    """Replaces the connection to a supervisor if the server is a command of its own: it reports and stops itself."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        connection, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(connection)
        self._report = report

    def send(self, row: dict[str, Any]) -> None:
        """Report what a supervisor would show the user."""
        if row["kind"] != "clock":
            self._report(row)

    def stop(self, reason: str) -> None:
        """End the run between two inputs; may be called by a signal handler."""
        self._other.send(to_json({"kind": "stop", "reason": reason}).encode())


class PushGate(Protocol):
    """Decides when a worker's message takes effect: at once, or when other servers have their parts of it too."""

    largest: BufferSizes  # the largest memory that a worker may ask for
    capacities: tuple[int | None, int | None]  # the most bytes of an encoded push and of an encoded reply
    welcome: Mapping[str, Any]  # what workers must know about the servers
    full: str  # why a further server is refused

    def open(self, remove: Callable[[TcpPeer, str], None]) -> None:
        """Begin; `remove` disconnects a worker and tells the user why."""
        return

    def push(self, peer: TcpPeer, push: Push, apply: Callable[[Push], None]) -> None:
        """Call `apply` when the push may take effect. ProtocolError if it cannot be decoded."""

    def hello(self, peer: TcpPeer, hello: Hello, join: Callable[[Hello], None]) -> None:
        """Call `join` when the worker may join."""

    def forget(self, peer: TcpPeer) -> None:
        """Drop what waits for a worker that is gone."""
        return

    def check(self, was_busy: bool) -> None:
        """Do what time alone makes due; `was_busy` if this server did not listen for a while."""
        return


class SingleServer(PushGate):
    """The gate of a run with one server: everything takes effect at once."""

    full = "one server holds all weights of this run: --servers S starts several"

    def __init__(self, host: Host, largest: BufferSizes) -> None:
        self.largest, self.capacities, self.welcome = largest, host.server.codecs.capacities, {}

    def push(self, peer: TcpPeer, push: Push, apply: Callable[[Push], None]) -> None:
        """Apply."""
        apply(push)

    def hello(self, peer: TcpPeer, hello: Hello, join: Callable[[Hello], None]) -> None:
        """Join."""
        join(hello)


class RemoteService:
    """Serves workers over TCP. A new worker gets a number; a disconnected one keeps it until its deadline."""

    def __init__(
        self,
        host: Host,
        peers: TcpPeers,
        control: ForegroundChannel,
        expected: dict[str, Any],
        listener: Listener,
        gate: PushGate,
        wait_seconds: float | None = None,
    ) -> None:
        """`peers` belong to the host's runtime; `wait_seconds` is how long all workers have to join."""
        self._host, self._peers, self._control, self._listener, self._gate = host, peers, control, listener, gate
        self._dispatcher = Dispatcher(host, control, expected)
        self._admission = Admission(host, peers, gate.largest, gate.welcome, control.note)
        self._start = StartBarrier(host, peers, self._dispatcher, listener.address, wait_seconds)
        self.observers = FileService(host.folder)
        self._failure_detector = FailureDetector(FIRST_SECONDS, FLOOR_SECONDS, CEILING_SECONDS)
        self._signs: dict[int, float] = {}  # when each worker's last heartbeat was learned from
        self._checked = time.monotonic()
        self._empty_since: float | None = None
        peers.loop.register(control.connection, lambda: host.stop(control.receive()[0]["reason"]))
        peers.loop.register(listener, lambda: self.admit(listener.serve()))
        gate.open(self._expel)

    def run(self) -> None:
        """Serve until training is over and every worker knows it."""
        serve_until(self._host, self._peers.loop, self._all_know, self._check)
        for peer in self._peers.by_worker.values():
            peer.close()

    def _all_know(self, deadline: float) -> bool:
        """Whether all workers have hung up: bytes still on their way would be lost with this process."""
        here = [peer for peer in self._peers.by_worker.values() if peer.fileno() >= 0]
        if time.monotonic() > max([deadline, *(peer.last_heard + GRACE_SECONDS for peer in here)]):
            return True
        return not here and (self._peers.by_worker.keys() <= self._peers.released or time.monotonic() > deadline)

    def _check(self) -> float:
        """Do what time alone makes due; returns the time of the next call."""
        now = time.monotonic()
        was_busy = now - self._checked > LOOK_SECONDS + BUSY_SECONDS  # scoring, say: unread messages wait
        if was_busy:
            self._failure_detector.extend(now - self._checked)
        self._checked = now
        self._gate.check(was_busy)
        self._listener.expire(now)
        for text in self._listener.complaints():
            self._admission.note_refused(text, text)
        if not self._host.server.finished:
            self._host.look_for_requests()  # also while no worker pushes
            for worker in self._failure_detector.due(now):
                peer = self._peers.by_worker[worker]
                self._expel(peer, f"worker {worker} was silent for {now - peer.last_heard:.1f} s: it is lost")
            self._start.check(now)
            if self._empty_since is not None and now > self._empty_since + ABANDONED_SECONDS:
                self._host.stop(ALL_GONE)
        return time.perf_counter() + LOOK_SECONDS

    # workers come

    def admit(self, applicants: list[JoinRequest]) -> None:
        """Give each worker a number, its old one or a new one, or tell it why not."""
        for applicant in applicants:
            known = self._admission.known(applicant.fields)
            if applicant.fields.get("observer"):
                self.observers.admit(applicant)
            elif applicant.fields.get("shard"):
                self._admission.turn_away(applicant, self._gate.full)
            elif known is not None:
                self._reconnect(applicant, known)
            else:
                self._admit(applicant)

    def _admit(self, applicant: JoinRequest) -> None:
        number = self._admission.number_for(applicant.fields)
        if isinstance(number, str):
            self._admission.turn_away(applicant, number)
            return
        if number in self._peers.by_worker:  # disconnected: the new worker is here, the old one may never return
            self._remove(self._peers.by_worker[number])
        peer = self._admission.admit(applicant, number)
        self._peers.add(peer)
        self._empty_since = None
        self._listen(peer)

    def _reconnect(self, applicant: JoinRequest, peer: TcpPeer) -> None:
        """Let a worker whose connection broke continue under its old number."""
        self._disconnect(peer)
        applicant.welcome_back(peer, {})
        self._listen(peer)
        self._control.note(f"worker {peer.worker} is back after its connection broke")

    def _listen(self, peer: TcpPeer) -> None:
        self._peers.loop.register(peer, functools.partial(self._on_message, peer))
        self._peers.loop.watch_writes(peer)
        self._heard(peer.worker)

    def _heard(self, worker: int) -> None:
        """Count a message as a heartbeat; the next is expected from now on."""
        now = time.monotonic()
        if now - self._signs.get(worker, 0.0) > SIGN_SECONDS:
            self._signs[worker] = now
            self._failure_detector.record_message(worker, now)
            self._host.accounting.failure_detector.heartbeat(worker, self._host.clock.source())
        self._failure_detector.start_wait(worker, now)

    # workers' messages

    def _on_message(self, peer: TcpPeer) -> None:
        """Send what is left, then handle the worker's next message, or the end of its connection."""
        if peer.wants_write:
            peer.flush()
        try:
            if (message := peer.receive()) is not None:
                self._heard(peer.worker)
            if isinstance(message, Push):
                self._gate.push(peer, message, functools.partial(self._apply, peer))
        except ProtocolError as error:
            self._expel(peer, str(error))
            return
        if message is None:
            self._lose(peer)
            return
        if isinstance(message, Hello):
            self._gate.hello(peer, message, functools.partial(self._join, peer))
        elif not isinstance(message, Push | Keepalive):
            self._host.note_figures(message.worker, message.values)
        self._peers.loop.watch_writes(peer)

    def _apply(self, peer: TcpPeer, push: Push) -> None:
        try:
            self._dispatcher.push(peer, push)
        except ProtocolError as error:
            self._expel(peer, str(error))
            return
        if self._dispatcher.is_expelled(peer.worker):
            peer.dismiss("the server computed another push from the same batch: check the memory of this machine")
            self._remove(peer)

    def _join(self, peer: TcpPeer, hello: Hello) -> None:
        if (why_not := self._dispatcher.join(hello, self._gate.capacities)) is not None:
            peer.dismiss(f"{why_not}: give it the same code and the same data")
            self._expel(peer, f"worker {peer.worker} was refused: {why_not}")

    # workers go

    def _lose(self, peer: TcpPeer) -> None:
        """The connection broke: wait for the worker to reconnect, unless it has no reason to."""
        if self._host.server.finished or peer.left or peer.worker in self._peers.released or peer.slot is None:
            self._remove(peer)
        else:
            self._disconnect(peer)

    def _disconnect(self, peer: TcpPeer) -> None:
        self._peers.loop.unregister(peer)
        peer.close()

    def _expel(self, peer: TcpPeer, why: str) -> None:
        self._control.note(why)
        self._remove(peer)

    def _remove(self, peer: TcpPeer) -> None:
        """The worker leaves the run; wait for others if it was the last."""
        self._gate.forget(peer)
        self._failure_detector.forget(peer.worker)
        self._signs.pop(peer.worker, None)
        self._admission.leave(peer.worker)
        self._disconnect(peer)
        self._peers.remove(peer)
        self._dispatcher.leave(peer.worker, peer.incarnation)
        if not self._peers.by_worker and not self._host.server.finished:
            self._empty_since = time.monotonic()
            self._control.note(f"no worker is left: waiting {ABANDONED_SECONDS:g} s for one to come")
