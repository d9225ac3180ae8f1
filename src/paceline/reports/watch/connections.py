"""The connections of the live page's server: bounded in all and per address; heads bounded in time and size."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from paceline.transports.connection import source_of

MAX_CONNECTIONS = 100
MAX_PER_ADDRESS = 40  # a browser has at most 6; several may share an address behind a proxy
HEAD_SECONDS = 10.0  # for the whole head of a request, however slowly its bytes come
MAX_HEAD_NBYTES = 1 << 15


@dataclass
class _OpenConnection:
    """One connection, oldest first in the table; idle until the head of its request is complete."""

    socket: socket.socket
    address: str
    idle: bool = True


class ConnectionTable:
    """Gives every address its share: a newcomer takes the place of the oldest idle connection of whoever has most."""

    def __init__(self, most: int | None = None, most_per_address: int | None = None) -> None:
        self._most = most if most is not None else MAX_CONNECTIONS
        self._most_per_address = most_per_address if most_per_address is not None else MAX_PER_ADDRESS
        self._open: dict[int, _OpenConnection] = {}
        self._lock = threading.Lock()

    def admit(self, sock: socket.socket, address: str) -> bool:
        """Take a new connection in, if need be in place of another, which is shut down; return whether it is taken."""
        new = _OpenConnection(sock, source_of(address))
        with self._lock:
            own = [one for one in self._open.values() if one.address == new.address]
            place: _OpenConnection | None = None
            if len(own) >= self._most_per_address:
                place = next((one for one in own if one.idle), None)
            elif len(self._open) >= self._most:
                place = self._place(len(own))
            else:
                self._open[id(sock)] = new
                return True
            if place is None:
                return False
            del self._open[id(place.socket)]
            self._open[id(sock)] = new
        with contextlib.suppress(OSError):
            place.socket.shutdown(socket.SHUT_RDWR)  # its thread then ends
        return True

    def _place(self, own: int) -> _OpenConnection | None:
        """Return the connection that a newcomer replaces: idle, of the address with most; None if none is over."""
        counts: dict[str, int] = {}
        for one in self._open.values():
            counts[one.address] = counts.get(one.address, 0) + 1
        idle = [one for one in self._open.values() if one.idle]
        if idle:
            return max(idle, key=lambda one: counts[one.address])  # the oldest of equals
        most = max(counts, key=lambda address: counts[address])
        return next(one for one in self._open.values() if one.address == most) if counts[most] > own + 1 else None

    def set_busy(self, sock: socket.socket) -> None:
        """The head of its request is complete."""
        with self._lock:
            if id(sock) in self._open:
                self._open[id(sock)].idle = False

    def release(self, sock: socket.socket) -> None:
        """The connection is closed."""
        with self._lock:
            self._open.pop(id(sock), None)


class HeadReader(io.RawIOBase):
    """Reads the head of one request, until an absolute deadline and up to a number of bytes."""

    def __init__(self, sock: socket.socket, seconds: float, nbytes: int) -> None:
        self._socket, self._until, self._left = sock, time.monotonic() + seconds, nbytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive what is there; raise TimeoutError past the deadline or the size."""
        left = self._until - time.monotonic()
        if left <= 0.0 or self._left <= 0:
            raise TimeoutError("the head of a request is too slow or too long")
        self._socket.settimeout(left)
        received = self._socket.recv_into(buffer, min(len(buffer), self._left))
        self._left -= received
        return received
