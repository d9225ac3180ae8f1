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
from paceline.core.messages import OwnLoopInput, Push
from paceline.errors import ProtocolError
from paceline.runs.folder import ALL_GONE
from paceline.runs.result import status_of
from paceline.runtimes.server.admission import CEILING_SECONDS, Admission, StartBarrier
from paceline.runtimes.server.file_service import FileService
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LoopService, SupervisorChannel, TcpPeers
from paceline.runtimes.server.service import GRACE_SECONDS, Dispatcher, serve_until
from paceline.system.signals import INTERRUPTED, TERMINATED
from paceline.system.strict_json import to_json
from paceline.system.terminal import seconds_text
from paceline.transports.frames import Ending
from paceline.transports.listener import SOON_SECONDS, JoinRequest, Listener
from paceline.transports.protocol import HEARD, Hello, Keepalive, ReportedFigures
from paceline.transports.tcp_server import TcpPeer

FIRST_SECONDS, FLOOR_SECONDS = 10.0, 5.0
"""How long a silence may last before anything was learned, and at least; CEILING_SECONDS at most."""
LOOK_SECONDS, BUSY_SECONDS = 0.25, 1.0
"""How often time alone is checked; after a longer gap the server itself was busy, and no worker was silent."""
ABANDONED_SECONDS, RETURN_SECONDS = 120.0, 60.0
"""How long a run without workers waits for one; and how long own loops that have ended wait for one that was lost."""
STOP_SECONDS = 60.0  # how long a run that a signal has stopped waits for scripts that do not end
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
    welcome: Mapping[str, Any]  # what workers must know about the servers
    full: str  # why a further server is refused

    def open(self, give_up: Callable[[TcpPeer, str], None], expel: Callable[[TcpPeer, str], None]) -> None:
        """Begin; both calls disconnect a worker and tell the user why, `expel` if the worker broke the protocol."""
        return

    def push(self, peer: TcpPeer, push: Push, apply: Callable[[Push], None]) -> None:
        """Call `apply` when the push may take effect. ProtocolError if it cannot be decoded."""

    def hello(self, peer: TcpPeer, hello: Hello, join: Callable[[Hello], None]) -> None:
        """Call `join` when the worker may join. ProtocolError if it has a memory that does not fit."""

    def forget(self, peer: TcpPeer) -> None:
        """Drop what waits for a worker that is gone."""
        return

    def check(self, was_busy: bool) -> None:
        """Do what time alone makes due; `was_busy` if this server did not listen for a while."""
        return


class SingleServer(PushGate):
    """The gate of a run with one server: everything takes effect at once."""

    full = "one server holds all weights of this run: --servers S starts several"

    def __init__(self, host: Host, largest: BufferSizes, welcome: Mapping[str, Any] | None = None) -> None:
        self.largest, self.welcome = largest, welcome or {}

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
        loops: LoopService | None = None,
        observers: FileService | None = None,
    ) -> None:
        """`peers` belong to the host's runtime; `wait_seconds` is how long all workers have to join.

        With `loops` the workers run users' own loops, and the service runs until all of them have left.
        """
        self._host, self._peers, self._control, self._listener, self._gate = host, peers, control, listener, gate
        self._loops = loops
        self._dispatcher = Dispatcher(host, control, expected)
        self._admission = Admission(host, peers, gate.largest, gate.welcome, control.note, listener.complain)
        self._start = StartBarrier(host, peers, self._dispatcher, listener.address, wait_seconds)
        self.observers = observers or FileService(host.folder)
        self._failure_detector = FailureDetector(FIRST_SECONDS, FLOOR_SECONDS, CEILING_SECONDS)
        self._dropped: dict[tuple[object, object], str] = {}  # why a worker's incarnation was dropped
        self._signs: dict[int, float] = {}  # when each worker's last heartbeat was learned from
        self._awaited: dict[int, float] = {}  # workers of own loops that were lost, and until when they are waited for
        self._checked = time.monotonic()
        self._empty_since: float | None = None
        peers.ending_of = self._ending_of
        peers.loop.register(control.connection, lambda: host.stop(control.receive()[0]["reason"]))
        peers.loop.register(listener, lambda: self.admit(listener.serve()))
        gate.open(self._give_up, self._expel)

    def run(self) -> None:
        """Serve until training is over and every worker knows it."""
        serve_until(self._host, self._peers.loop, self._all_know, self._check)
        for text in self._listener.complaints(all_of_them=True):
            self._note_refused(text)
        for peer in self._peers.by_worker.values():
            peer.close()

    def _ending_of(self, worker: int) -> Ending:
        """What the last reply of a worker tells it."""
        if self._host.server.members[worker].released:
            return Ending.DRAINED
        status = status_of(self._host.server, self._host.stop_reason)
        return {"stopped": Ending.STOPPED, "diverged": Ending.DIVERGED}.get(status, Ending.FINISHED)

    def _all_know(self, deadline: float) -> bool:
        """Whether all workers have hung up: bytes still on their way would be lost with this process."""
        if self._loops is not None:
            self._loops.settle()
            if self._host.stop_reason in (INTERRUPTED, TERMINATED) and time.monotonic() > deadline + STOP_SECONDS:
                for worker, peer in list(self._peers.by_worker.items()):
                    self._give_up(peer, f"worker {worker} has not ended its script: the run is saved without it")
            self._peers.send_rest()
            return not self._peers.by_worker
        here = [peer for peer in self._peers.by_worker.values() if peer.fileno() >= 0]
        if time.monotonic() > max([deadline, *(peer.last_heard + GRACE_SECONDS for peer in here)]):
            return True
        return not here and (self._peers.by_worker.keys() <= self._peers.released or time.monotonic() > deadline)

    def _check(self) -> float:
        """Do what time alone makes due; returns the time of the next call."""
        now = time.monotonic()
        looks_at = self._checked + LOOK_SECONDS
        strangers_wait = self._listener.expire(now)
        if strangers_wait and now < looks_at:
            return time.perf_counter() + SOON_SECONDS
        was_busy = now - self._checked > LOOK_SECONDS + BUSY_SECONDS  # scoring, say: unread messages wait
        if was_busy:
            self._failure_detector.extend(now - self._checked)
        self._checked = now
        self._gate.check(was_busy)
        for text in self._listener.complaints():
            self._note_refused(text)
        self._dispatcher.check(self._drop)
        if not self._host.server.finished or self._loops is not None:
            for worker in self._failure_detector.due(now):
                peer = self._peers.by_worker[worker]
                self._awaited[worker] = now + RETURN_SECONDS
                self._give_up(peer, f"worker {worker} was silent for {seconds_text(now - peer.last_heard)}: it is lost")
        self._stop_waiting(now)
        if not self._host.server.finished:
            self._start.check(now)
            if self._empty_since is not None and now > self._empty_since + ABANDONED_SECONDS:
                self._host.stop(ALL_GONE)
        return time.perf_counter() + (SOON_SECONDS if strangers_wait else LOOK_SECONDS)

    @property
    def awaits_worker(self) -> bool:
        """Whether a worker of an own loop was lost a short while ago: its script may be starting again."""
        return bool(self._awaited)

    def _stop_waiting(self, now: float) -> None:
        """Let the own loops that have ended go on without a worker that did not come back in time."""
        for worker in [worker for worker, until in self._awaited.items() if now > until]:
            del self._awaited[worker]
            if self._loops is not None:
                self._loops.settle()

    # workers come

    def admit(self, applicants: list[JoinRequest]) -> None:
        """Give each worker a number, its old one or a new one, or tell it why not."""
        for applicant in applicants:
            try:
                known, number = self._admission.known(applicant.fields), self._admission.number_for(applicant.fields)
            except Exception as error:  # nothing is changed before a request is understood
                known, number = None, f"its request cannot be read ({type(error).__name__})"
            if applicant.fields.get("observer"):
                self.observers.admit(applicant)
            elif applicant.fields.get("shard"):
                self._admission.turn_away(applicant, self._gate.full)
            elif known is not None:
                self._reconnect(applicant, known)
            elif (why := self._why_dropped(applicant.fields)) is not None:
                applicant.refuse(why)
            elif isinstance(number, str):
                self._admission.turn_away(applicant, number)
            else:
                self._admit(applicant, number)

    def _admit(self, applicant: JoinRequest, number: int) -> None:
        if number in self._peers.by_worker:  # disconnected: the new worker is here, the old one may never return
            self._remove(self._peers.by_worker[number])
        self.take_over(self._admission.admit(applicant, number))

    def take_over(self, peer: TcpPeer, hello: Hello | None = None) -> None:
        """Serve a worker that was welcomed, and that may have said hello already."""
        self._peers.add(peer)
        self._empty_since = None
        if peer.fileno() >= 0:
            self._listen(peer)
        else:  # it may reconnect
            self._heard(peer.worker)
        if hello is not None:
            self._join(peer, hello)
        self._peers.loop.watch_writes(peer)

    def _why_dropped(self, fields: Mapping[str, Any]) -> str | None:
        """Why a worker that still computes was dropped. When its step ends, it may join again."""
        return self._dropped.get((fields.get("worker"), fields.get("incarnation"))) if fields.get("idle") else None

    def _note_refused(self, text: str) -> None:
        """Write the event of refused connections, and tell the user."""
        self._host.events.write("turned_away", self._host.clock.now(), text=text)
        self._control.note(text)

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
        is_moving = peer.wants_write and peer.flush()
        try:
            if (message := peer.receive()) is not None:
                self._heard(peer.worker)
            if is_moving or self._is_progress(message):
                stalls, is_step = self._host.accounting.stall_detector, message is Keepalive.STEPPED
                stalls.record_progress(peer.worker, self._host.clock.source(), is_step and not is_moving)
            if isinstance(message, Push):
                self._gate.push(peer, message, functools.partial(self._apply, peer))
            elif isinstance(message, Hello):
                self._gate.hello(peer, message, functools.partial(self._join, peer))
            elif isinstance(message, OwnLoopInput) and self._loops is not None:
                self._loops.take(peer, message)
                self._peers.send_rest()  # it may have answered all who wait
        except ProtocolError as error:
            self._expel(peer, str(error))
            return
        if message is None:
            self._lose(peer)
            return
        if isinstance(message, ReportedFigures):
            self._host.note_figures(message.worker, message.values)
        self._peers.loop.watch_writes(peer)

    def _is_progress(self, message: object) -> bool:
        """Whether a message shows more than that its worker is alive.

        A push ends the worker's turn by itself once it is applied; other servers may have to get their parts before.
        """
        if isinstance(message, Push):
            return self._peers.is_sharded
        return message is not None and message is not HEARD

    def _apply(self, peer: TcpPeer, push: Push) -> None:
        try:
            if self._loops is not None:
                self._loops.check_push(push)
            self._dispatcher.push(peer, push)
        except ProtocolError as error:
            self._expel(peer, str(error))
            return
        if self._dispatcher.is_expelled(peer.worker):
            peer.dismiss("the server computed another push from the same batch: check the memory of this machine")
            self._remove(peer)

    def _join(self, peer: TcpPeer, hello: Hello) -> None:
        self._awaited.pop(peer.worker, None)
        sizes = self._gate.largest._replace(weights=self._host.server.weights.numel())
        if (why_not := self._dispatcher.join(hello, sizes)) is not None:
            why = f"worker {peer.worker} was refused: {why_not}: give it the same code and the same data"
            self._expel(peer, why)

    # workers go

    def _lose(self, peer: TcpPeer) -> None:
        """The connection broke: wait for the worker to reconnect, unless it has no reason to.

        A user's own loop has one after the end of training too: it reads the final weights.
        """
        is_over = self._host.server.finished or peer.worker in self._peers.released
        if peer.left or peer.slot is None or (is_over and self._loops is None):
            self._remove(peer)
        else:
            self._disconnect(peer)

    def _disconnect(self, peer: TcpPeer) -> None:
        self._peers.loop.unregister(peer)
        peer.close()

    def _expel(self, peer: TcpPeer, why: str) -> None:
        """Disconnect a worker because of what it sent, and tell it why; the run goes on."""
        peer.dismiss(why)
        self._host.note_expelled(peer.worker, why)
        self._give_up(peer, why)

    def _give_up(self, peer: TcpPeer, why: str) -> None:
        """Disconnect a worker that may come again."""
        self._control.note(why)
        self._remove(peer)

    def _drop(self, worker: int, why: str) -> None:
        """Go on without a worker that hangs; its heartbeats learn why, and its late push is not applied."""
        peer = self._peers.by_worker.get(worker)
        if peer is not None:
            self._dropped[worker, peer.incarnation] = why
            self._give_up(peer, why)

    def _remove(self, peer: TcpPeer) -> None:
        """The worker leaves the run; wait for others if it was the last."""
        self._gate.forget(peer)
        if self._loops is not None:
            self._loops.forget(peer)
        self._failure_detector.forget(peer.worker)
        self._signs.pop(peer.worker, None)
        self._admission.leave(peer.worker)
        self._disconnect(peer)
        self._peers.remove(peer)
        if peer.slot is not None or self._loops is None:
            self._dispatcher.leave(peer.worker, peer.incarnation)
        else:  # it has not joined: its script is starting again
            self._awaited[peer.worker] = time.monotonic() + RETURN_SECONDS
        if self._loops is not None:
            self._loops.settle()
            self._peers.send_rest()
        if not self._peers.by_worker and not self._host.server.finished:
            self._empty_since = time.monotonic()
            self._control.note(f"no worker is left: waiting {ABANDONED_SECONDS:g} s for one to come")
