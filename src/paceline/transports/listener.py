"""The server's side of the handshake: accept connections, check the token, read one frame that asks to join.

An unauthenticated connection costs a socket and a few bytes for a few seconds, and their number is limited.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from typing import Any

from paceline.core.buffers import BufferSizes
from paceline.errors import ProtocolError, UserError
from paceline.transports.auth import ANSWER_NBYTES, DENIAL, ServerHandshake, WrongToken
from paceline.transports.connection import (
    Connection,
    TlsConnection,
    accepted,
    format_address,
    parse_address,
    prepare,
    require_token,
)
from paceline.transports.frames import (
    MAX_APPLY,
    MAX_WELCOME,
    FrameKind,
    FrameReader,
    Reading,
    SendQueue,
    fields_frame,
    read_bytes,
    read_fields,
    read_header,
    refusal_frame,
)
from paceline.transports.tcp_server import TcpPeer
from paceline.transports.tls import Tls

MAX_STRANGERS = 256
STRANGER_SECONDS = 10.0
BACKLOG = 1024
_AT_ONCE = 64
_KEPT_COMPLAINTS = 20
_QUIET_SECONDS = 1.0


class JoinRequest:
    """An authenticated request to join, which waits for `welcome`, `welcome_back` or `refuse`."""

    def __init__(self, connection: Connection, fields: dict[str, Any]) -> None:
        self.connection, self.peer, self.fields = connection, connection.peer, fields

    def refuse(self, reason: str) -> None:
        """Refuse the request, with a reason that the client shows its user."""
        outbox = SendQueue()
        outbox.add(refusal_frame(reason))
        with contextlib.suppress(ConnectionError):
            outbox.flush(self.connection.send)
        self.connection.close()

    def take_on(self, fields: dict[str, Any]) -> None:
        """Accept it as something other than a worker. The caller then owns the connection."""
        outbox = SendQueue()
        outbox.add(fields_frame(FrameKind.WELCOME, fields, MAX_WELCOME))
        with contextlib.suppress(ConnectionError):
            outbox.flush(self.connection.send)

    def welcome(self, fields: dict[str, Any], largest: BufferSizes) -> TcpPeer:
        """Accept it as a worker: `fields` holds its number, its incarnation and everything it needs to start.

        `largest` limits the buffers that its hello may ask for.
        """
        peer = TcpPeer(self.connection, fields["worker"], fields["incarnation"], largest)
        peer.send(fields_frame(FrameKind.WELCOME, {"again": False, **fields}, MAX_WELCOME))
        return peer

    def welcome_back(self, peer: TcpPeer, fields: dict[str, Any]) -> None:
        """Accept a worker that reconnects: `peer` continues on this connection."""
        peer.attach(self.connection)
        known = {"worker": peer.worker, "incarnation": peer.incarnation}
        peer.send(fields_frame(FrameKind.WELCOME, {**fields, **known, "again": True}, MAX_WELCOME))


class UnauthenticatedPeer:
    """A connection that is not authenticated yet."""

    def __init__(self, connection: Connection, token: bytes, binding: bytes, now: float) -> None:
        self.connection, self.peer, self.since = connection, connection.peer, now
        self._shaken = not isinstance(connection, TlsConnection)
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
        try:
            whole = self._go_on()
        except (ProtocolError, ConnectionError) as error:
            self.connection.close()
            raise ProtocolError(f"{self.peer} was turned away: {error}") from None
        return JoinRequest(self.connection, whole[0]) if whole is not None else None

    def _go_on(self) -> tuple[dict[str, Any]] | None:
        connection = self.connection
        if not self._shaken:
            assert isinstance(connection, TlsConnection)
            self._shaken = connection.shake_hands()
            if not self._shaken:
                return None
        whole = self._filler.fill(connection.receive_into)
        self._outbox.flush(connection.send)
        return whole


def _application(connection: Connection, outbox: SendQueue, gatekeeper: ServerHandshake) -> Reading[dict[str, Any]]:
    """Read the handshake and the request. Holds no reference to the Stranger, to avoid a reference cycle."""
    outbox.add(gatekeeper.challenge)
    answer = yield from read_bytes(ANSWER_NBYTES)
    try:
        outbox.add(gatekeeper.check(answer))
    except WrongToken:
        outbox.add(DENIAL)
        outbox.flush(connection.send)
        raise
    _, nbytes = yield from read_header({FrameKind.APPLY: MAX_APPLY})
    return (yield from read_fields(nbytes))


class Listener:
    """Listens at one address. Poll its `fileno()`; `serve` then does everything that does not block."""

    def __init__(
        self,
        address: str,
        token: bytes,
        tls: Tls | None = None,
        most: int = MAX_STRANGERS,
        seconds: float = STRANGER_SECONDS,
    ) -> None:
        self._token, self._tls, self._most, self._seconds = token, tls, most, seconds
        self._binding = (tls.fingerprint or "").encode() if tls is not None else b""
        require_token(parse_address(address)[0], token)
        self._socket = _listen(address)
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
        applicants = []
        for number, _ in self._poll.poll(0):
            if number == self._socket.fileno():
                self.accept(now)
            elif number in self.strangers:
                applicant = self._step(self.strangers[number])
                applicants += [applicant] if applicant is not None else []
        self.expire(now)
        return applicants

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
                self._drop(
                    next(iter(self.strangers.values())), f"more than {self._most} unauthenticated connections at once"
                )
            stranger = UnauthenticatedPeer(
                accepted(sock, format_address(address), self._tls), self._token, self._binding, now
            )
            self.strangers[stranger.fileno()] = stranger
            self._poll.register(stranger.fileno(), select.EPOLLIN)
            self._step(stranger)  # sends the challenge, which has no answer yet

    def _step(self, stranger: UnauthenticatedPeer) -> JoinRequest | None:
        number, wanted_write = stranger.fileno(), stranger.wants_write
        try:
            applicant = stranger.step()
        except ProtocolError as error:
            del self.strangers[number]  # closing it removed it from the poll
            self._complain(str(error))
            return None
        if applicant is not None:
            del self.strangers[number]
            self._poll.unregister(number)
        elif stranger.wants_write != wanted_write:
            self._poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if stranger.wants_write else 0))
        return applicant

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


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise UserError(f"cannot listen at {address}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        prepare(sock)  # accepted sockets inherit these options
        sock.bind(place)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        taken = "another program listens there: choose another port" if error.errno == errno.EADDRINUSE else None
        raise UserError(f"cannot listen at {address}: {taken or error.strerror}") from None
    return sock
