"""Thousands of hostile frames against `paceline server`: nothing of them counts, and honest workers notice nothing."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.transports.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, PROOF_NBYTES, ClientHandshake
from paceline.transports.connection import parse_address
from paceline.transports.frames import MAX_APPLY, FrameKind, fields_frame, header
from tests.support.cluster_commands import address_of, serve, workers
from tests.support.commands import result_of, run, wait_for_records

pytestmark = pytest.mark.real

TOKEN = b"correct horse battery staple"
RUN = ("--dataset", "fashion-mnist-sample", "--threads", "1", "--seed", "3", "--score", "none")
SETTINGS = ("--strategy", "sync", "--workers", "2", "--steps", "200")
FRAMES, IDLE, DRIPPING = 1500, 100, 20
"""Twice: while workers are awaited, and while they train."""
MOST_GROWTH_MIB = 16.0


def memory_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


class Attacker:
    """One connection a frame, from a seed; some are kept open, and say nothing or a byte now and then."""

    def __init__(self, address: str, seed: int) -> None:
        self.place, self.order = parse_address(address), random.Random(seed)
        self.sent = 0
        self.kinds: tuple[Callable[[socket.socket], None], ...] = (
            self.noise, self.huge, self.fuzzed, self.cut_off,
            self.replayed, self.no_token, self.wrong_token, self.insider,
        )  # fmt: skip
        with self.connect() as connection:
            self.recorded = self.prove(connection, TOKEN)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, 10)

    def prove(self, connection: socket.socket, token: bytes) -> bytes:
        """What somebody who knows this token says; and the frame with which an observer goes on."""
        challenge = connection.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL)
        said = ClientHandshake(token).answer(challenge)
        connection.sendall(said)
        connection.recv(PROOF_NBYTES, socket.MSG_WAITALL)
        return said + fields_frame(FrameKind.APPLY, {"observer": True}, MAX_APPLY)

    def noise(self, connection: socket.socket) -> None:
        connection.sendall(self.order.randbytes(self.order.randrange(1, 300)))

    def huge(self, connection: socket.socket) -> None:
        connection.sendall(header(FrameKind.APPLY, 2 ** self.order.randrange(17, 64) - 1) + bytes(ANSWER_NBYTES))

    def fuzzed(self, connection: socket.socket) -> None:
        frame = bytearray(header(self.order.choice(list(FrameKind)), self.order.randrange(1 << 16)) + bytes(100))
        frame[self.order.randrange(len(frame))] ^= 1 << self.order.randrange(8)
        connection.sendall(frame)

    def cut_off(self, connection: socket.socket) -> None:
        connection.sendall(self.recorded[: self.order.randrange(ANSWER_NBYTES)])

    def replayed(self, connection: socket.socket) -> None:
        connection.sendall(self.recorded)

    def no_token(self, connection: socket.socket) -> None:
        self.prove(connection, b"")

    def wrong_token(self, connection: socket.socket) -> None:
        self.prove(connection, self.order.randbytes(8))

    def insider(self, connection: socket.socket) -> None:
        """The right token, and then no application."""
        self.prove(connection, TOKEN)
        nbytes = self.order.randrange(1 << 20)
        connection.sendall(header(self.order.choice(list(FrameKind)), nbytes) + self.order.randbytes(min(nbytes, 200)))

    def attack(self, frames: int, going_on: Callable[[], bool] = lambda: True) -> None:
        """Send so many, as long as there is somebody to send to."""
        with ExitStack() as stack:
            kept = [stack.enter_context(self.connect()) for _ in range(IDLE + DRIPPING)]
            for number in range(frames):
                if not going_on():
                    return
                with contextlib.suppress(OSError), self.connect() as connection:  # it may be hung up on at any moment
                    self.kinds[number % len(self.kinds)](connection)
                    self.sent += 1
                with contextlib.suppress(OSError):
                    kept[number % DRIPPING].send(b"P")


def test_hostile_frames_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)
    folder = tmp_path / "runs/it"
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, *SETTINGS, "--name", "it", "--token-file", "token")
        attacker = Attacker(address_of(folder), seed=1)
        pid = json.loads((folder / "server.json").read_text())["pid"]
        memory = [memory_mib(pid)]
        (there,) = workers(stack, tmp_path, 1, "--token-file", "token", "--overlap", "1")
        attacker.attack(FRAMES)
        memory.append(memory_mib(pid))
        wait_for_records(folder, 20)

        def trains() -> bool:
            with contextlib.suppress(OSError):  # it may end at any moment
                memory.append(memory_mib(pid))
            return not (folder / "result.json").exists()

        attacker.attack(FRAMES, trains)
        assert server.finish() == 0, server.err
        assert there.finish() == 0, there.err
    assert attacker.sent > FRAMES and max(memory) < memory[0] + MOST_GROWTH_MIB
    assert "Traceback" not in server.err and "turned away" in server.err
    alone = run("train", *RUN, *SETTINGS, "--name", "alone", cwd=tmp_path)
    assert alone.process.returncode == 0, alone.err
    attacked, usual = result_of(folder), result_of(tmp_path / "runs/alone")
    for name in ("weights_sha256", "updates", "samples", "lost_workers"):
        assert attacked[name] == usual[name], name
