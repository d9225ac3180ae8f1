"""Local steps in an own loop: the script's optimizer steps in the worker, and its drift is pushed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import paceline
from paceline.config import RunConfig
from tests.support.own_loops import OneServer

MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), lr=0.05),
    "LBFGS": lambda model: LBFGS(model.parameters(), lr=0.5, max_iter=3),
}


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(model: nn.Module, optimizer: Optimizer, batches: range) -> None:
    for number in batches:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 4, generator=generator)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def exchange_drift(model: nn.Module, start: list[Tensor]) -> None:
    """What an exchange leaves of the weights: their drift, rounded, taken from those it began with."""
    with torch.no_grad():
        for parameter, began in zip(model.parameters(), start, strict=True):
            parameter.copy_(began - (began - parameter))


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def alone(strategy: str) -> RunConfig:
    return RunConfig(strategy=strategy, workers=1)


@pytest.mark.parametrize("name", MAKERS)
def test_one_worker_is_plain_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, if plain torch also takes the weights through a difference and back after every third step."""
    model, plain = new_model(), new_model()
    optimizer, plain_optimizer = MAKERS[name](model), MAKERS[name](plain)
    session = paceline.join(alone("local:3"))
    session.prepare(model, optimizer)
    train(model, optimizer, range(10))
    assert session.iteration == 10 and not session.finished
    session.finish()
    for first in range(0, 10, 3):
        start = [parameter.detach().clone() for parameter in plain.parameters()]
        train(plain, plain_optimizer, range(first, min(first + 3, 10)))
        exchange_drift(plain, start)
    assert torch.equal(weights_of(model), weights_of(plain))
    assert session.iteration == 10, "the last exchange has one step"
    assert not capsys.readouterr().err, "its steps before an exchange are no earlier worker's"


def test_steps_count_local_steps_and_the_last_exchange_is_shorter() -> None:
    model = new_model()
    optimizer = MAKERS["Adam"](model)
    session = paceline.join(alone("local:4"))
    session.prepare(model, optimizer, steps=10)
    for number in range(100):
        if session.finished:
            break
        train(model, optimizer, range(number, number + 1))
    assert session.iteration == number == 10


def test_an_evaluation_leaves_the_steps_since_the_last_exchange() -> None:
    model = new_model()
    optimizer = MAKERS["Adam"](model)
    session = paceline.join(alone("local:4"))
    session.prepare(model, optimizer)
    first = weights_of(model)
    train(model, optimizer, range(3))
    moved = weights_of(model)
    with session.eval_weights():
        assert torch.equal(weights_of(model), first), "the server has no steps yet"
    assert torch.equal(weights_of(model), moved) and not torch.equal(moved, first)


def test_the_optimizer_keeps_its_state_and_weights_may_be_changed_by_hand() -> None:
    model = new_model()
    optimizer = MAKERS["Adam"](model)
    session = paceline.join(alone("local:2"))
    session.prepare(model, optimizer)
    for number in range(6):
        train(model, optimizer, range(number, number + 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)  # after the exchange: it is a part of the next drift
    assert optimizer.state_dict()["state"][0]["step"] == 6
    train(model, optimizer, range(6, 7))
    session.finish()
    assert weights_of(model).abs().max() <= 0.1 + 0.05 * 1.1, "one step of Adam after the last clamp"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_type_keeps_it_and_its_drift_is_that_of_its_own_values(dtype: torch.dtype) -> None:
    model, plain = new_model().to(dtype), new_model().to(dtype)
    session = paceline.join(alone("local:2"))
    optimizers = SGD(model.parameters(), lr=0.25), SGD(plain.parameters(), lr=0.25)
    session.prepare(model, optimizers[0])
    for _ in range(4):
        for one, optimizer in ((model, optimizers[0]), (plain, optimizers[1])):
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=2e-2, atol=2e-2)


def test_without_an_optimizer_it_is_refused_in_one_line() -> None:
    session = paceline.join(alone("local:2"))
    with pytest.raises(paceline.UserError, match=r"local:2 makes local steps with your optimizer: give it to session"):
        session.prepare(new_model())


def test_each_worker_has_its_own_optimizer_and_both_end_with_the_same_weights(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async-local:3", workers=2, local_steps="even")
    models = [new_model() for _ in range(2)]
    optimizers = [MAKERS["Adam"](model) for model in models]
    sessions: list[Any] = [one.session(worker) for worker in range(2)]
    for session, model, optimizer in zip(sessions, models, optimizers, strict=True):
        session.prepare(model, optimizer)
    for number in range(12):
        for worker in range(2):
            train(models[worker], optimizers[worker], range(100 * worker + number, 100 * worker + number + 1))
    assert one.server is not None and one.server.version == 8 and one.server.samples == 24
    assert [session.iteration for session in sessions] == [12, 12]
    for session in sessions:
        session.finish()
    assert torch.equal(weights_of(models[0]), weights_of(models[1]))
