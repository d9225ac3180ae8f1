"""Our flat optimizers against torch.optim, and many runs stepped as one against each run alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.optimizers import Adam, AdamW, Lars, Optimizer, RmsProp, Sgd, clipped
from paceline.interfaces import pack

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
ADAMW_CASES = {name: {"weight_decay": 0.0, **case} for name, case in ADAM_CASES.items()}
RMSPROP_CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.05},
    "short memory": {"alpha": 0.9, "eps": 1e-3},
}
CASES = (
    [(Sgd, torch.optim.SGD, case) for case in SGD_CASES.values()]
    + [(Adam, torch.optim.Adam, case) for case in ADAM_CASES.values()]
    + [(AdamW, torch.optim.AdamW, case) for case in ADAMW_CASES.values()]
    + [(RmsProp, torch.optim.RMSprop, case) for case in RMSPROP_CASES.values()]
)
NAMES = [
    f"{kind} {name}"
    for kind, cases in {"sgd": SGD_CASES, "adam": ADAM_CASES, "adamw": ADAMW_CASES, "rmsprop": RMSPROP_CASES}.items()
    for name in cases
]


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


@pytest.mark.parametrize(
    "make", [lambda: Sgd(0.9, weight_decay=0.01), lambda: Adam(weight_decay=0.01), lambda: RmsProp(0.9)]
)
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


LAYERS = pack([("weight", (5, 3), True), ("bias", (7,), False), ("zeros", (2, 1), True)])


def lars_written_out(momentum: float, decay: float, clip: float | None) -> dict[str, list[float]]:
    """LARS of each parameter on its own, on lists of Python floats."""
    weights = {name: view.flatten().tolist() for name, view in LAYERS.views(layered()).items()}
    velocities = {name: [0.0] * len(values) for name, values in weights.items()}
    decays = {p.name: decay if p.decay else 0.0 for p in LAYERS.parameters}
    for step in range(STEPS):
        flat = layered_gradient(torch.tensor([w for values in weights.values() for w in values]), step)
        norm = math.sqrt(sum(g * g for g in flat))
        scale = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
        at = 0
        for name, values in weights.items():
            gradient = [g * scale for g in flat[at : at + len(values)]]
            at += len(values)
            size, slope = math.sqrt(sum(w * w for w in values)), math.sqrt(sum(g * g for g in gradient))
            ratio = 0.001 * size / (slope + decays[name] * size) if size and name != "bias" else 1.0
            velocities[name] = [
                momentum * v + lr_at(step) * ratio * (g + decays[name] * w)
                for v, g, w in zip(velocities[name], gradient, values, strict=True)
            ]
            weights[name] = [w - v for w, v in zip(values, velocities[name], strict=True)]
    return weights


def layered() -> Tensor:
    """Weights in their layout, one parameter all zeros."""
    flat, values = torch.zeros(LAYERS.size), start()
    for view in list(LAYERS.views(flat).values())[:2]:
        view.copy_(values[: view.numel()].view(view.shape))
    return flat


def layered_gradient(weights: Tensor, step: int) -> list[float]:
    return gradient_at(weights.float(), step).tolist()


@pytest.mark.parametrize(("momentum", "decay", "clip"), [(0.0, 0.0, None), (0.9, 0.0, 1.0), (0.9, 0.01, None)])
def test_lars_scales_each_parameter_by_its_own_norms(momentum: float, decay: float, clip: float | None) -> None:
    mask = torch.zeros(LAYERS.size)
    LAYERS.views(mask)["weight"].fill_(1.0)
    LAYERS.views(mask)["zeros"].fill_(1.0)
    weights, lars = layered(), Lars(LAYERS, momentum, weight_decay=decay, clip=clip, decay_mask=mask)
    several = torch.stack([weights, weights])
    state, states = lars.start(weights), lars.start(several)
    for step in range(STEPS):
        packed = torch.cat([view.flatten() for view in LAYERS.views(weights).values()])
        gradient, values = torch.zeros(LAYERS.size), torch.tensor(layered_gradient(packed, step))
        for view in LAYERS.views(gradient).values():
            view.copy_(values[: view.numel()].view(view.shape))
            values = values[view.numel() :]
        lars.step(weights, state, gradient, torch.tensor(lr_at(step)))
        lars.step(several, states, torch.stack([gradient, gradient]), torch.full((2, 1), lr_at(step)))
    for name, expected in lars_written_out(momentum, decay, clip).items():
        found = LAYERS.views(weights)[name].flatten()
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(several, torch.stack([weights, weights]), rtol=1e-5, atol=1e-6)
    lying = torch.cat([view.flatten() for view in LAYERS.views(weights.clone()).values()])
    assert weights.count_nonzero() == lying.count_nonzero(), "gaps stay zero"


@pytest.mark.parametrize("shape", [(4,), (), (2, 2)])
def test_lars_moves_biases_and_zeros_as_sgd_does(shape: tuple[int, ...]) -> None:
    """A bias from zero towards one; a matrix takes only its first step like that, because then it is not zero."""
    layout = pack([("parameter", shape, True)])
    ours, theirs = torch.zeros(layout.size), torch.zeros(layout.size)
    lars, sgd = Lars(layout, 0.9), Sgd(0.9)
    state, other = lars.start(ours), sgd.start(theirs)
    view, inside, lr = layout.views(ours)["parameter"], torch.zeros(layout.size), torch.tensor(0.01)
    layout.views(inside)["parameter"].fill_(1.0)
    for _ in range(1 if len(shape) > 1 else 300):
        lars.step(ours, state, (ours - 1.0) * inside, lr)
        sgd.step(theirs, other, (theirs - 1.0) * inside, lr)
    torch.testing.assert_close(ours, theirs)
    assert (view > 0.9 * (0.01 if len(shape) > 1 else 1.0)).all()
