"""The server's side of the handshake: accept connections, check the token, read one frame that asks to join."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from paceline.core.buffers import BufferSizes
from paceline.errors import ProtocolError
from paceline.transports import frames
from paceline.transports.auth import ANSWER_NBYTES, DENIAL, ServerHandshake, WrongToken
from paceline.transports.connection import (
    ClosedByPeer,
    Connection,
    TlsConnection,
    accepted,
    format_address,
    listen,
    parse_address,
    require_token,
    source_of,
)
from paceline.transports.frames import FrameKind, FrameReader, Reading, SendQueue
from paceline.transports.tcp_server import TcpPeer
from paceline.transports.tls import Tls

STRANGER_SECONDS = 10.0
_PLACE: frames.Schema = {
    "machine": frames.text(255),
    "cores": frames.integer(1),
    "process": frames.integer(1),
    "threads": frames.integer(1),
    "clock": frames.number(0.0, 1e12),
}
APPLICATION: frames.Schema = {
    "worker": frames.optional(frames.integer()),
    "incarnation": frames.optional(frames.integer()),
    "secret": frames.optional(frames.text(64)),
    "again": frames.optional(frames.FLAG, False),
    "idle": frames.optional(frames.FLAG, False),  # it asks for nothing but why it was dropped
    "version": frames.optional(frames.text(64)),
    "device": frames.optional(frames.text(64), "cpu"),
    "place": frames.optional(frames.record(_PLACE)),
    "observer": frames.optional(frames.FLAG, False),
    "shard": frames.optional(frames.FLAG, False),
    "address": frames.optional(frames.text(300), ""),
    "fingerprint": frames.optional(frames.text(100)),
    "pid": frames.optional(frames.integer(), 0),
}
"""What a worker, an observer or a further server says of itself when it asks to join."""
MAX_COMPLAINTS, COMPLAINT_SECONDS = 3, 60.0
"""How many refused connections are described in each such period; the others are only counted."""
MAX_SHARE, BURST_SECONDS = 0.05, 0.0125
"""Strangers take at most this share of the server's time, and this much at once: workers come first."""
SOON_SECONDS = 0.02
MAX_UNPAUSED = 32  # events of strangers after which they wait for `expire`: waking up for each would cost more
_AT_ONCE = 32
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class JoinRequest:
    """An authenticated request to join, which waits for `welcome`, `welcome_back` or `refuse`."""

    def __init__(self, connection: Connection, fields: dict[str, Any], accepted_at: float | None = None) -> None:
        self.connection, self.peer, self.fields = connection, connection.peer, fields
        self.accepted_at = accepted_at  # by the clock of this machine; the request was made later

    def refuse(self, reason: str) -> None:
        """Refuse the request, with a reason that the client shows its user."""
        self._send(frames.refusal_frame(reason))
        self.connection.close()

    def take_on(self, fields: dict[str, Any]) -> None:
        """Accept it as something other than a worker. The caller then owns the connection."""
        self._send(_welcome_frame(fields))

    def _send(self, frame: bytes) -> None:
        outbox = SendQueue()
        outbox.add(frame)
        with contextlib.suppress(ConnectionError):
            outbox.flush(self.connection.send)

    def welcome(self, fields: dict[str, Any], largest: BufferSizes | None) -> TcpPeer:
        """Accept it as a worker: `fields` holds its number, its incarnation and everything it needs to start.

        `largest` limits the buffers that its hello may ask for; None: this machine's memory does.
        """
        peer = TcpPeer(self.connection, fields["worker"], fields["incarnation"], largest)
        peer.send(_welcome_frame({"again": False, "secret": peer.secret, **fields}))
        return peer

    def welcome_back(self, peer: TcpPeer, fields: dict[str, Any]) -> None:
        """Accept a worker that reconnects: `peer` continues on this connection."""
        peer.attach(self.connection)
        peer.send(_welcome_frame({**fields, "worker": peer.worker, "incarnation": peer.incarnation, "again": True}))


def _welcome_frame(fields: dict[str, Any]) -> bytes:
    return frames.fields_frame(FrameKind.WELCOME, fields, frames.MAX_WELCOME)


class UnauthenticatedPeer:
    """A connection that is not authenticated yet."""

    def __init__(self, connection: Connection, token: bytes, binding: bytes, now: float) -> None:
        self.connection, self.peer, self.since = connection, connection.peer, now
        self.source, self._accepted_at = source_of(parse_address(self.peer)[0]), time.time()
        self._shaken = self._has_spoken = False  # whether the TLS handshake is done, and a byte of the proof has come
        self._outbox = SendQueue()
        self._handshake = ServerHandshake(token, binding)
        self._filler = FrameReader(_application(connection, self._outbox, self._handshake))

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether to call `step` when the connection accepts bytes."""
        return bool(self._outbox) or self.connection.wants_write

    def _receive_into(self, place: memoryview) -> int | None:
        count = self.connection.receive_into(place)
        self._has_spoken |= count is not None
        return count

    def step(self) -> JoinRequest | None:
        """Continue with the bytes that have arrived. If they are wrong, close it and raise ProtocolError.

        If there were none, as from a worker that tries whether a server speaks TLS, the end is a ClosedByPeer.
        """
        connection = self.connection
        try:
            if isinstance(connection, TlsConnection) and not self._shaken:
                self._shaken = connection.shake_hands()
                if not self._shaken:
                    return None
            whole = self._filler.fill(self._receive_into)
            self._outbox.flush(connection.send)
        except Exception as error:  # whatever a stranger causes ends his connection alone
            connection.close()
            if isinstance(error, ClosedByPeer) and not self._has_spoken:
                raise
            known = isinstance(error, ProtocolError | ConnectionError)
            raise ProtocolError(str(error) if known else f"{type(error).__name__}: {error}") from None
        if whole is None:
            return None
        wants_to_read, request = bool(whole[0].get("observer")), JoinRequest(connection, whole[0], self._accepted_at)
        if self._handshake.reads_only and not wants_to_read:
            request.refuse("this token is for observers, who only read: a worker needs the run's own")
            raise ProtocolError("it asked to join with the token of observers")
        return request


def _application(connection: Connection, outbox: SendQueue, handshake: ServerHandshake) -> Reading[dict[str, Any]]:
    """Read the handshake and the request. Holds no reference to the peer, to avoid a reference cycle."""
    outbox.add(handshake.challenge)
    answer = yield from frames.read_bytes(ANSWER_NBYTES)
    try:
        outbox.add(handshake.check(answer))
    except WrongToken:
        outbox.add(DENIAL)
        outbox.flush(connection.send)
        raise
    _, nbytes = yield from frames.read_header({FrameKind.APPLY: frames.MAX_APPLY})
    try:
        return (yield from frames.read_checked(nbytes, APPLICATION))
    except ProtocolError as error:
        outbox.add(frames.refusal_frame(f"a request to join with {error}"))
        outbox.flush(connection.send)
        raise


class Complaints:
    """What the user is told about refused connections: the first few of each minute, and the number of the others.

    >>> complaints = Complaints()
    >>> for number in range(3):
    ...     complaints.add(f"{number} was turned away")
    >>> complaints.take(now=0.0)
    ['0 was turned away', '1 was turned away', '2 was turned away']
    >>> for number in range(3, 8):
    ...     complaints.add(f"{number} was turned away")
    >>> complaints.take(now=59.0), complaints.take(now=60.0)
    ([], ['and 5 others (8 so far), the last: 7 was turned away'])
    """

    def __init__(self) -> None:
        self.total = 0
        self._waiting: list[str] = []
        self._num_told = self._num_others = 0
        self._last = ""
        self._period_ends = float("-inf")

    def add(self, text: str | None) -> None:
        """Count a connection that came to nothing; None: it asked for nothing, and gets no line."""
        self.total += 1
        if text is not None and self._num_told + len(self._waiting) < MAX_COMPLAINTS:
            self._waiting.append(text)
        elif text is not None:
            self._num_others, self._last = self._num_others + 1, text

    def take(self, now: float, all_of_them: bool = False) -> list[str]:
        """Return the lines to show now; `all_of_them` at the end, when there is no later."""
        found, self._waiting = self._waiting, []
        if now >= self._period_ends or all_of_them:
            if self._num_others:
                others = f"{self._num_others} other{'s' if self._num_others > 1 else ''}"
                found.append(f"and {others} ({self.total} so far), the last: {self._last}")
            self._num_told = self._num_others = 0
            self._period_ends = now + COMPLAINT_SECONDS if found else now
        self._num_told += len(found)
        return found


class Listener:
    """Listens at one address. Poll its `fileno()`; `serve` then does everything that does not block."""

    def __init__(
        self, address: str, token: bytes, tls: Tls | None = None, most: int = 256, seconds: float = STRANGER_SECONDS
    ) -> None:
        self._token, self._tls, self._most, self._seconds = token, tls, most, seconds
        self._binding = (tls.fingerprint or "").encode() if tls is not None else b""
        require_token(address, token)
        self._socket = listen(address)
        self.address = format_address(self._socket.getsockname())  # the address with the port that the system chose
        self.strangers: dict[int, UnauthenticatedPeer] = {}  # by descriptor, oldest first
        self._by_source: dict[str, list[UnauthenticatedPeer]] = {}
        self._complaints = Complaints()
        self._spare = os.open(os.devnull, os.O_RDONLY)  # closed to accept, and end, a connection without descriptors
        self._poll, self._outer = select.epoll(), select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)
        self._outer.register(self._poll.fileno(), select.EPOLLIN)  # changed to pause
        self._paused, self._num_events, self._spent, self._spent_at = False, 0, 0.0, time.monotonic()

    @property
    def num_refused(self) -> int:
        """How many connections came to nothing since the start."""
        return self._complaints.total

    def fileno(self) -> int:
        """Readable when `serve` has something to do, and may."""
        return self._outer.fileno()

    def serve(self, now: float | None = None) -> list[JoinRequest]:
        """Accept connections, continue handshakes, close expired ones. Return the requests that are complete.

        Call it when `fileno()` is readable, and `expire` several times a second.
        """
        now, began = time.monotonic() if now is None else now, time.thread_time()
        requests = []
        for number, _ in self._poll.poll(0, _AT_ONCE):
            if number == self._socket.fileno():
                self.accept(now)
            elif number in self.strangers:
                self._num_events += 1
                request = self._step(self.strangers[number])
                requests += [request] if request is not None else []
        self._expire_strangers(now)
        self._spent += time.thread_time() - began
        self._pause(now)
        return requests

    def accept(self, now: float) -> None:
        """Accept waiting connections and send the challenge."""
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._free_descriptor()
                else:
                    self.complain(f"a connection could not be accepted: {error.strerror}")
                continue
            if len(self.strangers) >= self._most:
                self._evict(f"more than {self._most} unauthenticated connections at once")
            self._num_events += 1
            self._begin(sock, address, now)

    def _begin(self, sock: socket.socket, address: Sequence[object], now: float) -> None:
        """Send the challenge. Whatever goes wrong, as with a connection that was reset already, is its own end."""
        peer = format_address(address)
        try:
            stranger = UnauthenticatedPeer(accepted(sock, peer, self._tls), self._token, self._binding, now)
            self._poll.register(stranger.fileno(), select.EPOLLIN)
        except OSError as error:
            sock.close()
            self._turned_away(peer, error)
            return
        self.strangers[stranger.fileno()] = stranger
        self._by_source.setdefault(stranger.source, []).append(stranger)
        self._step(stranger)  # sends the challenge, which has no answer yet

    def _step(self, stranger: UnauthenticatedPeer) -> JoinRequest | None:
        number, wanted_write = stranger.fileno(), stranger.wants_write
        try:
            request = stranger.step()
        except (ClosedByPeer, ProtocolError) as error:  # closing it removed it from the poll
            self._forget(number)
            self._turned_away(stranger.peer, error)
            return None
        if request is not None:
            self._forget(number)
            self._poll.unregister(number)
        elif stranger.wants_write != wanted_write:
            self._poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if stranger.wants_write else 0))
        return request

    def expire(self, now: float) -> bool:
        """Close strangers that are too slow, and let others continue that wait because of `MAX_SHARE`.

        Return whether there were such: then call again soon, say in `SOON_SECONDS`.
        """
        had_paused, self._num_events = self._paused, 0
        self._expire_strangers(now)
        self._pause(now)
        return had_paused

    def _expire_strangers(self, now: float) -> None:
        """Close those that are too slow. Their time counts from the start: sending single bytes gains nothing."""
        while self.strangers:
            oldest = next(iter(self.strangers.values()))
            if now - oldest.since < self._seconds:
                break
            self._drop(oldest, f"no proof within {self._seconds:g} s")

    def _pause(self, now: float) -> None:
        """Stop or go on listening, by the time that strangers took and by the number of their events."""
        self._spent = max(0.0, self._spent - MAX_SHARE * max(0.0, now - self._spent_at))
        self._spent_at = now
        if self._paused is not (self._spent > BURST_SECONDS or self._num_events > MAX_UNPAUSED):
            self._paused = not self._paused
            self._outer.modify(self._poll.fileno(), 0 if self._paused else select.EPOLLIN)

    def _evict(self, reason: str) -> None:
        """Close a random stranger of the address that has the most.

        So whoever floods from one address takes no place from others. At random, not the oldest: then a newcomer has a
        chance at any rate of the flood, and none can be pushed out on purpose.
        """
        self._drop(secrets.choice(max(self._by_source.values(), key=len)), reason)

    def _free_descriptor(self) -> None:
        """Close a stranger or, without one, the connection that waits: else the poll would return at once for ever."""
        if self.strangers:
            self._evict("no descriptors are left")
            return
        with contextlib.suppress(OSError):
            os.close(self._spare)
            self._spare = -1
            sock, address = self._socket.accept()
            sock.close()
            self.complain(f"{format_address(address)} was turned away: no descriptors are left")
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _drop(self, stranger: UnauthenticatedPeer, reason: str) -> None:
        self._forget(stranger.fileno())
        stranger.connection.close()
        self.complain(f"{stranger.peer} was turned away: {reason}")

    def _forget(self, number: int) -> None:
        stranger = self.strangers.pop(number)
        here = self._by_source[stranger.source]
        here.remove(stranger)
        if not here:
            del self._by_source[stranger.source]

    def _turned_away(self, peer: str, error: Exception) -> None:
        self._complaints.add(None if isinstance(error, ClosedByPeer) else f"{peer} was turned away: {error}")

    def complain(self, text: str) -> None:
        """Count a refused connection; `complaints` tells the user."""
        self._complaints.add(text)

    def complaints(self, all_of_them: bool = False) -> list[str]:
        """For the log: connections refused since the last call, with reasons; at most a few lines a minute."""
        return self._complaints.take(time.monotonic(), all_of_them)

    def close(self) -> None:
        """Stop listening and close all strangers."""
        for stranger in self.strangers.values():
            stranger.connection.close()
        self.strangers.clear()
        self._by_source.clear()
        self._outer.close()
        self._poll.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self._spare)
