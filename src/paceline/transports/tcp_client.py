"""The worker's side of TCP: what shared memory does, and what a network adds: handshake, heartbeats, reconnects."""

from __future__ import annotations

import contextlib
import math
import random
import select
import threading
import time
from collections.abc import Mapping
from typing import Any

from paceline.core.buffers import WorkerBuffers, view
from paceline.core.messages import DataAssignment, Join, Push, Reply
from paceline.errors import ProtocolError, UnknownWorker, UserError
from paceline.interfaces import MAX_WORKERS
from paceline.transports import frames
from paceline.transports.auth import ClientHandshake
from paceline.transports.connection import Connection, JoinRefused, connected, read, require_token, send
from paceline.transports.frames import PUSH_HEAD, REPLY_HEAD, FrameKind, Reading, header, padding, read_bytes
from paceline.transports.handshake import CONNECT_SECONDS, HANDSHAKE_SECONDS, introduce
from paceline.transports.protocol import MEMBER_NBYTES, Timing, Transport, unpack_members
from paceline.transports.tls import Tls

BEAT_SECONDS = 1.0
FIRST_PATIENCE_SECONDS, PATIENCE_SECONDS = 10.0, 120.0
FIRST_PAUSE, MAX_PAUSE = 0.05, 5.0
MAX_BATCH, MAX_STEPS = 1 << 48, 1 << 24  # no run is so long: a reply that asks for more is not from a server of ours


class Backoff:
    """Exponential backoff with jitter, until `patience` seconds have passed."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._pause = FIRST_PAUSE
        self._since: float | None = None

    def pause(self, lived: float) -> float | None:
        """Seconds to wait after a connection broke that had lasted `lived` seconds, or None to give up."""
        now = time.monotonic()
        if self._since is None or lived > MAX_PAUSE:
            self._since, self._pause = now, FIRST_PAUSE
        seconds = self._pause * random.uniform(0.5, 1.5)
        self._pause = min(2 * self._pause, MAX_PAUSE)
        return seconds if now + seconds < self._since + self._patience else None


class TcpClient(Transport):
    """A worker's connection to one server: `apply`, `hello`, then exchange pushes for weights.

    If the connection breaks, it reconnects for up to `patience` seconds and sends again what has no reply. If the
    server does not know the worker any more, it raises `UnknownWorker`: the worker then joins again on the same client.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        tls: Tls | None = None,
        patience: float = PATIENCE_SECONDS,
        beat: float = BEAT_SECONDS,
    ) -> None:
        self._address, self._token, self._tls = address, token, tls
        self._patience, self._beat = patience, beat
        self._connection: Connection | None = None
        self._opened = self._last_sent = 0.0
        self._fields: dict[str, Any] = {}
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

    def apply(
        self, fields: Mapping[str, Any], patience: float = FIRST_PATIENCE_SECONDS, beats: bool = True
    ) -> dict[str, Any]:
        """Connect, authenticate and ask to join. Return the server's welcome; raise UserError if it refuses."""
        require_token(self._address, self._token)
        self._fields = dict(fields)
        back_off = Backoff(patience)
        with self._busy:
            while True:
                try:
                    welcome = self._connect(patience)
                    break
                except ConnectionError as error:
                    seconds = back_off.pause(0.0)
                    if seconds is None:
                        hint = "is the server running, reachable from here, and TLS on at both ends or at neither?"
                        raise UserError(f"{self._address} cannot be reached ({error}): {hint}") from None
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
        self._memory, self._ship_state, self.forgotten, self._assignment = memory, False, None, None
        self._fields |= {"again": True, "worker": join.worker, "incarnation": join.incarnation}
        fields = {**join._asdict(), "sizes": memory.sizes, **facts}
        reply = self._ask(join, [memoryview(frames.fields_frame(FrameKind.HELLO, fields, frames.MAX_HELLO))])
        if reply is None and self.farewell is not None:
            raise UserError(f"{self._address}: {self.farewell}")
        return reply

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send a push and wait for its reply. Return None if the server is gone for good."""
        assert self._memory is not None
        bodies = [view(push.update), view(push.state)]
        local_state = view(self._memory.saved_states) if self._ship_state else memoryview(b"")
        sizes = [len(body) for body in (*bodies, local_state)]
        head = PUSH_HEAD.pack(push.seq, push.reply, push.samples, *sizes, push.loss, *timing, push.weight or 0.0)
        pad = padding(sum(sizes))
        first = header(FrameKind.PUSH, len(head) + sum(sizes) + len(pad)) + head
        return self._ask(push, [memoryview(first), *bodies, local_state, memoryview(pad)])

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
        with self._busy, contextlib.suppress(ConnectionError):
            if self._connection is not None:
                self._send([memoryview(header(FrameKind.BYE, 0))])
            self._drop()
        if self._beating is not None:
            self._beating.join()

    def _ask(self, message: Join | Push, parts: list[memoryview]) -> Reply | None:
        """Send a frame, again after each reconnect, until its reply has come."""
        back_off = Backoff(self._patience)
        with self._busy:
            while not self._closed.is_set():
                try:
                    if self._connection is None:
                        self._reconnect()
                    if self.forgotten is not None:
                        raise UnknownWorker(self.forgotten)
                    self._send(parts)
                    self._await_reply()
                    assert self._connection is not None
                    return read(self._connection, self._reply(message.worker, message.incarnation))
                except ConnectionError:
                    self._drop()
                except JoinRefused as reason:
                    self.farewell = str(reason)
                    return None
                except ProtocolError as error:
                    self._drop()
                    raise ProtocolError(f"{self._address} broke the protocol: it sent {error}") from None
                seconds = back_off.pause(time.monotonic() - self._opened)
                if seconds is None:
                    return None
                self._closed.wait(seconds)
        return None

    def _reply(self, worker: int, incarnation: int) -> Reading[Reply]:
        """Read a reply, and its weights into the worker's buffers."""
        memory = self._memory
        assert memory is not None
        most = MEMBER_NBYTES * MAX_WORKERS + max(memory.weights.nbytes, memory.pulled.nbytes)
        largest = REPLY_HEAD.size + most + len(padding(most))
        kind, nbytes = yield from frames.read_header({FrameKind.REPLY: largest, FrameKind.REFUSED: frames.MAX_REFUSED})
        if kind is FrameKind.REFUSED:
            raise JoinRefused((yield from frames.read_refusal(nbytes)))
        packed = yield from read_bytes(REPLY_HEAD.size)
        finished, encoded, ship_own, *facts, generation, named, count, discarded = REPLY_HEAD.unpack(packed)
        serial, version, batch, lr, steps = facts
        if not 0.0 <= lr < math.inf or batch > MAX_BATCH or steps > MAX_STEPS:
            raise ProtocolError(
                f"a reply that asks for {steps} steps from batch {batch} on at a learning rate of {lr:g}"
            )
        pad = len(padding(named + count))
        yield from self._read_members(generation, named, nbytes - len(packed) - count - pad)
        if self._assignment is not None and worker not in self._assignment.members and not finished:
            raise ProtocolError("a reply that assigns the data to other workers")
        place = memory.pulled[:count] if encoded else memory.weights
        if count != place.nbytes:
            raise ProtocolError(f"{count} bytes of weights for buffers of {place.nbytes}")
        yield view(place)
        yield from read_bytes(pad)
        memory.num_pulled = count if encoded else 0
        self._ship_state = bool(ship_own)
        asked = (serial, version, batch, bool(finished), steps, lr, self._assignment)
        return Reply(worker, incarnation, *asked, discarded=discarded)

    def _read_members(self, generation: int, nbytes: int, left: int) -> Reading[None]:
        """Read the members of a new data assignment: all of a reply except its head and its weights."""
        if nbytes != left or nbytes > MEMBER_NBYTES * MAX_WORKERS or nbytes % MEMBER_NBYTES:
            raise ProtocolError(f"{nbytes} bytes of members in a reply that has room for {left}")
        if nbytes:
            self._assignment = DataAssignment(generation, unpack_members((yield from read_bytes(nbytes))))

    def _await_reply(self) -> None:
        """Wait until bytes arrive, sending heartbeats meanwhile."""
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(1000 * self._beat):
            self._send([memoryview(header(FrameKind.BEAT, 0))])

    def _send_heartbeats(self) -> None:
        """In a thread: send heartbeats while nothing else is sent, and reconnect if the connection broke."""
        while not self._closed.wait(self._beat / 2):
            if time.monotonic() - self._last_sent < self._beat or not self._busy.acquire(blocking=False):
                continue
            try:
                if self._connection is None:
                    self._reconnect()
                else:
                    self._send([memoryview(header(FrameKind.BEAT, 0))])
            except (ConnectionError, JoinRefused, UserError):
                self._drop()  # the next exchange meets the same failure and handles it
            finally:
                self._busy.release()

    def _reconnect(self) -> None:
        """Ask to continue as the same worker. A server that offers a new place has forgotten this one."""
        if self._memory is None:
            return
        self._last_sent = time.monotonic()
        welcome = self._connect(self._patience)
        if not welcome.get("again"):
            self.forgotten = welcome

    def _connect(self, seconds: float) -> dict[str, Any]:
        """Connect once. The caller may retry after ConnectionError, not after UserError or JoinRefused."""
        connection, binding = connected(self._address, self._tls, min(CONNECT_SECONDS, seconds))
        self._connection, self._opened = connection, time.monotonic()
        try:
            proof, limit = ClientHandshake(self._token, binding), min(HANDSHAKE_SECONDS, seconds)
            return introduce(connection, proof, self._fields, limit, is_known=self._memory is not None)
        except (ConnectionError, JoinRefused, UserError):
            self._drop()
            raise

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, parts: list[memoryview]) -> None:
        assert self._connection is not None
        send(self._connection, *parts)
        self._last_sent = time.monotonic()
