"""The client's side of the handshake: both ends prove the token, then one frame asks to join. No torch."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import ProtocolError, UserError
from paceline.transports import auth, frames
from paceline.transports.auth import TOKEN_VARIABLE, ClientHandshake, OtherVersion, WrongToken
from paceline.transports.connection import Connection, JoinRefused, TlsConnection, connected, read, send
from paceline.transports.frames import (
    FrameKind,
    Reading,
    fields_frame,
    read_bytes,
    read_checked,
    read_header,
    read_refusal,
)
from paceline.transports.tls import worker_tls

CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 30.0  # A server that evaluates its model does not answer meanwhile
TLS_PROBE_SECONDS = 2.0  # A server that sends nothing for so long may be waiting for TLS
_SHARD: frames.Schema = {
    "span": frames.listed(frames.integer(0, 1 << 48), 2, 2),
    "address": frames.optional(frames.text(300), ""),
    "fingerprint": frames.optional(frames.text(100)),
}
WELCOME: frames.Schema = {
    "worker": frames.optional(frames.integer()),
    "incarnation": frames.optional(frames.integer()),
    "secret": frames.optional(frames.text(64)),
    "again": frames.optional(frames.FLAG, False),
    "config": frames.optional(frames.OBJECT),
    "run": frames.optional(frames.text(4096), ""),
    "shards": frames.optional(frames.listed(frames.record(_SHARD), 2, 1 << 10)),
}
"""What a server answers: a worker gets its number, the settings and the servers; an observer gets the run's folder."""


def introduce(
    connection: Connection, proof: ClientHandshake, fields: Mapping[str, Any], seconds: float, is_known: bool = False
) -> dict[str, Any]:
    """Return the server's welcome within `seconds`. The caller may retry after ConnectionError, not after others.

    If the server is not known yet (`is_known`) and sends nothing, check whether it expects TLS.
    """
    address, deadline = connection.peer, time.monotonic() + seconds
    connection.sock.settimeout(seconds)
    try:
        if not is_known and not isinstance(connection, TlsConnection):
            _require_no_tls(connection, min(TLS_PROBE_SECONDS, seconds))
        send(connection, proof.answer(read(connection, read_bytes(auth.CHALLENGE_NBYTES), deadline)))
        proof.check(read(connection, read_bytes(auth.PROOF_NBYTES), deadline))
        send(connection, fields_frame(FrameKind.APPLY, fields, frames.MAX_APPLY))
        welcome = read(connection, _welcome(), deadline)
    except OtherVersion as error:
        raise UserError(f"{address} speaks {error}: install the same version of Paceline on both") from None
    except WrongToken as error:
        hint = f"give the one that it showed, by --token-file or in {TOKEN_VARIABLE}"
        raise UserError(f"{address} {error}: {hint}") from None
    except ProtocolError as error:
        raise UserError(f"{address} is not a Paceline server: it sent {error}") from None
    connection.sock.settimeout(None)
    return welcome


def _welcome() -> Reading[dict[str, Any]]:
    most = {FrameKind.WELCOME: frames.MAX_WELCOME, FrameKind.REFUSED: frames.MAX_REFUSED}
    kind, nbytes = yield from read_header(most)
    if kind is FrameKind.REFUSED:
        raise JoinRefused((yield from read_refusal(nbytes)))
    return (yield from read_checked(nbytes, WELCOME))


def _require_no_tls(connection: Connection, seconds: float) -> None:
    """Raise UserError if the server expects TLS: it would then wait for the client, and the client for the server."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(1000 * seconds) and _speaks_tls(connection.peer, seconds):
        raise UserError(f"{connection.peer} speaks TLS, and we do not: give --tls here too, as its server has it")


def _speaks_tls(address: str, seconds: float) -> bool:
    with contextlib.suppress(ConnectionError, UserError):
        connected(address, worker_tls(), seconds)[0].close()
        return True
    return False
