"""A worker whose server is gone: how long it tries, what it tells its user, and that nothing but a reply resets it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.compression import DENSE
from paceline.core.messages import Join, Push, Reply
from paceline.errors import UserError
from paceline.transports import tcp_client
from paceline.transports.connection import parse_address
from paceline.transports.handshake import ConnectionReport
from paceline.transports.tcp_client import Backoff, TcpClient
from paceline.transports.tls import make_certificate, server_tls, worker_tls
from tests.support.small_star import TIMING, TOKEN, Star
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is long-lived after milliseconds here, and an attempt is short."""
    monkeypatch.setattr(tcp_client, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(tcp_client, "MAX_PAUSE", 0.02)
    monkeypatch.setattr(tcp_client, "MIN_CONNECT_SECONDS", 0.05, raising=False)


@contextlib.contextmanager
def listening(address: str, lives: float | None) -> Iterator[None]:
    """Something other than a server at its address: it closes connections after `lives` seconds; None: never."""
    host, port = parse_address(address)
    ended, held = threading.Event(), list[socket.socket]()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(taken.accept()[0])
                if lives is not None and not ended.wait(lives):
                    held.pop().close()

    with socket.create_server((host, port)) as taken:
        threading.Thread(target=accept, daemon=True).start()
        yield
        ended.set()
        taken.shutdown(socket.SHUT_RDWR)
    for one in held:
        one.close()


@pytest.mark.long
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("there", ["nobody", "silent", "closing"])
def test_a_worker_gives_up_whatever_holds_the_address_of_its_dead_server(
    tmp_path: Path, there: str, secure: bool
) -> None:
    """Its connection had lasted long, and so do those that something else accepts and never answers."""
    said: list[str] = []
    tls = server_tls(*make_certificate(tmp_path)) if secure else None
    with Star(DENSE, 4, tls) as star:
        address = star.listener.address
        report = ConnectionReport(said.append, address)
        report.run = "runs/it"
        ours = worker_tls() if secure else None
        door = TcpClient(address, TOKEN, ours, patience=0.3, report=report)
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
    answers: list[Reply | None] = []
    push = Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state)
    asking = threading.Thread(target=lambda: answers.append(door.exchange(push, TIMING)), daemon=True)
    lives = {"nobody": None, "silent": None, "closing": 0.03}[there]
    with listening(address, lives) if there != "nobody" else contextlib.nullcontext():
        asking.start()
        try:
            until(lambda: answers, "the worker gives up", seconds=20)
        finally:
            door.abandon()
            asking.join()
    assert answers == [None] and door.farewell is None
    lost, gone = said
    assert re.fullmatch(rf"the server at {address} is lost \(.+\): trying for 0 s more, until \d\d:\d\d:\d\d", lost)
    way_on = "if it was killed, 'paceline server --resume runs/it' on its machine continues the run"
    assert gone == f"the server at {address} is gone and did not come back within 0.3 s: {way_on}"
    door.close()


def test_only_seconds_without_the_server_count_and_only_a_reply_resets_them() -> None:
    now = [0.0]
    back_off = Backoff(10.0, lambda: now[0])
    for _ in range(3):  # welcomed again and again, each time for a long while, and never answered
        back_off.lost()
        now[0] += 3.0
        assert back_off.pause() is not None
        back_off.welcomed()
        now[0] += 1000.0
    assert back_off.left == 1.0
    back_off.lost()
    now[0] += 1.0
    assert back_off.pause() is None
    back_off.answered()
    back_off.lost()
    assert back_off.left == 10.0 and back_off.pause() is not None


def test_the_workers_of_one_process_speak_once() -> None:
    said: list[str] = []
    report = ConnectionReport(said.append, "10.0.0.1:7000")
    for _ in range(2):
        for _ in range(3):
            report.lost(ConnectionError("closed by the other end"), 300.0)
        for _ in range(3):
            report.back()
    for _ in range(3):
        report.gave_up(300.0)
    kinds = [re.search("is lost|is back|is gone", text) for text in said]
    assert [kind and kind[0] for kind in kinds] == ["is lost", "is back", "is lost", "is back", "is gone"]


def test_a_name_from_the_server_cannot_drive_the_terminal() -> None:
    said: list[str] = []
    report = ConnectionReport(said.append, "10.0.0.1:7000")
    report.run = "runs/\x1b[2J"
    report.gave_up(1.0)
    assert "\x1b" not in said[0] and r"runs/\x1b[2J" in said[0]


def test_a_wrong_port_is_a_line_long_before_the_worker_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still except for the pauses, so that the seconds are exact."""
    now, said = [0.0], list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr(tcp_client, "MAX_PAUSE", 1.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Backoff.__init__, "__defaults__", (lambda: now[0],))
    door = TcpClient(address, TOKEN, report=ConnectionReport(lambda text: said.append(f"{now[0]:.0f} {text}"), address))
    with pytest.raises(UserError, match=r"cannot be reached \(Connection refused\): is the server running"):
        door.apply({}, patience=30.0)
    pattern = r"[12] nobody listens at \S+ \(Connection refused\): trying for 2[89] s more, until \S+"
    assert len(said) == 1 and re.fullmatch(pattern, said[0])


def test_a_broken_connection_that_is_mended_at_once_is_not_worth_a_line() -> None:
    said: list[str] = []
    with Star(DENSE, 4) as star:
        address = star.listener.address
        door = TcpClient(address, TOKEN, beat=0.01, report=ConnectionReport(said.append, address))
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
        star.doors[0].connection.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: len(star.applied) == 2, "a second handshake")
        assert door.exchange(Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state), TIMING) is not None
        door.close()
    assert said == []
