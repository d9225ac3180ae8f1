"""A server over TCP, and workers that an earlier server of the same run had admitted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.assembly.run import sizes_of
from paceline.assembly.task import identity_of
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join
from paceline.runtimes.server import remote_service, service
from paceline.runtimes.server.remote_service import ForegroundChannel, RemoteService, SingleServer
from paceline.runtimes.server.runtime import TcpPeers
from paceline.system.environment import package_version
from paceline.transports.listener import Listener
from paceline.transports.tcp_client import TcpClient
from tests.support.recorded_runs import RecordedRun, small_config
from tests.support.waiting import until


class Served:
    """A run of two workers, served in a thread."""

    def __init__(self, folder: Path) -> None:
        peers = TcpPeers()
        self.run = RecordedRun(small_config(folder, strategy="async", workers=2), runtime=peers)
        self.notes: list[str] = []
        self.listener = Listener("127.0.0.1:0", b"token")
        self.line = ForegroundChannel(lambda row: self.notes.append(str(row.get("text"))))
        gate = SingleServer(self.run.host, sizes_of(self.run.config, self.run.task, self.run.work))
        facts = identity_of(self.run.task)
        self.service = RemoteService(self.run.host, peers, self.line, facts, self.listener, gate)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with torch.inference_mode():
            self.service.run()

    def close(self) -> None:
        self.line.stop("interrupted")
        self.thread.join(20)
        for one in (self.listener, self.run, self.line.connection, self.line._other):
            one.close()
        assert not self.thread.is_alive()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for module in (remote_service, service):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    made = Served(tmp_path)
    yield made
    made.close()


def test_a_worker_of_an_earlier_server_does_not_take_the_place_of_another_with_its_number(served: Served) -> None:
    """Two servers that were killed before a join was logged give out the same number and incarnation twice."""
    here = TcpClient(served.listener.address, b"token", patience=20)
    welcome = here.apply({"version": package_version("paceline")})
    place = {name: welcome[name] for name in ("worker", "incarnation")}
    joined = threading.Thread(
        target=here.hello,
        args=(
            Join(**place),
            WorkerBuffers.private(BufferSizes(served.run.server.weights.numel(), served.run.task.state_size)),
            identity_of(served.run.task),
        ),
    )
    joined.start()
    until(lambda: served.run.server.members, "the join")
    for times in (1, 2):  # it keeps its secret
        served.service._peers.by_worker[0].connection.shut_down()
        until(lambda: sum("is back" in note for note in served.notes) == times, f"reconnect {times}")  # noqa: B023
    served.notes.clear()
    stranger = TcpClient(served.listener.address, b"token", patience=20)
    fields = {"version": package_version("paceline"), "again": True, **place, "secret": "of the earlier server"}
    welcome = stranger.apply(fields)
    assert (welcome["again"], welcome["worker"]) == (False, 1)
    assert not any("is back after its connection broke" in note for note in served.notes)
    for client in (here, stranger):
        client.abandon()
        client.close()
    joined.join(20)
