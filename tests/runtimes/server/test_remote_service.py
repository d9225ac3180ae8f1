"""A server over TCP, and workers that an earlier server of the same run had admitted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.run import sizes_of
from paceline.assembly.task import identity_of
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Join, OwnLoopInput, Push
from paceline.core.worker import LocalWorker
from paceline.errors import PacelineError
from paceline.runtimes.scripts.remote.client import LoopClient
from paceline.runtimes.scripts.remote.worker import require_good_end
from paceline.runtimes.server import remote_service, service
from paceline.runtimes.server.remote_service import ForegroundChannel, RemoteService, SingleServer
from paceline.runtimes.server.runtime import LoopService, TcpPeers
from paceline.system.environment import package_version
from paceline.transports.frames import REQUEST_HEAD, Ending, FrameKind
from paceline.transports.listener import Listener
from paceline.transports.protocol import ScriptPeer
from paceline.transports.tcp_client import TcpClient
from tests.support.recorded_runs import RecordedRun, small_config
from tests.support.served_runs import ServedRun
from tests.support.waiting import until


class Served:
    """A run of two workers, served in a thread."""

    def __init__(self, folder: Path, loops: LoopService | None = None) -> None:
        self.peers = peers = TcpPeers()
        self.run = RecordedRun(small_config(folder, strategy="async", workers=2), runtime=peers)
        self.notes: list[str] = []
        self.listener = Listener("127.0.0.1:0", b"token")
        self.line = ForegroundChannel(lambda row: self.notes.append(str(row.get("text"))))
        gate = SingleServer(self.run.host, sizes_of(self.run.config, self.run.task, self.run.work))
        facts = identity_of(self.run.task)
        self.service = RemoteService(self.run.host, peers, self.line, facts, self.listener, gate, None, loops)
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


class EndingLoops(LoopService):
    """Answers all workers when the second has asked for the final weights."""

    def __init__(self) -> None:
        self.asked: list[ScriptPeer] = []

    def check_push(self, push: Push) -> None:
        return

    def take(self, peer: ScriptPeer, message: OwnLoopInput) -> None:
        self.asked.append(peer)
        if len(self.asked) == 2:
            for one in self.asked:
                one.confirm()

    def forget(self, peer: ScriptPeer) -> None:
        return

    def settle(self) -> None:
        return


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


def test_a_worker_that_waits_for_another_gets_all_of_a_large_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of what a connection does not take at once had been sent only to the worker that asked last."""
    loops = EndingLoops()
    served, reads = Served(tmp_path, loops), threading.Event()
    clients = [LoopClient(served.listener.address, b"token", patience=20) for _ in range(2)]
    sizes = BufferSizes(served.run.server.weights.numel(), served.run.task.state_size)

    def join(client: LoopClient) -> None:
        welcome = client.apply({"version": package_version("paceline")})
        named = Join(welcome["worker"], welcome["incarnation"])
        client.hello(named, WorkerBuffers.private(sizes), identity_of(served.run.task))

    joining = [threading.Thread(target=join, args=(client,)) for client in clients]
    for one in joining:
        one.start()
    for one in joining:
        one.join(20)
    for peer, client in zip(served.peers.by_worker.values(), clients, strict=True):  # as if own loops had joined
        peer._most[FrameKind.REQUEST] = REQUEST_HEAD.size
        peer.slot = client._memory = WorkerBuffers.private(sizes._replace(weights=3_000_000))  # 12 MB
    found: list[bool | None] = []
    monkeypatch.setattr(clients[0], "_await_reply", lambda: reads.wait(20))
    first = threading.Thread(target=lambda: found.append(clients[0].read_weights(final=True)))
    first.start()
    until(lambda: loops.asked, "the first request")
    assert clients[1].read_weights(final=True) is False
    reads.set()
    first.join(4)
    is_answered = found == [False]
    if not is_answered:
        clients[0].abandon()
    for client in clients:
        client.close()
    first.join(20)
    served.close()
    assert is_answered


def stop_at_the_first_step(served: ServedRun) -> None:
    """Let a signal reach the server while its worker computes."""
    make_worker = served.run.make_worker

    def make(join: Join) -> LocalWorker:
        worker = make_worker(join)
        push = worker.push

        def push_late() -> Push | None:
            served.line.stop("terminated")
            until(lambda: served.run.server.finished, "the stop")
            return push()

        worker.push = push_late  # type: ignore[method-assign]
        return worker

    served.run.make_worker = make  # type: ignore[method-assign]


ENDS: dict[Ending, tuple[dict[str, Any], Callable[[ServedRun], None], int]] = {
    Ending.FINISHED: ({}, lambda served: None, 0),
    Ending.DIVERGED: ({"lr": 1e38, "rule": "plain"}, lambda served: None, 3),
    Ending.STOPPED: ({}, stop_at_the_first_step, 130),
}


@pytest.mark.parametrize("ending", ENDS)
def test_a_worker_ends_with_the_exit_code_of_its_run(tmp_path: Path, ending: Ending) -> None:
    settings, prepare, code = ENDS[ending]
    with ServedRun(tmp_path, **settings) as served:
        prepare(served)
        found = served.work_honestly()
    assert found == ending
    try:
        require_good_end(found)
    except PacelineError as error:
        assert error.exit_code == code
    else:
        assert code == 0
