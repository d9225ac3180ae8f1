"""The server's side of the handshake: accept connections, check the token, read one frame that asks to join."""

from __future__ import annotations

import contextlib
import errno
import select
import time
from typing import Any

from paceline.core.buffers import BufferSizes
from paceline.errors import ProtocolError
from paceline.transports import frames
from paceline.transports.auth import ANSWER_NBYTES, DENIAL, ServerHandshake, WrongToken
from paceline.transports.connection import Connection, TlsConnection, accepted, format_address, listen, require_token
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
_AT_ONCE = 64
_KEPT_COMPLAINTS = 20
_QUIET_SECONDS = 1.0


class JoinRequest:
    """An authenticated request to join, which waits for `welcome`, `welcome_back` or `refuse`."""

    def __init__(self, connection: Connection, fields: dict[str, Any]) -> None:
        self.connection, self.peer, self.fields = connection, connection.peer, fields

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

    def welcome(self, fields: dict[str, Any], largest: BufferSizes) -> TcpPeer:
        """Accept it as a worker: `fields` holds its number, its incarnation and everything it needs to start.

        `largest` limits the buffers that its hello may ask for.
        """
        peer = TcpPeer(self.connection, fields["worker"], fields["incarnation"], largest)
        peer.send(_welcome_frame({"again": False, **fields}))
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
        self._shaken = False  # whether the TLS handshake is done
        self._outbox = SendQueue()
        self._filler = FrameReader(_application(connection, self._outbox, ServerHandshake(token, binding)))

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether to call `step` when the connection accepts bytes."""
        return bool(self._outbox) or self.connection.wants_write

    def step(self) -> JoinRequest | None:
        """Continue with the bytes that have arrived. If they are wrong, close it and raise ProtocolError."""
        connection = self.connection
        try:
            if isinstance(connection, TlsConnection) and not self._shaken:
                self._shaken = connection.shake_hands()
                if not self._shaken:
                    return None
            whole = self._filler.fill(connection.receive_into)
            self._outbox.flush(connection.send)
        except (ProtocolError, ConnectionError) as error:
            connection.close()
            raise ProtocolError(f"{self.peer} was turned away: {error}") from None
        return JoinRequest(connection, whole[0]) if whole is not None else None


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
        self.num_refused = 0
        self._complaints: list[str] = []
        self._quiet_until = 0.0
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `serve` has something to do."""
        return self._poll.fileno()

    def serve(self, now: float | None = None) -> list[JoinRequest]:
        """Accept connections, continue handshakes, close expired ones. Return the requests that are complete.

        Call it when `fileno()` is readable, and about once a second while there are strangers.
        """
        now = time.monotonic() if now is None else now
        requests = []
        for number, _ in self._poll.poll(0):
            if number == self._socket.fileno():
                self.accept(now)
            elif number in self.strangers:
                request = self._step(self.strangers[number])
                requests += [request] if request is not None else []
        self.expire(now)
        return requests

    def accept(self, now: float) -> None:
        """Accept waiting connections and send the challenge. If there are too many, close the oldest stranger."""
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self.strangers:
                    self._complain(f"a connection could not be accepted: {error.strerror}")
                    break
                self._drop(next(iter(self.strangers.values())), "no descriptors are left")
                continue
            if len(self.strangers) >= self._most:
                reason = f"more than {self._most} unauthenticated connections at once"
                self._drop(next(iter(self.strangers.values())), reason)
            connection = accepted(sock, format_address(address), self._tls)
            stranger = UnauthenticatedPeer(connection, self._token, self._binding, now)
            self.strangers[stranger.fileno()] = stranger
            self._poll.register(stranger.fileno(), select.EPOLLIN)
            self._step(stranger)  # sends the challenge, which has no answer yet

    def _step(self, stranger: UnauthenticatedPeer) -> JoinRequest | None:
        number, wanted_write = stranger.fileno(), stranger.wants_write
        try:
            request = stranger.step()
        except ProtocolError as error:
            del self.strangers[number]  # closing it removed it from the poll
            self._complain(str(error))
            return None
        if request is not None:
            del self.strangers[number]
            self._poll.unregister(number)
        elif stranger.wants_write != wanted_write:
            self._poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if stranger.wants_write else 0))
        return request

    def expire(self, now: float) -> None:
        """Close strangers that are too slow. Their time counts from the start: sending single bytes gains nothing."""
        while self.strangers:
            oldest = next(iter(self.strangers.values()))
            if now - oldest.since < self._seconds:
                break
            self._drop(oldest, f"no proof within {self._seconds:g} s")

    def _drop(self, stranger: UnauthenticatedPeer, reason: str) -> None:
        del self.strangers[stranger.fileno()]
        stranger.connection.close()
        self._complain(f"{stranger.peer} was turned away: {reason}")

    def _complain(self, text: str) -> None:
        self.num_refused += 1
        if len(self._complaints) < _KEPT_COMPLAINTS:
            self._complaints.append(text)
        else:
            self._complaints[-1] = f"and others were turned away ({self.num_refused} so far), the last: {text}"

    def complaints(self) -> list[str]:
        """For the log: connections refused since the last call, with reasons; at most a few per second."""
        now = time.monotonic()
        if not self._complaints or now < self._quiet_until:
            return []
        self._quiet_until = now + _QUIET_SECONDS
        found, self._complaints = self._complaints, []
        return found

    def close(self) -> None:
        """Stop listening and close all strangers."""
        for stranger in self.strangers.values():
            stranger.connection.close()
        self.strangers.clear()
        self._poll.close()
        self._socket.close()
