"""A small run served over TCP by a thread of the test: honest workers, and peers that send what they like."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.run import make_join, sizes_of
from paceline.assembly.task import identity_of
from paceline.core.buffers import BufferSizes
from paceline.runs.events import read_events
from paceline.runtimes.server.remote_service import ForegroundChannel, RemoteService, SingleServer
from paceline.runtimes.server.runtime import TcpPeers
from paceline.runtimes.worker_loop import WorkerLoop
from paceline.system.environment import package_version
from paceline.transports.auth import CHALLENGE_NBYTES, PROOF_NBYTES, ClientHandshake
from paceline.transports.connection import connected, read, send
from paceline.transports.frames import HEADER_NBYTES, PUSH_HEAD, FrameKind, header, padding, read_bytes
from paceline.transports.listener import Listener
from paceline.transports.protocol import BY_SAMPLES
from paceline.transports.tcp_client import TcpClient
from paceline.transports.tls import Tls, make_certificate, server_tls, worker_tls
from tests.support.recorded_runs import RecordedRun, small_config

TOKEN = b"of this served run"


@pytest.fixture(scope="module", params=["plain", pytest.param("TLS", marks=pytest.mark.long)])
def tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tls | None:
    """The server's side of TLS, and None for a plain connection: each test runs with both."""
    if request.param == "plain":
        return None
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not here")
    return server_tls(*make_certificate(tmp_path_factory.mktemp("tls")))


class ServedRun:
    """A run of one worker: served until it is over, then scored and saved as `paceline server` does."""

    def __init__(self, folder: Path, tls: Tls | None = None, **settings: Any) -> None:
        peers = TcpPeers()
        self.run = RecordedRun(small_config(folder, strategy="async", workers=1, **settings), runtime=peers)
        self.host, self.tls = self.run.host, tls
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self.listener = Listener("127.0.0.1:0", TOKEN, tls)
        self.line = ForegroundChannel(lambda row: self.notes.append(str(row.get("text"))))
        self.facts = identity_of(self.run.task)
        self.sizes: BufferSizes = sizes_of(self.run.config, self.run.task, self.run.work)
        gate = SingleServer(self.host, self.sizes)
        self.service = RemoteService(self.host, peers, self.line, self.facts, self.listener, gate)
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                self.service.run()
            self.host.finish()
        except BaseException as error:
            self.error = error
        finally:
            self.run.close()
            self.listener.close()  # so that peers notice the end at once
            for peer in self.service._peers.by_worker.values():
                peer.close()

    def __enter__(self) -> ServedRun:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self.line.stop("interrupted")
        self._thread.join(60)
        for one in (self.line.connection, self.line._other):
            one.close()
        assert not self._thread.is_alive()

    def work_honestly(self, worker: int = 0) -> int:
        """Work as the worker of this number until the run is over. If the server has failed, raise why.

        Return what the last reply said of the end.
        """
        if self.error is not None:
            raise self.error
        client = TcpClient(self.listener.address, TOKEN, worker_tls() if self.tls else None, patience=20)
        welcome = client.apply({"version": package_version("paceline"), "worker": worker})
        join = make_join(self.run.config, self.run.work, worker, welcome["incarnation"])
        with contextlib.closing(client):
            WorkerLoop(self.run.make_worker(join), self.run.config).run(client, self.facts)
        self._thread.join(60)
        return client.ending

    def result(self) -> dict[str, Any] | None:
        """The run's result, after its end; what ended it instead is raised."""
        if self.error is not None:
            raise self.error
        return self.run.folder.result()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_events(self.run.folder.events_file) if row["kind"] == kind]


class Liar:
    """Somebody who holds the token and sends whatever bytes the test gives it."""

    def __init__(self, served: ServedRun) -> None:
        self._served = served
        tls = worker_tls() if served.tls else None
        self.connection, binding = connected(served.listener.address, tls, 20.0)
        self.connection.sock.settimeout(20.0)
        proof = ClientHandshake(TOKEN, binding)
        send(self.connection, proof.answer(read(self.connection, read_bytes(CHALLENGE_NBYTES))))
        proof.check(read(self.connection, read_bytes(PROOF_NBYTES)))

    def send_fields(self, kind: FrameKind, fields: dict[str, Any] | str) -> None:
        """Send a frame of JSON, or of a text that only looks like JSON."""
        text = (fields if isinstance(fields, str) else json.dumps(fields)).encode()
        send(self.connection, header(kind, len(text)) + text)

    def apply(self, **fields: Any) -> dict[str, Any]:
        """Ask to join, and return the welcome."""
        self.send_fields(FrameKind.APPLY, {"version": package_version("paceline"), **fields})
        return self.read_frame()[1]

    def hello(self, **fields: Any) -> None:
        """Say a hello that is true except for these fields."""
        true = {"quota": self._served.run.work.quotas[0], "threads": 1, "sizes": self._served.sizes}
        self.send_fields(FrameKind.HELLO, {**true, **self._served.facts, **fields})

    def push(self, samples: int, seq: int = 0, reply: int = 0, seconds: float = 0.1, **numbers: float) -> None:
        """Push zeros, with these numbers beside them."""
        sizes = self._served.sizes
        body = bytes(4 * sizes.weights + 4 * sizes.state)
        nbytes = 0, 4 * sizes.weights, 4 * sizes.state, 0, 0
        timing = seconds, numbers.get("wall", 0.1), numbers.get("waited", 0.0)
        head = PUSH_HEAD.pack(
            seq, reply, samples, *nbytes, numbers.get("loss", 0.5), *timing, numbers.get("weight", BY_SAMPLES)
        )
        pad = padding(len(body))
        send(self.connection, header(FrameKind.PUSH, len(head) + len(body) + len(pad)) + head + body + pad)

    def read_frame(self) -> tuple[FrameKind, Any]:
        """Read the next frame of the server; JSON is parsed, other bodies are bytes."""
        packed = read(self.connection, read_bytes(HEADER_NBYTES))
        kind, nbytes = FrameKind(packed[5]), int.from_bytes(packed[8:16], "little")
        body = bytes(read(self.connection, read_bytes(nbytes)))
        return kind, json.loads(body) if kind in (FrameKind.WELCOME, FrameKind.REFUSED) else body

    def leave(self) -> None:
        """Leave the run for good."""
        send(self.connection, header(FrameKind.BYE, 0))
        self.wait_for_the_end()

    def wait_for_the_end(self) -> None:
        """Read until the server has hung up."""
        with contextlib.suppress(ConnectionError):
            while True:
                self.connection.receive_into(memoryview(bytearray(4096)))
        self.connection.close()


@contextlib.contextmanager
def lying(served: ServedRun) -> Iterator[Liar]:
    """A liar, until the server has hung up on it."""
    liar = Liar(served)
    try:
        yield liar
    finally:
        liar.wait_for_the_end()
