"""How one comes in at a server: both ends prove that they know the token, one frame says who we are. No torch here."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Mapping
from typing import Any

from paceline.errors import ProtocolError, UserError
from paceline.transports.auth import CHALLENGE_NBYTES, PROOF_NBYTES, OtherVersion, Visitor, WrongToken
from paceline.transports.connection import Connection, Refused, TlsConnection, connected, read, send
from paceline.transports.frames import (
    MOST_APPLY,
    MOST_REFUSED,
    MOST_WELCOME,
    Kind,
    Reading,
    fields_frame,
    read_bytes,
    read_fields,
    read_header,
)
from paceline.transports.tls import worker_tls

CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 30.0
"""A server that scores its model answers nobody meanwhile."""
WONDER_SECONDS = 2.0
"""A server that says nothing for so long may be waiting for TLS."""


def introduce(
    connection: Connection,
    token: bytes,
    binding: bytes,
    fields: Mapping[str, Any],
    seconds: float,
    is_known: bool = False,
) -> dict[str, Any]:
    """The server's welcome. A ConnectionError can be tried again, a UserError or a refusal cannot; then hang up.

    A server that is not known yet and says nothing is looked at: it may want TLS.
    """
    address = connection.peer
    connection.sock.settimeout(seconds)
    try:
        if not is_known and not isinstance(connection, TlsConnection):
            _require_speech(connection, min(WONDER_SECONDS, seconds))
        _prove(connection, Visitor(token, binding))
        send(connection, fields_frame(Kind.APPLY, fields, MOST_APPLY))
        welcome = read(connection, _welcome())
    except OtherVersion as error:
        raise UserError(f"{address} speaks {error}: install the same version of Paceline on both") from None
    except WrongToken as error:
        raise UserError(
            f"{address} {error}: give the one that it showed, by --token-file or in PACELINE_TOKEN"
        ) from None
    except ProtocolError as error:
        raise UserError(f"{address} is no Paceline server of ours: it sent {error}") from None
    connection.sock.settimeout(None)
    return welcome


def _prove(connection: Connection, visitor: Visitor) -> None:
    challenge = read(connection, read_bytes(CHALLENGE_NBYTES))
    send(connection, visitor.answer(challenge))
    visitor.check(read(connection, read_bytes(PROOF_NBYTES)))


def _welcome() -> Reading[dict[str, Any]]:
    kind, nbytes = yield from read_header({Kind.WELCOME: MOST_WELCOME, Kind.REFUSED: MOST_REFUSED})
    fields = yield from read_fields(nbytes)
    if kind is Kind.REFUSED:
        raise Refused(fields.get("reason", "no reason given"))
    return fields


def _require_speech(connection: Connection, seconds: float) -> None:
    """A server speaks first; with TLS it waits for us to do so, and both would wait until one gives up."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(1000 * seconds) and _speaks_tls(connection.peer, seconds):
        raise UserError(f"{connection.peer} speaks TLS, and we do not: give --tls here too, as its server has it")


def _speaks_tls(address: str, seconds: float) -> bool:
    with contextlib.suppress(ConnectionError, UserError):
        connected(address, worker_tls(), seconds)[0].close()
        return True
    return False
