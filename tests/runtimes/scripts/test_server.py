"""How the server of own loops merges the statistics that workers estimate for the final weights."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes
from paceline.core.messages import Join
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server
from paceline.errors import Interrupted
from paceline.interfaces import pack
from paceline.runs.result import trained_tensors
from paceline.runtimes.scripts.serving import server
from paceline.runtimes.scripts.serving.requests import FinalStatistics, LoopRequests
from paceline.runtimes.scripts.serving.server import _gather
from paceline.runtimes.server.runtime import SupervisorChannel
from paceline.tasks.script_model import ScriptModel
from paceline.transports.shared_memory import SharedBuffers, SharedMemoryClient, SharedMemoryPeer, channel

LAYOUT = pack([("weight", (1,), True)])
STATE = pack([("norm.running_mean", (1,), False), ("norm.running_var", (1,), False)])


class Worker:
    """A worker's end of the connection, and what it has estimated."""

    def __init__(self, number: int, mean: float, variance: float) -> None:
        ours, theirs = channel()
        self.peer, self.client, self.connection = SharedMemoryPeer(ours, number, 0), SharedMemoryClient(theirs), theirs
        self.peer.slot = SharedBuffers.create(BufferSizes(LAYOUT.size, STATE.size))
        self.views = STATE.views(self.peer.slot.state)
        self.views["norm.running_mean"].fill_(mean)
        self.views["norm.running_var"].fill_(variance)

    @property
    def statistics(self) -> list[float]:
        return [view.item() for view in self.views.values()]

    @property
    def is_answered(self) -> bool:
        try:
            return bool(self.connection.recv(16, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with ExitStack() as open_ends:
        found = [Worker(0, 0.0, 1.0), Worker(1, 4.0, 3.0), Worker(2, 100.0, 100.0)]
        for worker in found:
            open_ends.callback(worker.peer.close)
            open_ends.callback(worker.client.close)
        yield found


def server_of(model: ScriptModel, averaged: bool) -> Server:
    rule = Averaged(Plain(Sgd())) if averaged else Plain(Sgd())
    server = Server(torch.ones(LAYOUT.size), rule, Async(), Training(Budget(10, 10), Schedule(0.1)), Roster(3))
    for worker in range(3):
        server.handle(Join(worker, 0))
    server.worker_states = {2: torch.full((STATE.size,), 7.0)}  # of the training
    server.evaluated.fill_(5.0)
    return server


@pytest.mark.parametrize("averaged", [True, False])
def test_estimates_are_merged_by_samples_over_those_who_are_there(workers: list[Worker], averaged: bool) -> None:
    model = ScriptModel(LAYOUT.to_rows(), STATE.to_rows())
    trained = server_of(model, averaged)
    statistics = FinalStatistics(trained, model)
    there = [workers[0].peer, workers[1].peer]  # worker 2 has died
    assert not statistics.all_came(there)
    statistics.add(workers[0].peer, samples=300)
    assert not statistics.all_came(there)
    statistics.add(workers[1].peer, samples=100)
    assert statistics.all_came(there)
    statistics.answer(there)
    expected = [1.0, 1.5 + 3.0]  # mean 0 and 4 by 3 to 1; mean variance 1.5, variance of the means 3
    assert workers[0].statistics == workers[1].statistics == expected
    assert workers[0].is_answered and workers[1].is_answered and not workers[2].is_answered
    saved = trained_tensors(trained, model)
    assert [saved[name].item() for name in ("weight", "norm.running_mean", "norm.running_var")] == [5.0, *expected]
    if averaged:
        assert trained_tensors(trained, model, live=True)["norm.running_mean"].item() == 7.0


def test_a_worker_without_an_estimate_gets_that_of_the_others(workers: list[Worker]) -> None:
    model = ScriptModel(LAYOUT.to_rows(), STATE.to_rows())
    statistics = FinalStatistics(server_of(model, False), model)
    statistics.add(workers[1].peer, samples=100)
    statistics.add(workers[2].peer, samples=0)
    statistics.answer([workers[1].peer, workers[2].peer])
    assert workers[2].statistics == workers[1].statistics == [4.0, 3.0]


def test_without_any_estimate_the_statistics_of_the_training_hold(workers: list[Worker]) -> None:
    model = ScriptModel(LAYOUT.to_rows(), STATE.to_rows())
    statistics = FinalStatistics(server_of(model, False), model)
    statistics.add(workers[0].peer, samples=0)
    statistics.answer([workers[0].peer])
    assert workers[0].statistics == [7.0, 7.0] and workers[0].is_answered


def test_an_interrupt_before_the_scripts_have_a_model_trained_nothing() -> None:
    ours, theirs = channel()
    theirs.send(b'{"kind": "stop", "reason": "interrupted"}')
    with pytest.raises(
        Interrupted, match=r"^interrupted, before a script had called session\.prepare\(\.\.\.\): nothing"
    ):
        _gather(SupervisorChannel(ours), RunConfig(workers=2), set())
    ours.close()
    theirs.close()


def test_scripts_that_do_not_come_to_their_training_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ABSENT_SECONDS", 0.0)
    notes: list[str] = []
    ours, theirs = channel()
    control = SupervisorChannel(ours)
    monkeypatch.setattr(control, "note", notes.append)
    for _ in range(2):
        theirs.send(b'{"kind": "expected", "worker": 7}')
    theirs.send(b'{"kind": "stop", "reason": "interrupted"}')
    with pytest.raises(Interrupted):
        _gather(control, RunConfig(workers=3), set())
    ours.close()
    theirs.close()
    assert notes == ["workers 0, 1 and 2 have not called session.prepare(...) after 30 s"]


def test_loops_that_do_not_end_after_an_interrupt_are_named() -> None:
    usual = {0: 0.1, 1: 0.1, 2: 9.0}
    host: Any = SimpleNamespace(
        config=RunConfig(workers=4),
        server=SimpleNamespace(num_workers=4, version=0, finished=True),
        accounting=SimpleNamespace(stall_detector=SimpleNamespace(usual=usual.get)),
    )
    peers: Any = {worker: SimpleNamespace(worker=worker) for worker in range(4)}
    requests = LoopRequests(host, ScriptModel(LAYOUT.to_rows(), []), peers, lambda: False)
    requests._ending[0] = peers[0]  # it waits for the others
    assert not requests.silent(1000.0), "nobody has asked"
    requests.interrupt(1000.0)
    requests.interrupt(1005.0)
    assert not requests.silent(1009.0)
    assert [worker for worker, _ in requests.silent(1010.0)] == [1, 3]
    (_, why), *others = requests.silent(1027.0)
    assert why == "worker 1 has not ended its loop after 27 s: it is killed, and what there is is saved"
    assert [worker for worker, _ in others] == [2, 3]
