"""Our flat optimizers against torch.optim, and many runs stepped as one against each run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.optimizers import Adam, Optimizer, Sgd, clipped

SIZE, STEPS = 50, 60

SGD_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"weight_decay": 0.05},
    "momentum and weight decay": {"momentum": 0.7, "weight_decay": 0.05},
    "nesterov and weight decay": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.05},
}
ADAM_CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "slow mean": {"betas": (0.99, 0.999)},
    "weight decay": {"weight_decay": 0.05},
    "large eps": {"betas": (0.8, 0.95), "eps": 1e-3},
    "no averaging": {"betas": (0.0, 0.9)},
}
CASES = [(Sgd, torch.optim.SGD, case) for case in SGD_CASES.values()] + [
    (Adam, torch.optim.Adam, case) for case in ADAM_CASES.values()
]
NAMES = [f"sgd {name}" for name in SGD_CASES] + [f"adam {name}" for name in ADAM_CASES]


def gradient_at(weights: Tensor, step: int) -> Tensor:
    """A gradient that depends on the weights, so that a wrong step is not forgotten."""
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(step))
    return torch.sin(3 * weights) + 0.3 * noise


def start() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(999))


def lr_at(step: int) -> float:
    return 0.05 / (1 + step % 7)


def train(optimizer: Optimizer, weights: Tensor) -> Tensor:
    state = optimizer.start(weights)
    for step in range(STEPS):
        optimizer.step(weights, state, gradient_at(weights, step), torch.tensor(lr_at(step)))
    return weights


def train_in_torch(kind: type[torch.optim.Optimizer], options: dict[str, Any], clip: float | None = None) -> Tensor:
    weights = torch.nn.Parameter(start())
    optimizer = kind([weights], **{**options, "lr": 0.1})
    for step in range(STEPS):
        weights.grad = gradient_at(weights.detach(), step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([weights], clip)
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_many_steps_agree_with_torch(
    ours: type[Sgd] | type[Adam], theirs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    torch.testing.assert_close(train(ours(**options), start()), train_in_torch(theirs, options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("clip", [0.1, 2.0, 1e9])
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_clipping_agrees_with_torch(
    ours: type[Sgd] | type[Adam], theirs: type[torch.optim.Optimizer], options: dict[str, Any], clip: float
) -> None:
    found = train(ours(**options, clip=clip), start())
    torch.testing.assert_close(found, train_in_torch(theirs, options, clip), rtol=2e-5, atol=2e-6)


def test_clipping_bounds_the_norm_and_leaves_a_short_gradient_alone() -> None:
    long, short = torch.tensor([30.0, 40.0]), torch.tensor([0.3, 0.4])
    assert clipped(long, 1.0).norm().item() == pytest.approx(1.0, rel=1e-5)
    assert torch.equal(clipped(short, 1.0), short)


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=NAMES)
def test_many_runs_stepped_as_one_equal_each_run_alone(
    ours: type[Sgd] | type[Adam], theirs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    runs = 4
    rows = torch.randn(runs, SIZE, generator=torch.Generator().manual_seed(5))
    rates = torch.tensor([[0.1], [0.02], [0.5], [0.001]])
    gradients = torch.randn(20, runs, SIZE, generator=torch.Generator().manual_seed(6))
    together, batched = rows.clone(), ours(**options, clip=3.0)
    state = batched.start(together)
    for step in range(20):
        batched.step(together, state, gradients[step], rates)
    for run in range(runs):
        alone, single = rows[run].clone(), ours(**options, clip=3.0)
        state = single.start(alone)
        for step in range(20):
            single.step(alone, state, gradients[step, run], rates[run, 0])
        torch.testing.assert_close(together[run], alone, rtol=1e-6, atol=1e-7)


def test_momentum_may_differ_between_runs() -> None:
    momenta = torch.tensor([[0.0], [0.5], [0.9]])
    together, gradients = torch.zeros(3, SIZE), torch.randn(10, 3, SIZE)
    batched = Sgd(momenta)
    state = batched.start(together)
    for gradient in gradients:
        batched.step(together, state, gradient, torch.full((3, 1), 0.1))
    for run, momentum in enumerate([0.0, 0.5, 0.9]):
        alone, single = torch.zeros(SIZE), Sgd(momentum)
        state = single.start(alone)
        for gradient in gradients:
            single.step(alone, state, gradient[run], torch.tensor(0.1))
        torch.testing.assert_close(together[run], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_weight_decay_touches_only_where_the_mask_is_one(optimizer: type[Sgd] | type[Adam]) -> None:
    mask = (torch.arange(SIZE) % 2).float()
    weights = torch.ones(SIZE)
    decaying = optimizer(weight_decay=0.1, decay_mask=mask)
    state = decaying.start(weights)
    for _ in range(5):
        decaying.step(weights, state, torch.zeros(SIZE), torch.tensor(0.1))
    assert (weights[mask == 0] == 1.0).all()
    assert (weights[mask == 1] < 1.0).all()


@pytest.mark.parametrize("optimizer", [Sgd(0.9, nesterov=True, weight_decay=0.1, clip=1.0), Adam(weight_decay=0.1)])
def test_a_step_leaves_the_gradient_and_the_state_keys_as_they_were(optimizer: Optimizer) -> None:
    weights, gradient = start(), torch.ones(SIZE)
    state = optimizer.start(weights)
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    memory = weights.data_ptr()
    optimizer.step(weights, state, gradient, torch.tensor(0.1))
    assert torch.equal(gradient, torch.ones(SIZE))
    assert weights.data_ptr() == memory
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == addresses


@pytest.mark.parametrize("make", [lambda: Sgd(0.9, weight_decay=0.01), lambda: Adam(weight_decay=0.01)])
def test_a_saved_state_goes_on_bit_for_bit(make: Any) -> None:
    weights, optimizer = start(), make()
    state = optimizer.start(weights)
    for step in range(5):
        optimizer.step(weights, state, gradient_at(weights, step), torch.tensor(0.1))
    copied, saved = weights.clone(), {name: tensor.clone() for name, tensor in state.items()}
    fresh = make()
    fresh.start(copied)
    for step in range(5, 15):
        optimizer.step(weights, state, gradient_at(weights, step), torch.tensor(0.1))
        fresh.step(copied, saved, gradient_at(copied, step), torch.tensor(0.1))
    assert torch.equal(weights, copied)
