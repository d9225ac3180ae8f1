"""Weights that a script changes itself are noticed at the next step, also those changed past torch's counters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.config import RunConfig
from paceline.errors import UserError

STEPS = [0, 1, 2, 3, 5, 8, 11, 70]
CHANGED = "was changed or moved between two steps"


def prepared(model: Any, lr: float = 0.01) -> tuple[paceline.Session, torch.optim.Optimizer]:
    session = paceline.join(RunConfig(strategy="classic"))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    session.prepare(model, optimizer)
    return session, optimizer


def one_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    parameters: list[Tensor] = list(model.parameters())
    sum((parameter.double() ** 2).sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()


def refused(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(UserError, match=CHANGED) as error:
        one_step(model, optimizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_element_that_is_changed_through_data_is_found_at_any_step(step: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7).to(dtype))
    _, optimizer = prepared(model)
    for _ in range(step):
        one_step(model, optimizer)
    model[1].weight.data[3, 5] += 0.25  # type: ignore[operator,index,union-attr]
    refused(model, optimizer)


def test_clipping_is_refused_at_the_first_step_that_changes_a_weight() -> None:
    model = nn.Linear(30, 30)
    _, optimizer = prepared(model)
    optimizer.param_groups[0]["maximize"] = True  # the weights grow
    largest: float = 1.2 * float(model.weight.detach().abs().max())
    with pytest.raises(UserError, match="parameter weight was changed"):
        for _ in range(100):
            one_step(model, optimizer)
            is_within = float(model.weight.detach().abs().max()) <= largest
            for parameter in model.parameters():
                parameter.data.clamp_(-largest, largest)
            if not is_within:
                one_step(model, optimizer)
                pytest.fail("the first step with a clipped weight was made")


@pytest.mark.parametrize("take", [lambda p: p.data, lambda p: p.detach().numpy(), lambda p: p[:].data.view(-1)])
def test_changes_through_a_tensor_or_array_that_was_taken_earlier_are_found(take: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7))
    _, optimizer = prepared(model)
    taken = take(model[1].weight)
    for _ in range(11):
        one_step(model, optimizer)
    taken[...] = 0.5
    refused(model, optimizer)


def test_weights_that_are_read_or_put_back_are_not_refused() -> None:
    """An average of the weights that is evaluated between two steps, as `torch_ema` does."""
    model = nn.Linear(5, 3)
    session, optimizer = prepared(model)
    shadow = [parameter.data.clone() for parameter in model.parameters()]
    for _ in range(20):
        one_step(model, optimizer)
        for average, parameter in zip(shadow, model.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.data, alpha=0.1)
        kept = [parameter.data.clone() for parameter in model.parameters()]
        for parameter, average in zip(model.parameters(), shadow, strict=True):
            parameter.data.copy_(average)
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(before)
    session.finish()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_copies_of_a_watched_model_are_plain_and_free() -> None:
    model = nn.Linear(5, 3)
    _, optimizer = prepared(model)
    one_step(model, optimizer)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(loaded.weight) is nn.Parameter and isinstance(twin.weight, nn.Parameter)
    twin.weight.data.zero_()
    one_step(model, optimizer)
    assert torch.equal(loaded.bias, twin.bias)


def replace_last(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 1)


@pytest.mark.parametrize("change", [replace_last, lambda model: model.append(nn.Linear(1, 1))])
def test_a_layer_that_comes_after_prepare_is_refused_at_the_next_step(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    _, optimizer = prepared(model)
    change(model)
    with pytest.raises(UserError, match=r"^parameter [12].weight came into the model after session.prepare"):
        one_step(model, optimizer)


def test_a_layer_that_comes_between_two_looks_is_refused_at_the_end() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    session, optimizer = prepared(model)
    for _ in range(3):
        one_step(model, optimizer)
    replace_last(model)
    with pytest.raises(UserError, match=r"^parameter 1.weight came into the model after session.prepare"):
        session.finish()


def test_layers_that_are_frozen_or_removed_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    session, optimizer = prepared(model)
    one_step(model, optimizer)
    model[1].requires_grad_(False)
    del model[2]
    model.append(nn.Linear(1, 1).requires_grad_(False))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    session.finish()
