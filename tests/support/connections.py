"""Two ends of a connection within one process."""

from __future__ import annotations

import socket

from paceline.transports.connection import Connection


def connected() -> tuple[Connection, Connection]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return Connection(ends[0], "first", waits=False), Connection(ends[1], "second", waits=False)
