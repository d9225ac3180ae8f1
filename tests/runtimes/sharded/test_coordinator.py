"""The first of several servers, with another that the test plays: parts that never come, servers that fall silent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.run import sizes_of
from paceline.assembly.task import identity_of
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join
from paceline.errors import PacelineError, ServerLost, UnknownWorker, UserError
from paceline.runs.folder import NOT_COME
from paceline.runtimes.server import admission
from paceline.runtimes.server.remote_service import ForegroundChannel, RemoteService, SingleServer
from paceline.runtimes.sharded import coordinator
from paceline.runtimes.sharded import peers as shards
from paceline.runtimes.sharded.channel import ShardChannel
from paceline.runtimes.sharded.coordinator import Coordinator, ShardedPeers
from paceline.runtimes.sharded.peers import ShardPeers
from paceline.system.environment import package_version
from paceline.transports.listener import JoinRequest, Listener
from paceline.transports.tcp_client import TcpClient
from tests.support.connections import connected
from tests.support.recorded_runs import RecordedRun, small_config
from tests.support.waiting import until

pytestmark = pytest.mark.long  # left to `make test`


class First:
    """A run of two servers: the first is real and in a thread, the second is the test, and beats if it is told to."""

    def __init__(self, folder: Path, wait_seconds: float | None) -> None:
        runtime = ShardedPeers()
        self.run = RecordedRun(small_config(folder, strategy="async", workers=1), runtime=runtime)
        self.notes: list[str] = []
        self.error: PacelineError | None = None
        self.listener = Listener("127.0.0.1:0", b"token")
        ours, theirs = connected()
        ours.peer = "127.0.0.1:2"
        self.second, self.sending = ShardChannel(theirs), threading.Lock()
        host, largest = self.run.host, sizes_of(self.run.config, self.run.task, self.run.work)
        self.line = ForegroundChannel(lambda row: self.notes.append(str(row.get("text"))))
        self.shards = ShardPeers(host, [JoinRequest(ours, {"address": "127.0.0.1:1"})])
        gate = Coordinator(host.server, runtime, self.shards, largest)
        expected = identity_of(self.run.task)
        self.service = RemoteService(host, runtime, self.line, expected, self.listener, gate, wait_seconds)
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                self.service.run()
        except PacelineError as error:
            self.error = error

    def start(self, beats: bool) -> None:
        self.thread.start()
        self.beating = threading.Thread(target=self._beat if beats else lambda: None)
        self.beating.start()

    def _beat(self) -> None:
        pause = threading.Event()
        while self.thread.is_alive():
            with contextlib.suppress(ConnectionError):
                self.send({"beat": True})
            pause.wait(0.02)

    def send(self, message: dict[str, Any]) -> None:
        """Send as the second server, from whichever thread."""
        with self.sending:
            self.second.send(message)

    def close(self) -> None:
        if self.thread.is_alive():
            self.line.stop("interrupted")
        self.thread.join(20)
        self.beating.join(20)
        for one in (self.listener, self.second, self.shards, self.run, self.line.connection, self.line._other):
            one.close()
        assert not self.thread.is_alive()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., First]]:
    made: list[First] = []

    def make(beats: bool, wait_seconds: float | None = None, **seconds: float) -> First:
        for name, value in seconds.items():
            module = next(one for one in (shards, admission, coordinator) if hasattr(one, name))
            monkeypatch.setattr(module, name, value)
        made.append(First(tmp_path, wait_seconds))
        made[0].start(beats)
        return made[0]

    yield make
    made[0].close()


def facts_of(first: First) -> dict[str, Any]:
    return {**identity_of(first.run.task)}


def test_a_worker_that_brings_the_others_nothing_is_sent_away_and_may_come_again(make: Callable[..., First]) -> None:
    first = make(beats=True, VOTE_SECONDS=0.2)
    door = TcpClient(first.listener.address, b"token", patience=20)
    welcome = door.apply({"version": package_version("paceline")})
    assert [row["span"] for row in welcome["shards"]] == [[0, 64], [64, 128]]
    sizes = BufferSizes(64, first.run.task.state_size)
    with pytest.raises(UnknownWorker) as forgotten:
        door.hello(Join(0, 0), WorkerBuffers.private(sizes), facts_of(first))
    assert forgotten.value.welcome["worker"] == 0
    assert "worker 0 did not send every server its part within 0.2 s: it is disconnected" in first.notes
    assert not first.run.server.members
    door.close()


def test_a_server_that_falls_silent_ends_the_run_in_one_line(make: Callable[..., First]) -> None:
    first = make(beats=False, SILENT_SECONDS=0.3)
    first.thread.join(20)
    assert isinstance(first.error, ServerLost)
    assert "server 1 of floats 64 to 128 at 127.0.0.1:1 has said nothing for 0.3 s at update 0" in str(first.error)
    assert f"'paceline server --resume {first.run.folder.path}' continues from there" in str(first.error)


def test_beats_are_signs_of_life(make: Callable[..., First]) -> None:
    first = make(beats=True)
    link = first.shards.all[0].link
    before = link.last_heard
    until(lambda: link.last_heard != before, "a heartbeat")
    assert first.error is None


@pytest.mark.long
def test_nobody_comes_and_the_user_is_told_how_to_start_workers_or_that_it_is_over(make: Callable[..., First]) -> None:
    first = make(beats=True, wait_seconds=1.0, REMIND_SECONDS=0.1)
    said = "0 of 1 workers are here after 0 s: start the others with 'paceline worker --connect"
    until(
        lambda: any(note.startswith(said) and first.listener.address in note for note in first.notes),
        lambda: f"the reminder, only {first.notes}",
    )
    first.thread.join(20)
    assert (first.run.host.stop_reason, first.error) == (NOT_COME, None)
    assert first.run.folder.resume_hint(first.run.config).startswith("'paceline resume")
    first.run.folder.server_file.write_text('{"by_hand": true}')
    assert first.run.folder.resume_hint(first.run.config).startswith("'paceline server --resume")


def test_a_worker_on_a_gpu_needs_a_server_that_never_computes_again(make: Callable[..., First]) -> None:
    first = make(beats=True)
    door = TcpClient(first.listener.address, b"token", patience=20)
    with pytest.raises(UserError, match=r"it computes on cuda, .* start the server with --recovery checkpoint"):
        door.apply({"version": package_version("paceline"), "device": "cuda"})


def test_further_servers_are_not_taken_for_workers(make: Callable[..., First]) -> None:
    first = make(beats=True)
    words = {"version": package_version("paceline"), "shard": True}
    with pytest.raises(UserError, match="all 2 servers of this run are here"):
        TcpClient(first.listener.address, b"token").apply(words, beats=False)
    assert "one server holds all weights of this run" in SingleServer.full


@pytest.mark.parametrize("vote", [{"part": [[0], 0, 0]}, {"part": 7}, {"part": [0, 0, 0], "finite": "yes"}])
def test_a_vote_that_is_none_loses_its_server_in_one_line(make: Callable[..., First], vote: dict[str, Any]) -> None:
    first = make(beats=False)
    first.send(vote)
    first.thread.join(20)
    assert isinstance(first.error, ServerLost) and "server 1 of floats 64 to 128 at 127.0.0.1:1 is gone" in str(
        first.error
    )


@pytest.mark.parametrize(
    "wrong", [{"pid": "x"}, {"pid": -1}, {"address": "nowhere"}, {"address": None}, {"address": 7}]
)
def test_a_server_that_does_not_say_where_it_is_is_refused_and_another_is_awaited(wrong: dict[str, Any]) -> None:
    right = {"shard": True, "version": package_version("paceline"), "pid": 7, "address": "127.0.0.1:7"}
    with contextlib.closing(Listener("127.0.0.1:0", b"token")) as listener, ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(shards.wait_for_shards, listener, 1, [], 20.0)
        with pytest.raises(UserError, match=r"pid|address|HOST:PORT"):
            TcpClient(listener.address, b"token").apply({**right, **wrong}, beats=False)
        client = TcpClient(listener.address, b"token")
        client.apply(right, beats=False)
        ((found,), others) = awaited.result(20)
        assert found.fields["address"] == "127.0.0.1:7" and not others
        found.connection.close()
        client.close()


def test_a_worker_whose_memory_does_not_fit_its_part_is_expelled(make: Callable[..., First]) -> None:
    first = make(beats=True)
    door = TcpClient(first.listener.address, b"token", patience=20)
    door.apply({"version": package_version("paceline")}, beats=False)
    small = WorkerBuffers.private(BufferSizes(32, first.run.task.state_size))
    with pytest.raises(UserError, match="worker 0 sent buffers that do not fit its part of the weights"):
        door.hello(Join(0, 0), small, facts_of(first))
    door.close()
    assert not first.run.server.members and first.error is None


def test_a_worker_that_another_server_blames_is_expelled(make: Callable[..., First]) -> None:
    first = make(beats=True)
    door = TcpClient(first.listener.address, b"token", patience=20)
    door.apply({"version": package_version("paceline")}, beats=False)
    first.send({"part": [0, 0, -1], "wrong": "worker 0 sent \x1b[2J"})
    memory = WorkerBuffers.private(BufferSizes(64, first.run.task.state_size))
    with pytest.raises((UserError, UnknownWorker)):
        door.hello(Join(0, 0), memory, facts_of(first))
    door.close()
    until(lambda: any("worker 0 sent" in note for note in first.notes), "the line")
    assert all(note.isprintable() for note in first.notes) and first.error is None
