"""Servers that hold the token and lie: a worker or observer ends in one line, within a bounded time."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join
from paceline.errors import PacelineError, ProtocolError, RunFailed, UserError
from paceline.reports.watch import mirror as mirrors
from paceline.reports.watch.mirror import Mirror
from paceline.runtimes.cluster.worker import ServerAddress, WorkerOptions, work
from paceline.runtimes.scripts.remote.worker import WorkerCommand
from paceline.transports import file_client, handshake
from paceline.transports.auth import ANSWER_NBYTES, ServerHandshake
from paceline.transports.file_client import FileClient
from paceline.transports.frames import HEADER_NBYTES, REPLY_HEAD, FrameKind, header
from paceline.transports.tcp_client import TcpClient
from paceline.transports.tls import Tls, worker_tls

pytestmark = pytest.mark.long  # left to `make test`

TOKEN = b"of a lying server"
Act = Callable[[socket.socket], None]


def frame(kind: FrameKind, body: bytes | str | dict[str, Any]) -> bytes:
    body = json.dumps(body) if isinstance(body, dict) else body
    body = body.encode() if isinstance(body, str) else body
    return header(kind, len(body)) + body


def read_all(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes and (piece := connection.recv(nbytes - len(found))):
        found += piece
    return found


def read_frame(connection: socket.socket) -> bytes:
    head = read_all(connection, HEADER_NBYTES)
    return read_all(connection, int.from_bytes(head[8:], "little"))


def secured(connection: socket.socket, tls: Tls | None) -> socket.socket:
    return tls.context.wrap_socket(connection, server_side=True) if tls is not None else connection


def ours(tls: Tls | None) -> Tls | None:
    """The worker's side of it."""
    return worker_tls() if tls is not None else None


@contextlib.contextmanager
def served_by(act: Act, tls: Tls | None = None) -> Iterator[str]:
    """A server that proves its token and then does what it likes, with every connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with contextlib.suppress(OSError, struct.error), secured(connection, tls) as connection:
                    proof = ServerHandshake(TOKEN, (tls.fingerprint or "").encode() if tls is not None else b"")
                    connection.sendall(proof.challenge)
                    connection.sendall(proof.check(read_all(connection, ANSWER_NBYTES)))
                    read_frame(connection)
                    act(connection)
                    while connection.recv(1 << 16):  # until the other end has seen enough
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(20)


WELCOMES: list[bytes] = [
    frame(FrameKind.WELCOME, "[" * 50_000),
    frame(FrameKind.WELCOME, {"worker": [0]}),
    frame(FrameKind.WELCOME, {"worker": 0, "incarnation": -1}),
    frame(FrameKind.WELCOME, '{"worker": Infinity}'),
    frame(FrameKind.WELCOME, {"worker": 0, "incarnation": 0, "shards": {"a": 1}}),
    frame(FrameKind.WELCOME, {"worker": 0, "incarnation": 0, "shards": [{"span": [0, "x"]}, {"span": [1, 2]}]}),
    frame(FrameKind.REFUSED, {"reason": ["training", "is over"]}),
    frame(FrameKind.REFUSED, b"\xff"),
    frame(FrameKind.SHARD, {}),
]


@pytest.mark.parametrize("welcome", WELCOMES, ids=itertools.count())
def test_a_welcome_that_is_none_is_one_line(welcome: bytes, tls: Tls | None) -> None:
    with served_by(lambda connection: connection.sendall(welcome), tls) as address:
        with pytest.raises(UserError, match="is not a Paceline server: it sent") as found:
            TcpClient(address, TOKEN, ours(tls)).apply({}, beats=False)
        assert str(found.value).isprintable()


@pytest.mark.parametrize("secret", ["\x1b[2J\x07you have won", "\u202eevil", "\N{SNAKE}" * 500], ids=itertools.count())
def test_the_reason_of_a_refusal_is_shown_and_not_obeyed(secret: str, tls: Tls | None) -> None:
    refusal = frame(FrameKind.REFUSED, {"reason": secret})
    with served_by(lambda connection: connection.sendall(refusal), tls) as address:
        with pytest.raises(UserError) as found:
            TcpClient(address, TOKEN, ours(tls)).apply({}, beats=False)
        assert str(found.value).isprintable()


@pytest.mark.parametrize(
    "config",
    [{}, {"shoe_size": 44}, {"workers": "many"}, {"strategy": ["a"]}, {"strategy": "\x1b[2J"}, {"model": 7}, None],
)
def test_settings_that_are_none_are_one_line(config: dict[str, Any] | None) -> None:
    welcome = frame(FrameKind.WELCOME, {"worker": 0, "incarnation": 0, "config": config})
    with served_by(lambda connection: connection.sendall(welcome)) as address:
        server = ServerAddress(address, TOKEN, None, patience=0.1)
        with pytest.raises(PacelineError) as found:
            work(server, WorkerOptions(threads=1), _no_data, lambda line: None, WorkerCommand.of([], TOKEN))
        assert str(found.value).isprintable()


def _no_data(config: object) -> None:
    raise UserError("no data is loaded for a lying server")


def reply(
    lr: float = 0.1, steps: int = 0, batch: int = 0, members: bytes = b"", count: int = 32, state: int = 0
) -> bytes:
    head = REPLY_HEAD.pack(0, 0, 0, 0, 0, 0, batch, lr, steps, 1, len(members), count, 0, 0, 0, state)
    body = head + members + bytes(count)
    return frame(FrameKind.REPLY, body + bytes(-(len(members) + count) % 16))


@pytest.mark.parametrize(
    "answer",
    [
        reply(lr=math.nan),
        reply(lr=-math.inf),
        reply(steps=2**32 - 1),
        reply(batch=2**63),
        reply(members=struct.pack("<I2H", 0, 5, 6)),
        reply(count=16),
        reply(state=16),
        frame(FrameKind.REFUSED, "null"),
        frame(FrameKind.PUSH, b""),
    ],
    ids=itertools.count(),
)
def test_a_reply_that_is_none_is_one_line(answer: bytes, tls: Tls | None) -> None:
    def act(connection: socket.socket) -> None:
        connection.sendall(frame(FrameKind.WELCOME, {"worker": 0, "incarnation": 0}))
        read_frame(connection)
        connection.sendall(answer)

    with served_by(act, tls) as address:
        client = TcpClient(address, TOKEN, ours(tls), patience=0.1)
        client.apply({}, beats=False)
        with pytest.raises(ProtocolError, match="broke the protocol: it sent"):
            client.hello(Join(0, 0), WorkerBuffers.private(BufferSizes(8)), {})
        client.close()


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch, tls: Tls | None) -> None:
    """Each byte comes in time for a timeout of the socket; all of them together do not."""
    monkeypatch.setattr(file_client, "HANDSHAKE_SECONDS", 0.3)
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in frame(FrameKind.WELCOME, {"run": "x" * 4000}):
            if stop.wait(0.02):
                return
            connection.sendall(bytes([byte]))

    with served_by(drip, tls) as address:
        with pytest.raises(UserError, match=r"took too long|timed out"):
            FileClient(address, TOKEN, ours(tls))
        stop.set()
    assert handshake.HANDSHAKE_SECONDS > 1.0


def looking(answer: Callable[[dict[str, Any]], bytes]) -> Act:
    """Answer an observer's requests."""

    def act(connection: socket.socket) -> None:
        connection.sendall(frame(FrameKind.WELCOME, {"run": "runs/\x1b[2J"}))
        while asked := read_frame(connection):
            connection.sendall(answer(json.loads(asked)))

    return act


def seen(size: int, data: bytes = b"", **fields: Any) -> bytes:
    return frame(FrameKind.SEEN, {"offset": 0, "size": size, "age": 0.0, **fields}) + frame(FrameKind.BODY, data)


@pytest.mark.parametrize(
    "answer",
    [
        seen(2**70),
        seen(9, b"x" * 9, age=-1.0),
        seen(9, b"x" * 10),
        seen(100, b"x", offset=50),
        seen(9, b"x", offset=[0]),
        frame(FrameKind.SEEN, '{"size": NaN}'),
        frame(FrameKind.BODY, b""),
    ],
    ids=itertools.count(),
)
def test_a_part_of_a_file_that_is_none_ends_the_connection(answer: bytes, tls: Tls | None) -> None:
    served = served_by(looking(lambda look: answer), tls)
    with served as address, contextlib.closing(FileClient(address, TOKEN, ours(tls))) as observer:
        assert observer.run.isprintable()
        with pytest.raises(ConnectionError):
            observer.read("events.jsonl")


def other_file(look: dict[str, Any]) -> bytes:
    """Settings there are, and nothing else."""
    if look["file"] == "config.toml":
        return seen(1, b"#")
    return frame(FrameKind.SEEN, {}) + frame(FrameKind.BODY, b"")


def test_a_server_without_settings_is_one_line(tmp_path: Path) -> None:
    with served_by(looking(lambda look: frame(FrameKind.SEEN, {}) + frame(FrameKind.BODY, b""))) as address:
        mirror = Mirror(lambda: FileClient(address, TOKEN), tmp_path)
        with pytest.raises(RunFailed, match=r"it shows no config.toml"):
            mirror.refresh()


def test_a_file_without_end_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows by as much as was read, so there would always be more."""
    monkeypatch.setattr(mirrors, "MAX_NBYTES", 1000)

    def more(look: dict[str, Any]) -> bytes:
        if look["file"] != "events.jsonl":
            return other_file(look)
        offset = max(0, look["offset"])
        return seen(offset + 200, b"x" * 100, offset=offset)

    with served_by(looking(more)) as address:
        mirror = Mirror(lambda: FileClient(address, TOKEN), tmp_path, growing=("events.jsonl",))
        with contextlib.suppress(RunFailed):
            mirror.refresh()
        assert (tmp_path / "events.jsonl").stat().st_size <= 1000
        mirror.close()


def test_a_file_that_is_said_to_be_huge_is_not_begun(tmp_path: Path) -> None:
    def huge(look: dict[str, Any]) -> bytes:
        if look["file"] == "events.jsonl":
            return seen(1 << 47, b"x" * look["most"])
        return other_file(look)

    with served_by(looking(huge)) as address:
        mirror = Mirror(lambda: FileClient(address, TOKEN), tmp_path, growing=("events.jsonl",))
        with pytest.raises(RunFailed, match=r"it says that events.jsonl has 140,737,488,355,328 bytes"):
            mirror.refresh()
