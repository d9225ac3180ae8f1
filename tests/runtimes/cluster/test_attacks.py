"""Somebody else in the server's place, or between it and a worker, does not make the worker run his code."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import RunConfig, to_dict
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runtimes.cluster.join import join_server
from paceline.settings.resolve import resolve
from paceline.transports import auth
from paceline.transports.auth import (
    ANSWER_NBYTES,
    CHALLENGE_NBYTES,
    PROOF_NBYTES,
    ConnectOptions,
    ServerHandshake,
    make_token,
)
from paceline.transports.connection import parse_address
from paceline.transports.frames import HEADER_NBYTES, MAX_WELCOME, FrameKind, fields_frame
from paceline.transports.listener import Listener
from paceline.transports.tls import make_certificate, server_tls, worker_tls
from tests.support.small_star import Star

Talk = Callable[[socket.socket, bytes], None]
"""How an attacker does the handshake; the bytes are what binds it to his certificate."""


class Attacker:
    """Accepts connections, of TLS with his own certificate, and ends each with the welcome of a run with his code."""

    def __init__(self, folder: Path, talk: Talk) -> None:
        code, self.marker = folder / "evil.py", folder / "it_ran"
        code.write_text(f"import pathlib\npathlib.Path({str(self.marker)!r}).touch()\nraise SystemExit(3)\n")
        config = resolve(RunConfig(strategy="async", workers=1, task=f"{code}:build", steps=1))
        welcome = {"worker": 0, "incarnation": 0, "config": to_dict(config), "run": "it"}
        self._welcome = fields_frame(FrameKind.WELCOME, welcome, MAX_WELCOME)
        self._talk, self._tls = talk, server_tls(*make_certificate(folder / "his"))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until the listener is shut down
            while True:
                self._serve(self._listener.accept()[0])

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            sock.settimeout(5)
            speaks_first = sock.recv(1, socket.MSG_PEEK) if _sends_within(sock, 0.2) else b""
            binding = b""
            if speaks_first == b"\x16":
                sock, binding = (
                    self._tls.context.wrap_socket(sock, server_side=True),
                    str(self._tls.fingerprint).encode(),
                )
            with sock:
                self._talk(sock, binding)
                _receive(sock, HEADER_NBYTES)  # the application
                sock.sendall(self._welcome)
                sock.recv(1 << 16)

    def __enter__(self) -> Attacker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def _sends_within(sock: socket.socket, seconds: float) -> bool:
    sock.settimeout(seconds)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        sock.settimeout(5)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("closed")
        data += piece
    return data


def pose(token: bytes) -> Talk:
    """Take the server's place with this token."""

    def talk(sock: socket.socket, binding: bytes) -> None:
        handshake = ServerHandshake(token, binding)
        sock.sendall(handshake.challenge)
        try:
            sock.sendall(handshake.check(_receive(sock, ANSWER_NBYTES)))
        except auth.WrongToken:
            sock.sendall(PROOF_NBYTES * b"x")

    return talk


def relay_to(server: str, encrypted: bool) -> Talk:
    """Stand between the worker and its server: pass the handshake on, and take the connection over after it."""

    def talk(sock: socket.socket, binding: bytes) -> None:
        far = socket.create_connection(parse_address(server), 5)
        with worker_tls().context.wrap_socket(far) if encrypted else far as far:
            sock.sendall(_receive(far, CHALLENGE_NBYTES))
            far.sendall(_receive(sock, ANSWER_NBYTES))
            sock.sendall(_receive(far, PROOF_NBYTES))

    return talk


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    auth.write_secret(tmp_path / "token", make_token())
    return tmp_path / "token"


def attacked(attacker: Attacker, options: ConnectOptions, message: str) -> None:
    """Let a worker connect to the attacker; check that it refuses with the message, and runs nothing."""
    with attacker, contextlib.suppress(SystemExit), pytest.raises(UserError, match=message):
        join_server(options, Console(quiet=True))
    assert not attacker.marker.exists(), "the worker ran the attacker's code"


@pytest.mark.parametrize("tls", [None, True])
@pytest.mark.parametrize("known", [b"", b"a guess"])
def test_whoever_takes_the_port_of_a_dead_server_commands_no_worker(
    tmp_path: Path, token_file: Path, tls: bool | None, known: bytes
) -> None:
    """Any user of a machine can listen at a free port of it, loopback included."""
    attacker = Attacker(tmp_path, pose(known))
    options = ConnectOptions(attacker.address, str(token_file), tls, patience=1.0)
    attacked(attacker, options, "does not know our token")


@pytest.mark.parametrize("tls", [None, True])
def test_a_worker_without_a_token_obeys_nobody_and_says_where_it_is(tmp_path: Path, tls: bool | None) -> None:
    attacker = Attacker(tmp_path, pose(b""))
    message = "no token for .*: give RUN/token by --token-file or PACELINE_TOKEN; on the server's own machine the run's"
    attacked(attacker, ConnectOptions(attacker.address, tls=tls, patience=1.0), message)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_relay_between_two_machines_commands_no_worker(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """By default, without a flag for TLS: the worker's proof holds for the certificate that the relay showed it."""
    monkeypatch.setattr(auth, "is_loopback", lambda host: False, raising=False)
    tls = server_tls(*make_certificate(tmp_path / "ours")) if encrypted else None
    with Star(listener=Listener("127.0.0.1:0", token_file.read_bytes(), tls)) as star:
        attacker = Attacker(tmp_path, relay_to(star.listener.address, encrypted))
        attacked(attacker, ConnectOptions(attacker.address, str(token_file), patience=1.0), "does not accept our token")
        assert star.applied == []
