"""Read a remote run's files, as an observer with the token: it costs the server one sleeping thread. No torch here."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.errors import ProtocolError, UserError
from paceline.transports import frames
from paceline.transports.auth import ClientHandshake
from paceline.transports.connection import Connection, JoinRefused, connected, read, require_token, send
from paceline.transports.frames import FrameKind, Reading, fields_frame, read_bytes, read_fields, read_header
from paceline.transports.handshake import CONNECT_SECONDS, HANDSHAKE_SECONDS, introduce
from paceline.transports.tls import Tls

ANSWER_SECONDS = 30.0
SHOWN = ("config.toml", "events.jsonl", "arrivals.log", "result.json")
"""The files of a run folder that observers may read. The token is not one of them."""


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
            welcome = introduce(self._connection, proof, lambda: {"observer": True}, HANDSHAKE_SECONDS)
        except (ConnectionError, JoinRefused, UserError) as error:
            self.close()
            if isinstance(error, UserError):
                raise
            raise UserError(f"{address}: {error}; no server there lets this machine look at its run") from None
        self._connection.sock.settimeout(ANSWER_SECONDS)
        self.run = str(welcome.get("run", ""))  # the run folder's path on the server

    def read(self, name: str, offset: int = 0, most: int = frames.MAX_PIECE) -> FileChunk | None:
        """Read at most `most` bytes of a file from `offset` on; a negative offset counts from the end.

        Return None if there is no such file (yet). The next call reads what was appended meanwhile.
        """
        fields = {"file": name, "offset": offset, "most": most}
        send(self._connection, fields_frame(FrameKind.LOOK, fields, frames.MAX_LOOK))
        try:
            return read(self._connection, _piece(most))
        except ProtocolError as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _piece(most: int) -> Reading[FileChunk | None]:
    kind, nbytes = yield from read_header({FrameKind.SEEN: frames.MAX_SEEN, FrameKind.REFUSED: frames.MAX_REFUSED})
    fields = yield from read_fields(nbytes)
    if kind is FrameKind.REFUSED:
        raise ProtocolError(fields.get("reason", "no reason given"))
    _, nbytes = yield from read_header({FrameKind.BODY: most})
    data = bytes((yield from read_bytes(nbytes)))
    if fields.get("size") is None:
        return None
    try:
        return FileChunk(int(fields["offset"]), int(fields["size"]), float(fields["age"]), data)
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("a malformed part of a file") from None


def read_look(connection: Connection) -> dict[str, Any]:
    """On the server: read the next request."""

    def reading() -> Reading[dict[str, Any]]:
        _, nbytes = yield from read_header({FrameKind.LOOK: frames.MAX_LOOK})
        return (yield from read_fields(nbytes))

    return read(connection, reading())
