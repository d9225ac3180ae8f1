"""A loop with two optimizers, as of a GAN: each steps its own weights, as in plain torch, on a server of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import paceline
from paceline.config import RunConfig
from paceline.core.messages import Push
from paceline.core.server import OptimizersServer
from paceline.runs import checkpoint
from paceline.runs.result import summarise
from paceline.runtimes.scripts.session import Session
from tests.support.own_loops import OneServer

ALONE = RunConfig(strategy="classic")


class Pair:
    """A generator, and a critic that steps twice as often; their gradients meet in both."""

    def __init__(self, shift: float = 0.0) -> None:
        torch.manual_seed(1)
        self.maker, self.critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.first = torch.optim.Adam(self.maker.parameters(), lr=0.02)
        self.second = torch.optim.RMSprop(self.critic.parameters(), lr=0.01, momentum=0.5)
        self.schedulers = ExponentialLR(self.first, 0.9), ExponentialLR(self.second, 0.8)
        self.shift = shift

    @property
    def things(self) -> tuple[Any, ...]:
        return self.maker, self.critic, self.first, self.second, *self.schedulers

    def noise(self, number: int) -> Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(number)) + self.shift

    def step(self, number: int) -> None:
        for part in range(2):
            self.second.zero_grad()
            made = self.maker(self.noise(2 * number + part)).detach()
            (self.critic(made).square().mean() - self.critic(made + 1.0).mean()).backward()
            self.second.step()
        self.first.zero_grad()
        (-self.critic(self.maker(self.noise(number + 1000))).mean()).backward()
        self.first.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for model in (self.maker, self.critic) for parameter in model.parameters()]


def prepared(session: Session, **length: Any) -> Pair:
    pair = Pair()
    session.prepare(*pair.things, **length)
    return pair


def test_two_optimizers_step_as_in_plain_torch() -> None:
    session, plain = paceline.join(ALONE), Pair()
    ours = prepared(session)
    for number in range(8):
        ours.step(number)
        plain.step(number)
    for one, other in zip(ours.weights(), plain.weights(), strict=True):
        assert torch.equal(one, other)
    for mine, theirs in ((ours.first, plain.first), (ours.second, plain.second)):
        found, expected = mine.state_dict(), theirs.state_dict()
        assert found["param_groups"] == expected["param_groups"] and found["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert all(torch.equal(found["state"][number][name], value) for name, value in state.items())
    assert session.iteration == 8, "the first optimizer's steps count"
    session.finish()


def test_steps_are_those_of_the_first_optimizer() -> None:
    session = paceline.join(ALONE)
    pair = prepared(session, steps=3)
    for number in range(3):
        assert not session.finished
        pair.step(number)
    assert session.finished and session.iteration == 3


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_of_one_that_is_skipped_leaves_the_other_alone(scaled: bool) -> None:
    pairs = prepared(paceline.join(ALONE)), Pair()
    for pair in pairs:
        pair.step(0)
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]  # type: ignore[attr-defined]
        pair.first.zero_grad()
        pair.second.zero_grad()
        loss = pair.critic(pair.maker(pair.noise(5))).mean()
        scalers[0].scale(loss * float("inf")).backward()
        if scaled:
            scalers[0].step(pair.first)
        pair.second.zero_grad()
        scalers[1].scale(pair.critic(pair.noise(6) @ torch.ones(3, 4)).mean()).backward()
        scalers[1].step(pair.second)
        for scaler in scalers[1 - scaled :]:
            scaler.update()
        assert scalers[0].get_scale() == (32.0 if scaled else 64.0)
        pair.step(1)
    for one, other in zip(pairs[0].weights(), pairs[1].weights(), strict=True):
        assert torch.equal(one, other)


def test_workers_push_for_one_optimizer_at_a_time_and_a_checkpoint_keeps_all(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "async", "workers": 2, "rule": "plain", "average": "none"}
    one = OneServer(tmp_path / "one", **settings)
    pairs = [prepared(one.session(worker)) for worker in range(2)]
    pairs[1].shift = 0.5
    for worker, number in ((0, 0), (1, 1), (1, 2)):
        pairs[worker].step(number)
    server = one.server
    assert isinstance(server, OptimizersServer)
    assert [part.version for part in server.by_optimizer] == [3, 6]
    kept = checkpoint.take_checkpoint(server, one.memories, 0, 0.0)
    checkpoint.write_checkpoint(tmp_path / "kept", kept)
    again = OneServer(tmp_path / "two", **settings)
    prepared(again.session(0))
    assert again.server is not None
    restored = again.server
    found, _ = checkpoint.newest_checkpoint(tmp_path / "kept")
    assert found is not None
    checkpoint.restore(restored, found)
    assert torch.equal(restored.weights, server.weights)
    for mine, theirs in zip(restored.by_optimizer, server.by_optimizer, strict=True):
        assert mine.version == theirs.version and mine.rule_state.keys() == theirs.rule_state.keys()
        assert all(torch.equal(mine.rule_state[name], tensor) for name, tensor in theirs.rule_state.items())
        assert json.dumps(mine.own_loops.newest[1].tolist()) == json.dumps(theirs.own_loops.newest[1].tolist())


@pytest.mark.parametrize("strategy", ["sync", "bounded:1"])
def test_workers_that_wait_for_each_other_at_two_optimizers_go_on(tmp_path: Path, strategy: str) -> None:
    """Worker 0 steps both, worker 1 the first alone; so may be the workers after one of them was lost and came back."""
    workers = 2
    one = OneServer(tmp_path, strategy=strategy, workers=workers, rule="plain", average="none")
    for worker in range(workers):
        prepared(one.session(worker))
    server = one.server
    assert isinstance(server, OptimizersServer)
    serials, due = {(w, k): 0 for w in range(workers) for k in range(2)}, dict.fromkeys(range(workers), 0)

    def push(worker: int, optimizer: int) -> None:
        memory, serial = one.memories[worker], serials[worker, optimizer]
        size = server.by_optimizer[optimizer].own_loops.layout.size
        said = torch.full((size,), 0.5, dtype=memory.loop.dtype)
        named = (worker, 0, serial, serial, 4, 1.0, memory.update, memory.state, None, said, optimizer)
        for reply in server.handle(Push(*named)).replies:
            serials[reply.worker, reply.optimizer] = reply.serial
            due[reply.worker] = 1 - reply.optimizer if not reply.worker else 0

    for _ in range(40):
        ready = [w for w in range(workers) if not any(part.members[w].waiting for part in server.by_optimizer)]
        assert ready, "all workers wait"
        push(ready[0], due[ready[0]])
    versions = [part.version for part in server.by_optimizer]
    assert versions[0] >= 8 and versions[1] >= 8
    assert server.by_optimizer[1].dropped == 0
    push(1, 1)
    expected = 1 if strategy == "sync" else 0
    assert server.by_optimizer[1].dropped == expected, "its gradient is of an earlier round"
    assert summarise(one.config, server, 1.0, {})["dropped_pushes"] == expected


def test_a_worker_that_was_killed_goes_on_with_both(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "async", "workers": 1, "rule": "plain", "average": "none"}
    whole, broken = (OneServer(tmp_path / name, **settings) for name in ("whole", "broken"))
    undisturbed, first = prepared(whole.session(0)), prepared(broken.session(0))
    for number in range(3):
        undisturbed.step(number)
        first.step(number)
    broken.lose(0)
    session = broken.session(0, incarnation=1)
    second = prepared(session)
    assert session.iteration == 3
    for number in range(3, 6):
        undisturbed.step(number)
        second.step(number)
    for one, other in zip(second.weights(), undisturbed.weights(), strict=True):
        assert torch.equal(one, other)
    assert [s.get_last_lr() for s in second.schedulers] == [s.get_last_lr() for s in undisturbed.schedulers]
