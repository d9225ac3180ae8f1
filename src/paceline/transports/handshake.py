"""The client's side of the handshake: both ends prove the token, then one frame asks to join. No torch.

It also tells the user what becomes of the server.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import ProtocolError, UserError
from paceline.system.terminal import printable, seconds_text
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
_SCRIPT: frames.Schema = {
    "command": frames.listed(frames.text(4096), 1, 1 << 10),
    "folder": frames.text(4096),
    "files": frames.OBJECT,
    "typed": frames.listed(frames.text(64), 0, 100),
}
WELCOME: frames.Schema = {
    "worker": frames.optional(frames.integer()),
    "incarnation": frames.optional(frames.integer()),
    "secret": frames.optional(frames.text(64)),
    "again": frames.optional(frames.FLAG, False),
    "config": frames.optional(frames.OBJECT),
    "run": frames.optional(frames.text(4096), ""),
    "shards": frames.optional(frames.listed(frames.record(_SHARD), 2, 1 << 10)),
    "script": frames.optional(frames.record(_SCRIPT)),
}
"""What a server answers: a worker gets its number, the settings, the servers and the script that it is to run; an
observer gets the run's folder."""


class TlsExpected(UserError):
    """The server speaks TLS and this end does not. An end that nobody told which to use may switch to TLS."""


def introduce(
    connection: Connection,
    proof: ClientHandshake,
    fields: Callable[[], Mapping[str, Any]],
    seconds: float,
    is_known: bool = False,
) -> dict[str, Any]:
    """Return the server's welcome within `seconds`. The caller may retry after ConnectionError, not after others.

    `fields` is called when the server has proved itself: a report of the time must be fresh.

    If the server is not known yet (`is_known`) and sends nothing, check whether it expects TLS.
    """
    address, deadline = connection.peer, time.monotonic() + seconds
    connection.sock.settimeout(seconds)
    try:
        if not is_known and not isinstance(connection, TlsConnection):
            _require_no_tls(connection, min(TLS_PROBE_SECONDS, seconds))
        send(connection, proof.answer(read(connection, read_bytes(auth.CHALLENGE_NBYTES), deadline)))
        proof.check(read(connection, read_bytes(auth.PROOF_NBYTES), deadline))
        send(connection, fields_frame(FrameKind.APPLY, fields(), frames.MAX_APPLY))
        welcome = read(connection, _welcome(), deadline)
    except OtherVersion as error:
        raise UserError(f"{address} speaks {error}: install the same version of Paceline on both") from None
    except WrongToken as error:
        hint = f"give the one in RUN/token on its machine, by --token-file or in {TOKEN_VARIABLE}"
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
    """Raise TlsExpected if the server expects TLS: it would then wait for the client, and the client for the server."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(1000 * seconds) and _speaks_tls(connection.peer, seconds):
        raise TlsExpected(f"{connection.peer} speaks TLS, and we do not: leave --plain out, or give --tls")


def _speaks_tls(address: str, seconds: float) -> bool:
    with contextlib.suppress(ConnectionError, UserError):
        connected(address, worker_tls(), seconds)[0].close()
        return True
    return False


class ConnectionReport:
    """Tells the user what becomes of a server: once a process, although each of its workers has a connection."""

    def __init__(self, say: Callable[[str], None], address: str) -> None:
        self.address, self._say, self._lock = address, say, threading.Lock()
        self._lost_at: float | None = None  # when it was said that the server is lost
        self._gave_up = False
        self.run: str | None = None  # the folder of the run, on the server's machine

    def waiting(self, error: ConnectionError, left: float) -> None:
        """The server cannot be reached by a worker that wants to join."""
        refused = os.strerror(errno.ECONNREFUSED)
        what = f"nobody listens at {self.address}" if str(error) == refused else f"{self.address} cannot be reached"
        self._unreachable(f"{what} ({error})", left)

    def lost(self, error: ConnectionError, left: float) -> None:
        """The connection broke, and another one could not be made."""
        self._unreachable(f"the server at {self.address} is lost ({error})", left)

    def _unreachable(self, what: str, left: float) -> None:
        with self._lock:
            if self._lost_at is not None:
                return
            self._lost_at = time.monotonic()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        self._say(f"{what}: trying for {seconds_text(round(left))} more, until {until}")

    def back(self) -> None:
        """The server has welcomed a connection."""
        with self._lock:
            since, self._lost_at = self._lost_at, None
        if since is not None:
            self._say(f"the server at {self.address} is back after {seconds_text(round(time.monotonic() - since))}")

    def dropped(self, reason: str) -> None:
        """The server goes on without a worker of this process, whose step has not ended."""
        self._say(f"the server at {self.address} goes on without this worker: {printable(reason)}")

    def gave_up(self, patience: float) -> None:
        """The server did not come back in time."""
        with self._lock:
            known, self._gave_up = self._gave_up, True
        if not known:
            run = printable(self.run) if self.run is not None else "RUN"
            how = f"if it was killed, 'paceline server --resume {run}' on its machine continues the run"
            self._say(f"the server at {self.address} is gone and did not come back within {patience:g} s: {how}")
