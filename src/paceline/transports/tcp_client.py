"""The worker's side of TCP: what shared memory does, and what a network adds: handshake, heartbeats, reconnects."""

from __future__ import annotations

import contextlib
import math
import random
import select
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from paceline.core.buffers import WorkerBuffers, view
from paceline.core.messages import DataAssignment, Join, Push, Reply
from paceline.errors import ProtocolError, UnknownWorker, UserError
from paceline.transports import frames
from paceline.transports.auth import ClientHandshake
from paceline.transports.connection import Connection, JoinRefused, connected, read, require_token, send
from paceline.transports.frames import PUSH_HEAD, REPLY_HEAD, Ending, FrameKind, Reading, header, padding, read_bytes
from paceline.transports.handshake import CONNECT_SECONDS, HANDSHAKE_SECONDS, ConnectionReport, introduce
from paceline.transports.protocol import (
    BY_SAMPLES,
    MAX_ASSIGNMENT_NBYTES,
    MEMBER_NBYTES,
    PASS_NBYTES,
    Timing,
    Transport,
    unpack_assignment,
)
from paceline.transports.tls import Tls

BEAT_SECONDS = 1.0
FIRST_PATIENCE_SECONDS, PATIENCE_SECONDS = 10.0, 120.0
FIRST_PAUSE, MAX_PAUSE = 0.05, 5.0
MIN_CONNECT_SECONDS = 1.0  # an attempt that comes late, after a long step, still gets so long
QUIET_SECONDS = 1.0  # a worker may be started before its server: nothing is said so early
T = TypeVar("T")
MAX_BATCH, MAX_STEPS = 1 << 48, 1 << 24  # no run is so long: a reply that asks for more is not from a server of ours


class Backoff:
    """Exponential backoff with jitter. Gives up after `patience` seconds without the server since the last reply.

    Only a reply resets it. Seconds on a connection that the server welcomed do not count: a reply may have to wait for
    the other workers.

    >>> times = iter([0.0, 7.0, 9.0, 9.0, 11.0])
    >>> back_off = Backoff(8.0, lambda: next(times))
    >>> back_off.lost(), back_off.welcomed()  # 7 seconds were spent without the server
    (None, None)
    >>> back_off.lost(), round(back_off.left, 1), back_off.pause()
    (None, 1.0, None)
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience, self._clock = patience, clock
        self.answered()

    def answered(self) -> None:
        """A reply came: start again."""
        self._pause, self._spent = FIRST_PAUSE, 0.0
        self._since: float | None = None

    def lost(self) -> None:
        """There is no connection from now on."""
        if self._since is None:
            self._since = self._clock()

    def welcomed(self) -> None:
        """The server has accepted a connection."""
        if self._since is not None:
            self._spent, self._since = self._spent + self._clock() - self._since, None

    @property
    def left(self) -> float:
        """Seconds until it gives up, if nothing is welcomed."""
        silent = self._clock() - self._since if self._since is not None else 0.0
        return max(0.0, self.patience - self._spent - silent)

    def pause(self) -> float | None:
        """Seconds to wait before the next attempt, or None to give up."""
        seconds = self._pause * random.uniform(0.5, 1.5)
        self._pause = min(2 * self._pause, MAX_PAUSE)
        return seconds if seconds < self.left else None


class TcpClient(Transport):
    """A worker's connection to one server: `apply`, `hello`, then exchange pushes for weights.

    If the connection breaks, it reconnects for up to `patience` seconds and sends again what has no reply. If the
    server does not know the worker any more, it raises `UnknownWorker`: the worker then joins again on the same client.
    `report` tells the user of lost and regained connections.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        tls: Tls | None = None,
        patience: float = PATIENCE_SECONDS,
        beat: float = BEAT_SECONDS,
        report: ConnectionReport | None = None,
    ) -> None:
        self._address, self._token, self._tls = address, token, tls
        self._back_off, self._beat = Backoff(patience), beat
        self._report = report or ConnectionReport(lambda text: None, address)
        self._connection: Connection | None = None
        self._last_sent = 0.0
        self._fields: dict[str, Any] = {}
        self._fresh: Callable[[], Mapping[str, Any]] = dict
        self._memory: WorkerBuffers | None = None
        self._ship_state = False
        self._assignment: DataAssignment | None = None
        self.forgotten: dict[str, Any] | None = None
        """The welcome of a server that took the reconnecting worker for a new one; a heartbeat found that out."""
        self._busy = threading.Lock()
        """Held while frames are exchanged, so that no heartbeat is sent in the middle of one."""
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        self.farewell: str | None = None
        """Why the server refused the worker, if `exchange` returned None because of that."""
        self.num_steps: Callable[[], int] = lambda: 0  # how many steps the worker has begun: its heartbeats say so
        self._dropped_because: str | None = None  # why the server goes on without this worker, if it does
        self.ending = 0
        """Why the last reply ended the work of this worker, as an `Ending`; 0: it goes on."""

    def apply(
        self,
        fields: Mapping[str, Any],
        patience: float = FIRST_PATIENCE_SECONDS,
        beats: bool = True,
        fresh: Callable[[], Mapping[str, Any]] = dict,
    ) -> dict[str, Any]:
        """Connect, authenticate and ask to join. Return the server's welcome; raise UserError if it refuses.

        `fresh` gives the fields that are made anew for every connection.
        """
        require_token(self._address, self._token)
        self._fields, self._fresh = dict(fields), fresh
        back_off = Backoff(patience)
        back_off.lost()
        with self._busy:
            while True:
                try:
                    welcome = self._connect(max(MIN_CONNECT_SECONDS, back_off.left))
                    self._report.back()
                    break
                except ConnectionError as error:
                    seconds = back_off.pause()
                    if seconds is None:
                        hint = "is the server running, reachable from here, and TLS on at both ends or at neither?"
                        raise UserError(f"{self._address} cannot be reached ({error}): {hint}") from None
                    if patience - back_off.left >= min(QUIET_SECONDS, patience / 2):
                        self._report.waiting(error, back_off.left)
                    time.sleep(seconds)
                except JoinRefused as reason:
                    raise UserError(f"{self._address}: {reason}") from None
        if beats:
            self._beating = threading.Thread(target=self._send_heartbeats, name="paceline-heartbeat", daemon=True)
            self._beating.start()
        return welcome

    def detach(self) -> Connection:
        """Return the connection, now non-blocking, for something other than exchanges."""
        assert self._connection is not None and self._beating is None
        connection, self._connection = self._connection, None
        connection.stop_waiting()
        return connection

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        """Join and wait for the first weights. Raise UserError if the worker's facts do not match the server's."""
        frame = self._begin(join, memory, facts)
        return self._unless_refused(self._ask([frame], lambda: self._reply(join)))

    def _begin(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> memoryview:
        """Use these buffers from now on; return the frame of the hello."""
        self._memory, self._ship_state, self.forgotten, self._assignment = memory, False, None, None
        self._fields |= {"again": True, "worker": join.worker, "incarnation": join.incarnation}
        fields = {**join._asdict(), "sizes": memory.sizes, **facts}
        return memoryview(frames.fields_frame(FrameKind.HELLO, fields, frames.MAX_HELLO))

    def _unless_refused(self, answer: T | None) -> T | None:
        if answer is None and self.farewell is not None:
            raise UserError(f"{self._address}: {self.farewell}")
        return answer

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send a push and wait for its reply. Return None if the server is gone for good."""
        assert self._memory is not None
        local_state = view(self._memory.saved_states) if self._ship_state else memoryview(b"")
        says = view(push.loop) if push.loop is not None else memoryview(b"")
        bodies = [view(push.update), view(push.state), local_state, says]
        sizes, weight = [len(body) for body in bodies], BY_SAMPLES if push.weight is None else push.weight
        named = push.seq, push.reply, push.samples, push.optimizer
        head = PUSH_HEAD.pack(*named, *sizes, push.loss, *timing, weight)
        pad = padding(sum(sizes))
        first = header(FrameKind.PUSH, len(head) + sum(sizes) + len(pad)) + head
        return self._ask([memoryview(first), *bodies, memoryview(pad)], lambda: self._reply(push))

    def report(self, figures: dict[str, float]) -> None:
        """Send metrics that belong in the run's result."""
        with self._busy, contextlib.suppress(ConnectionError):
            if self._connection is not None:
                self._send([memoryview(frames.fields_frame(FrameKind.FIGURES, figures, frames.MAX_FIGURES))])

    def abandon(self) -> None:
        """From another thread: make an exchange that waits for its reply return None."""
        self._closed.set()
        if (connection := self._connection) is not None:
            connection.shut_down()

    def close(self) -> None:
        """Leave the run for good."""
        self._closed.set()
        with self._busy:
            with contextlib.suppress(ConnectionError):
                if self._connection is not None:
                    self._send([memoryview(header(FrameKind.BYE, 0))])
            self._drop()
        if self._beating is not None:
            self._beating.join()

    def _ask(self, parts: list[memoryview], reading: Callable[[], Reading[T]]) -> T | None:
        """Send a frame, again after each reconnect, until its answer has come, which `reading` reads."""
        with self._busy:
            while not self._closed.is_set():
                try:
                    if self._connection is None:
                        self._reconnect()
                    if self.forgotten is not None:
                        self._back_off.answered()
                        raise UnknownWorker(self.forgotten)
                    self._send(parts)
                    self._await_reply()
                    assert self._connection is not None
                    answer = read(self._connection, reading())
                    self._back_off.answered()
                    return answer
                except ConnectionError:
                    self._lose()
                except JoinRefused as reason:
                    self.farewell = str(reason)
                    return None
                except ProtocolError as error:
                    self._drop()
                    raise ProtocolError(f"{self._address} broke the protocol: it sent {error}") from None
                seconds = self._back_off.pause()
                if seconds is None:
                    self._report.gave_up(self._back_off.patience)
                    return None
                self._closed.wait(seconds)
        return None

    def _header(self, most: Mapping[FrameKind, int]) -> Reading[tuple[FrameKind, int]]:
        """Read the header of one of these frames. Raise JoinRefused if the server refuses the worker instead."""
        kind, nbytes = yield from frames.read_header({**most, FrameKind.REFUSED: frames.MAX_REFUSED})
        if kind is FrameKind.REFUSED:
            raise JoinRefused((yield from frames.read_refusal(nbytes)))
        return kind, nbytes

    @property
    def _largest_reply(self) -> int:
        memory = self._memory
        assert memory is not None
        most = MAX_ASSIGNMENT_NBYTES + max(memory.weights.nbytes, memory.pulled.nbytes)
        most += memory.loop.nbytes + memory.state.nbytes
        return REPLY_HEAD.size + most + len(padding(most))

    def _reply(self, message: Join | Push) -> Reading[Reply]:
        """Read the reply to a message, and its weights into the worker's buffers."""
        _, nbytes = yield from self._header({FrameKind.REPLY: self._largest_reply})
        return (yield from self._reply_body(message.worker, message.incarnation, nbytes))

    def _reply_body(self, worker: int, incarnation: int, nbytes: int) -> Reading[Reply]:
        memory = self._memory
        assert memory is not None
        packed = yield from read_bytes(REPLY_HEAD.size)
        finished, encoded, ship_own, optimizer, *numbers = REPLY_HEAD.unpack(packed)
        serial, version, batch, lr, steps, generation, named, count, discarded, dropped, num_loop, num_state = numbers
        if not 0.0 <= lr < math.inf or batch > MAX_BATCH or steps > MAX_STEPS:
            raise ProtocolError(
                f"a reply that asks for {steps} steps from batch {batch} on at a learning rate of {lr:g}"
            )
        if num_loop not in (0, memory.loop.nbytes):
            raise ProtocolError(f"{num_loop} bytes of what a loop said for buffers of {memory.loop.nbytes}")
        if num_state not in (0, memory.state.nbytes):
            raise ProtocolError(f"{num_state} bytes of a model's buffers for those of {memory.state.nbytes}")
        behind = count + num_loop + num_state
        pad = len(padding(named + behind))
        yield from self._read_members(generation, named, nbytes - len(packed) - behind - pad)
        if self._assignment is not None and worker not in self._assignment.members and not finished:
            raise ProtocolError("a reply that assigns the data to other workers")
        place = memory.pulled[:count] if encoded else memory.weights
        if count != place.nbytes:
            raise ProtocolError(f"{count} bytes of weights for buffers of {place.nbytes}")
        yield view(place)
        if num_loop:
            yield view(memory.loop)
        if num_state:
            yield view(memory.state)
        yield from read_bytes(pad)
        memory.num_pulled = count if encoded else 0
        self._ship_state, self.ending = bool(ship_own), finished
        asked = (serial, version, batch, bool(finished), steps, lr, self._assignment)
        return Reply(worker, incarnation, *asked, dropped, discarded, optimizer, released=finished == Ending.DRAINED)

    def _read_members(self, generation: int, nbytes: int, left: int) -> Reading[None]:
        """Read the members of a new data assignment: all of a reply except its head and its weights."""
        is_whole = not nbytes or (nbytes > PASS_NBYTES and not nbytes % MEMBER_NBYTES)
        if nbytes != left or nbytes > MAX_ASSIGNMENT_NBYTES or not is_whole:
            raise ProtocolError(f"{nbytes} bytes of members in a reply that has room for {left}")
        if nbytes:
            self._assignment = unpack_assignment(generation, (yield from read_bytes(nbytes)))

    def _await_reply(self) -> None:
        """Wait until bytes arrive, sending heartbeats meanwhile."""
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(1000 * self._beat):
            self._send([memoryview(frames.beat_frame(self.num_steps()))])

    def _send_heartbeats(self) -> None:
        """In a thread: send heartbeats while nothing else is sent, and reconnect if the connection broke."""
        while not self._closed.wait(self._beat / 2):
            if time.monotonic() - self._last_sent < self._beat or not self._busy.acquire(blocking=False):
                continue
            try:
                if self._connection is not None:
                    self._send([memoryview(frames.beat_frame(self.num_steps()))])
                elif self._dropped_because is None:
                    self._reconnect(idle=True)
            except JoinRefused as reason:
                self._dropped_because = str(reason)
                self._report.dropped(str(reason))
                self._lose()
            except (ConnectionError, UserError):
                self._lose()  # the next exchange meets the same failure and handles it
            finally:
                self._busy.release()

    def _reconnect(self, idle: bool = False) -> None:
        """Ask to continue as the same worker. A server that offers a new place has forgotten this one.

        An `idle` request comes from the thread that sends heartbeats: if the server has dropped the worker because it
        makes no progress, it says so and keeps no place for it.
        """
        if self._memory is None:
            return
        self._dropped_because = None
        self._last_sent = time.monotonic()
        self._back_off.lost()
        try:
            welcome = self._connect(max(MIN_CONNECT_SECONDS, self._back_off.left), {"idle": True} if idle else {})
        except ConnectionError as error:
            self._report.lost(error, self._back_off.left)
            raise
        self._back_off.welcomed()
        self._report.back()
        if not welcome.get("again"):
            self.forgotten = welcome

    def _connect(self, seconds: float, more: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Connect once. The caller may retry after ConnectionError, not after UserError or JoinRefused."""
        connection, binding = connected(self._address, self._tls, min(CONNECT_SECONDS, seconds))
        self._connection = connection
        try:
            proof, limit = ClientHandshake(self._token, binding), min(HANDSHAKE_SECONDS, seconds)
            is_known = self._memory is not None
            welcome = introduce(connection, proof, lambda: {**self._fields, **self._fresh(), **more}, limit, is_known)
        except (ConnectionError, JoinRefused, UserError):
            self._drop()
            raise
        if welcome["secret"] is not None:
            self._fields["secret"] = welcome["secret"]  # proves at a reconnect that this is the same worker
        return welcome

    def _lose(self) -> None:
        """Note that the connection broke."""
        self._drop()
        self._back_off.lost()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, parts: list[memoryview]) -> None:
        assert self._connection is not None
        send(self._connection, *parts)
        self._last_sent = time.monotonic()
