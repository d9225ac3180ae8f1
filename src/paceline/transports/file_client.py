"""Read a remote run's files, as an observer with the token: it costs the server one sleeping thread. No torch here."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from paceline.errors import ProtocolError, UserError
from paceline.transports import frames
from paceline.transports.auth import ClientHandshake
from paceline.transports.connection import Connection, JoinRefused, connected, read, require_token, send
from paceline.transports.frames import (
    FrameKind,
    Reading,
    fields_frame,
    read_bytes,
    read_checked,
    read_header,
    read_refusal,
)
from paceline.transports.handshake import CONNECT_SECONDS, HANDSHAKE_SECONDS, introduce
from paceline.transports.tls import Tls

ANSWER_SECONDS = 30.0
MAX_OFFSET = 1 << 48
SHOWN = ("config.toml", "events.jsonl", "arrivals.log", "result.json")
"""The files of a run folder that observers may read. The token is not one of them."""


LOOK: frames.Schema = {
    "file": frames.text(100),
    "offset": frames.integer(-MAX_OFFSET, MAX_OFFSET),
    "most": frames.integer(0, frames.MAX_PIECE),
}
SEEN: frames.Schema = {
    "offset": frames.optional(frames.integer(0, MAX_OFFSET), 0),
    "size": frames.optional(frames.integer(0, MAX_OFFSET)),
    "age": frames.optional(frames.number(0.0, 1e12), 0.0),
}
"""A request for a part of a file, and the head of its answer: without a size there is no such file."""


class FileChunk(NamedTuple):
    """Some bytes of a file."""

    offset: int
    size: int  # the size of the whole file when it was read
    age: float  # seconds since the file was last written
    data: bytes


class FileClient:
    """A connection for reading the files of a remote run. Every end of it raises ConnectionError.

    The constructor tries once and raises UserError if no server answers or the server refuses.
    """

    def __init__(self, address: str, token: bytes, tls: Tls | None = None) -> None:
        require_token(address, token)
        self.address = address
        try:
            self._connection, binding = connected(address, tls, CONNECT_SECONDS)
        except ConnectionError as error:
            raise UserError(f"{address} cannot be reached ({error}): is a 'paceline server' running there?") from None
        try:
            proof = ClientHandshake(token, binding)
            welcome = introduce(self._connection, proof, {"observer": True}, HANDSHAKE_SECONDS)
        except (ConnectionError, JoinRefused, UserError) as error:
            self.close()
            if isinstance(error, UserError):
                raise
            raise UserError(f"{address}: {error}; no server there lets this machine look at its run") from None
        self._connection.sock.settimeout(ANSWER_SECONDS)
        self.run: str = welcome["run"]  # the run folder's path on the server

    def read(self, name: str, offset: int = 0, most: int = frames.MAX_PIECE) -> FileChunk | None:
        """Read at most `most` bytes of a file from `offset` on; a negative offset counts from the end.

        Return None if there is no such file (yet). The next call reads what was appended meanwhile.
        """
        fields = {"file": name, "offset": offset, "most": most}
        send(self._connection, fields_frame(FrameKind.LOOK, fields, frames.MAX_LOOK))
        try:
            return read(self._connection, _piece(offset, most), time.monotonic() + ANSWER_SECONDS)
        except ProtocolError as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _piece(asked: int, most: int) -> Reading[FileChunk | None]:
    """Read the part of a file from `asked` on, which may be counted from its end, or None if there is no such file."""
    kind, nbytes = yield from read_header({FrameKind.SEEN: frames.MAX_SEEN, FrameKind.REFUSED: frames.MAX_REFUSED})
    if kind is FrameKind.REFUSED:
        raise ProtocolError((yield from read_refusal(nbytes)))
    fields = yield from read_checked(nbytes, SEEN)
    _, nbytes = yield from read_header({FrameKind.BODY: most})
    data = bytes((yield from read_bytes(nbytes)))
    if (size := fields["size"]) is None:
        return None
    begin = max(0, size + asked) if asked < 0 else min(asked, size)
    if fields["offset"] != begin or begin + nbytes > size:
        raise ProtocolError(f"{nbytes} bytes of a file of {size} at {fields['offset']}, asked for from {asked} on")
    return FileChunk(begin, size, fields["age"], data)


def read_look(connection: Connection) -> dict[str, Any]:
    """On the server: read the next request."""

    def reading() -> Reading[dict[str, Any]]:
        _, nbytes = yield from read_header({FrameKind.LOOK: frames.MAX_LOOK})
        return (yield from read_checked(nbytes, LOOK))

    return read(connection, reading())
