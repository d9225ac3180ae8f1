"""One TCP connection, plain or TLS, blocking or not: opening it, sending and receiving parts of frames. No torch."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from typing import TypeVar

from paceline.errors import UserError
from paceline.transports.frames import MAGIC, FrameReader, Reading, SendQueue
from paceline.transports.tls import Tls, fingerprint

SILENT_MILLISECONDS = 20_000  # if sent bytes stay unacknowledged for so long, the other machine is gone
MAX_PORT = 65535
ANYWHERE = ("0.0.0.0", "::")  # what to look for, not where to listen
_PIECE = 1 << 30  # the most bytes per call: TLS takes lengths as C integers
T = TypeVar("T")
_DATES = (9, 10)  # TLS error codes of certificates that are not valid yet or have expired: the clock here may be wrong


def parse_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`; an IPv6 address stands in brackets.

    >>> parse_address("[::1]:7000"), parse_address("localhost:0")
    (('::1', 7000), ('localhost', 0))
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal():
        raise UserError(f"address '{text}': write HOST:PORT, like 10.0.0.5:7000")
    if int(port) > MAX_PORT:
        raise UserError(f"address '{text}': a port is a number from 0 (a free one) to {MAX_PORT}")
    return host, int(port)


def format_address(address: Sequence[object]) -> str:
    """Format a socket's address; the inverse of `parse_address`.

    >>> format_address(("::1", 7000, 0, 0))
    '[::1]:7000'
    """
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def source_of(host: str) -> str:
    """Return what one machine cannot choose freely of its address: all of IPv4, the network of IPv6.

    >>> source_of("10.0.0.5"), source_of("2001:db8:0:1::7"), source_of("::1")
    ('10.0.0.5', '2001:db8:0:1::', '::')
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is not None:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(str(row[4][0]).startswith("127.") or row[4][0] == "::1" for row in found)


def require_token(address: str, token: bytes) -> None:
    """Require a token at every address: a server tells its workers what to run, and any user can take a free port."""
    parse_address(address)
    if not token:
        raise UserError(f"{address}: there is no token: give one by --token-file or in PACELINE_TOKEN")


def prepare(sock: socket.socket) -> None:
    """Send small frames at once, and notice a vanished machine within half a minute, idle or not."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = (socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)
    for option, value in ((socket.TCP_NODELAY, 1), *idle, (socket.TCP_USER_TIMEOUT, SILENT_MILLISECONDS)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class ClosedByPeer(ConnectionError):
    """The other end closed or reset the connection."""


class Connection:
    """Sends and receives as much as it can. Every end of the connection raises ConnectionError."""

    def __init__(self, sock: socket.socket, peer: str, waits: bool) -> None:
        self.sock, self.peer = sock, peer
        self.wants_write = False  # whether the TLS handshake waits until bytes can be sent
        self._flags = socket.MSG_WAITALL if waits else 0

    def fileno(self) -> int:
        """The socket's descriptor, or -1 if it is closed."""
        return self.sock.fileno()

    def receive_into(self, place: memoryview) -> int | None:
        """Receive into `place`. Return the number of bytes (at least 1), or None if there are none yet."""
        try:
            count = self.sock.recv_into(place[:_PIECE], 0, self._flags)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ConnectionResetError as error:
            raise ClosedByPeer(str(error)) from None
        except OSError as error:
            raise ConnectionError(str(error)) from None
        if not count:
            raise ClosedByPeer("closed by the other end")
        return count

    def send(self, parts: list[memoryview]) -> int | None:
        """Send from `parts`. Return the number of bytes sent, or None if the socket's buffer is full."""
        try:
            return self.sock.sendmsg(parts)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionError(str(error)) from None

    def is_closed(self) -> bool:
        """Whether the other end has closed, without consuming unread bytes. Always False over TLS."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ValueError):
            return False
        except OSError:
            return True

    def stop_waiting(self) -> None:
        """Make it non-blocking."""
        self.sock.setblocking(False)
        self._flags = 0

    def shut_down(self) -> None:
        """Wake a thread that is waiting for bytes. Callable from any thread."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class TlsConnection(Connection):
    """A connection over TLS, which sends one buffer at a time."""

    sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        super().__init__(sock, peer, waits=False)

    def shake_hands(self) -> bool:
        """Continue the TLS handshake. Return True when it is done."""
        self.wants_write = False
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return False
        except (ssl.SSLEOFError, ConnectionResetError) as error:
            raise ClosedByPeer(f"no TLS: {getattr(error, 'reason', None) or error}") from None
        except (OSError, ValueError) as error:
            raise ConnectionError(f"no TLS: {getattr(error, 'reason', None) or error}") from None
        return True

    def send(self, parts: list[memoryview]) -> int | None:
        """Send from the first part only. Return the number of bytes sent, or None if the socket's buffer is full."""
        try:
            return self.sock.send(parts[0][:_PIECE])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None
        except OSError as error:
            raise ConnectionError(str(error)) from None


def listen(address: str) -> socket.socket:
    """Listen at `address`, non-blocking. Raise UserError if that is not possible."""
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
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        why = {
            errno.EADDRINUSE: "another program listens there: choose another port",
            errno.EADDRNOTAVAIL: "this machine does not have that address: give one of its own, or 0.0.0.0 for all",
            errno.EACCES: "only root may listen at ports below 1024: choose another port",
        }.get(error.errno or 0, error.strerror)
        raise UserError(f"cannot listen at {address}: {why}") from None
    return sock


def accepted(sock: socket.socket, peer: str, tls: Tls | None) -> Connection:
    """Wrap an accepted socket, non-blocking. Over TLS the handshake is still to be done.

    Close it and raise ConnectionError if that fails: the other end may have reset the connection already.
    """
    try:
        sock.setblocking(False)
        if tls is None:
            return Connection(sock, peer, waits=False)
        sock.getpeername()  # `wrap_socket` leaves a socket open that it finds reset
        return TlsConnection(tls.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), peer)
    except (OSError, ValueError) as error:
        sock.close()
        gone = isinstance(error, OSError) and error.errno == errno.ENOTCONN
        raise (ClosedByPeer if gone else ConnectionError)(str(error)) from None


def connected(address: str, tls: Tls | None, seconds: float) -> tuple[Connection, bytes]:
    """Connect to a server, with a timeout of `seconds`. Return the connection and its binding for the handshake.

    Raise UserError if the certificate is not the expected one, ConnectionError for every other failure.
    """
    host, port = parse_address(address)
    try:
        sock = socket.create_connection((host, port), seconds)
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None
    try:
        prepare(sock)
        if tls is None:
            return Connection(sock, address, waits=True), b""
        wrapped = tls.context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        clock = f"; here it is {time.strftime('%Y-%m-%d %H:%M')}" if error.verify_code in _DATES else ""
        raise UserError(f"{address}: its certificate is not trusted ({error.verify_message}{clock})") from None
    except OSError as error:
        sock.close()
        if _speaks_plainly((host, port), min(seconds, 1.0)):
            hint = "start its server with --tls, or give both ends --plain if the network is private"
            raise UserError(f"{address} does not speak TLS, and we do: {hint}") from None
        raise ConnectionError(f"no TLS: {getattr(error, 'reason', None) or error}") from None
    found = fingerprint(wrapped.getpeercert(binary_form=True) or b"")
    if tls.fingerprint not in (None, found):
        wrapped.close()
        raise UserError(f"{address} has the certificate {found}, not {tls.fingerprint}: is it the right server?")
    return TlsConnection(wrapped, address), found.encode()


def _speaks_plainly(place: tuple[str, int], seconds: float) -> bool:
    """Whether a Paceline server without TLS is there: it sends first."""
    try:
        with socket.create_connection(place, seconds) as sock:
            return sock.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
    except OSError:
        return False


class JoinRefused(Exception):
    """The server refused the worker; the message is its reason."""


def send(connection: Connection, *parts: bytes | memoryview) -> None:
    """Send all parts on a blocking connection."""
    outbox = SendQueue()
    outbox.add(*parts)
    outbox.flush(connection.send)


def read(connection: Connection, reading: Reading[T], deadline: float | None = None) -> T:
    """Read to the end of `reading` on a blocking connection; until `deadline`, by the monotonic clock, if there is one.

    A timeout of the socket would not do: it begins anew with every byte.
    """

    def receive_in_time(place: memoryview) -> int | None:
        assert deadline is not None
        seconds = deadline - time.monotonic()
        if seconds <= 0.0:
            raise ConnectionError("the answer took too long")
        connection.sock.settimeout(seconds)
        return connection.receive_into(place)

    whole = FrameReader(reading).fill(connection.receive_into if deadline is None else receive_in_time)
    assert whole is not None, "a blocking connection never returns early"
    return whole[0]
