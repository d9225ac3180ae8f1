"""One worker's own loop makes the steps that plain torch makes, to 1e-6, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import paceline

STEPS = 10


class Net(nn.Module):
    """Two layers, and a branch that only some batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.branch = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 8)
        self.takes_branch = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.branch(hidden)) if self.takes_branch else hidden)


class Loop:
    """A training loop's model, optimizer and schedule."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        self.case, self.model = case, Net()
        case.before(self.model)
        self.optimizer = case.optimizer(self.model)
        self.schedule = case.schedule(self.optimizer) if case.schedule is not None else None

    def step(self, number: int, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        self.case.at(number, self)
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.case.stepping(self, loss)
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(1.0)
        elif self.schedule is not None:
            self.schedule.step()


def plainly(loop: Loop, loss: Tensor) -> None:
    loop.optimizer.step()


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """What a user's loop does; `refused` is a part of the line that refuses it, None if it is equal to plain torch."""

    optimizer: Callable[[nn.Module], Optimizer]
    schedule: Callable[[Optimizer], Any] | None = None
    refused: str | None = None
    at: Callable[[int, Loop], None] = nothing
    stepping: Callable[[Loop, Tensor], None] = plainly
    before: Callable[[Any], None] = nothing
    set_to_none: bool = True


def sgd(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adam(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: Adam(model.parameters(), **{"lr": 0.02, **options})


def adamw(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: AdamW(model.parameters(), **{"lr": 0.02, **options})


def decay_groups(model: nn.Module) -> Optimizer:
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    return AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)


def two_rates(model: Any) -> Optimizer:
    return SGD([{"params": model.first.parameters(), "lr": 0.2}, {"params": model.last.parameters()}], lr=0.1)


def with_state(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def clipping(model: nn.Module) -> Optimizer:
    """By a hook before each step, and another one that looks afterwards."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def clamping(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def set_group(setting: str, value: Any) -> Callable[[int, Loop], None]:
    def change(number: int, loop: Loop) -> None:
        if number == 4:
            for group in loop.optimizer.param_groups:
                group[setting] = value

    return change


def freeze_branch(model: Net) -> None:
    model.branch.requires_grad_(False)


def unfreeze(number: int, loop: Loop) -> None:
    loop.model.branch.requires_grad_(number >= 4)


def freeze(number: int, loop: Loop) -> None:
    loop.model.branch.requires_grad_(number < 4)


def add_group(number: int, loop: Loop) -> None:
    if number == 4:
        loop.optimizer.add_param_group({"params": list(loop.model.branch.parameters())})


def skip_branch(number: int, loop: Loop) -> None:
    loop.model.takes_branch = number % 2 == 0


def late_branch(number: int, loop: Loop) -> None:
    loop.model.takes_branch = number >= 4


def no_branch(number: int, loop: Loop) -> None:
    loop.model.takes_branch = False


def reload(number: int, loop: Loop) -> None:
    if number == 4:
        loop.model.load_state_dict({name: tensor / 2 for name, tensor in loop.model.state_dict().items()})


def with_closure(loop: Loop, loss: Tensor) -> None:
    loop.optimizer.step(lambda: loss)


def clip_by_value(loop: Loop, loss: Tensor) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    loop.optimizer.step()


def cosine(optimizer: Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=STEPS)


def one_cycle(**options: Any) -> Callable[[Optimizer], Any]:
    return lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS, **options)


ONLY_LR = "only lr may change"
CASES = {
    "SGD": Case(sgd(momentum=0.0)),
    "momentum": Case(sgd()),
    "Nesterov": Case(sgd(nesterov=True, weight_decay=0.01)),
    "foreach": Case(sgd(foreach=True)),
    "fused": Case(adam(fused=True)),
    "Adam": Case(adam(betas=(0.8, 0.95))),
    "Adam with decay": Case(adam(weight_decay=0.1)),
    "Adam with decoupled decay": Case(adam(weight_decay=0.1, decoupled_weight_decay=True)),
    "AdamW": Case(adamw(weight_decay=0.1)),
    "decay groups": Case(decay_groups),
    "lr tensor": Case(adam(lr=torch.tensor(0.02))),
    "cosine": Case(sgd(), cosine),
    "warm-up": Case(adamw(), lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))),
    "steps": Case(sgd(), lambda optimizer: StepLR(optimizer, 3)),
    "exponential": Case(sgd(), lambda optimizer: ExponentialLR(optimizer, 0.8)),
    "plateau": Case(sgd(), lambda optimizer: ReduceLROnPlateau(optimizer, patience=1)),
    "one cycle of lr": Case(sgd(), one_cycle(cycle_momentum=False)),
    "lr by hand": Case(sgd(), at=set_group("lr", 0.01)),
    "hook before the step": Case(clipping),
    "clipping in the loop": Case(sgd(), stepping=clip_by_value),
    "closure": Case(sgd(), stepping=with_closure),
    "branch without momentum": Case(sgd(momentum=0.0), at=skip_branch),
    "branch of zeros": Case(sgd(), at=skip_branch, set_to_none=False),
    "branch that comes late": Case(sgd(), at=late_branch),
    "branch that never comes": Case(adam(), at=no_branch),
    "frozen from the start": Case(sgd(), before=lambda model: model.first.requires_grad_(False)),
    "one cycle": Case(sgd(), one_cycle(), ONLY_LR),
    "one cycle of betas": Case(adam(), one_cycle(), ONLY_LR),
    "cycled momentum": Case(sgd(), lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3), ONLY_LR),
    "weight decay by hand": Case(sgd(), refused=ONLY_LR, at=set_group("weight_decay", 0.1)),
    "betas by hand": Case(adam(), refused=ONLY_LR, at=set_group("betas", (0.5, 0.9))),
    "two learning rates": Case(two_rates, refused="groups with learning rates"),
    "state from before": Case(with_state, refused="it has a state already"),
    "dampening": Case(sgd(dampening=0.1), refused="dampening=0.1"),
    "maximize": Case(sgd(maximize=True), refused="maximize=True"),
    "differentiable": Case(sgd(differentiable=True), refused="differentiable=True"),
    "amsgrad": Case(adam(amsgrad=True), refused="amsgrad=True"),
    "eps": Case(adam(eps=1e-6), refused="eps=1e-06"),
    "no learning rate": Case(sgd(lr=0.0), refused="above 0"),
    "hook after the step": Case(clamping, refused="was changed or moved between two steps"),
    "weights loaded": Case(sgd(), refused="was changed or moved between two steps", at=reload),
    "unfrozen": Case(sgd(), refused="requires_grad=True now", at=unfreeze, before=freeze_branch),
    "frozen later": Case(sgd(), refused="requires_grad=False now", at=freeze),
    "group added": Case(lambda model: SGD(model.first.parameters(), 0.1), refused="2 parameter groups", at=add_group),  # type: ignore
    "branch with momentum": Case(sgd(), refused="branch.weight has no gradient in this step", at=skip_branch),
    "branch with decay": Case(sgd(momentum=0.0, weight_decay=0.1), refused="has no gradient", at=no_branch),
    "late branch of Adam": Case(adam(), refused="gets its first gradient after steps without one", at=late_branch),
}


def trained(case: Case) -> tuple[nn.Module, nn.Module]:
    """The models of a loop through a session and of a plain loop, after the same batches."""
    loops = Loop(case), Loop(case)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4 * STEPS, 4, generator=generator), torch.randn(4 * STEPS, 1, generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    session = paceline.join()
    *_, batches = session.prepare(loops[0].model, loops[0].optimizer, loader, epochs=1)
    for number, batch in enumerate(batches):
        for loop in loops:
            loop.step(number, *batch)
    assert session.finished
    return loops[0].model, loops[1].model


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is None])
def test_a_step_is_that_of_plain_torch(name: str) -> None:
    ours, plain = trained(CASES[name])
    for parameter, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is not None])
def test_what_would_be_another_step_is_refused_in_one_line(name: str) -> None:
    case = CASES[name]
    with pytest.raises(paceline.UserError, match=case.refused) as error:
        trained(case)
    assert "\n" not in str(error.value)


def adopted(optimizer: Optimizer, model: nn.Module) -> Any:
    """Batches of a session that has taken over the optimizer."""
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    *_, batches = paceline.join().prepare(model, optimizer, loader, epochs=1)
    return batches


def test_the_state_of_an_optimizer_is_in_the_server() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = with_state(Net()).state_dict()
    batches = adopted(optimizer, model)
    optimizer.load_state_dict(optimizer.state_dict())  # as libraries do that move an optimizer to a device
    with pytest.raises(paceline.UserError, match=r"SGD.load_state_dict\(...\) .* state is in the server"):
        optimizer.load_state_dict(other)
    x, y = next(iter(batches))
    (model(x) - y).square().mean().backward()
    optimizer.step()
    with pytest.raises(paceline.UserError, match=r"SGD.state_dict\(\) .* 'paceline resume' keep it"):
        optimizer.state_dict()
    for look in (lambda: optimizer.state.clear(), lambda: [*optimizer.state.values()], lambda: optimizer.state["any"]):
        with pytest.raises(paceline.UserError, match=r"SGD.state was read or changed .* state is in the server"):
            look()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_unscales_before_the_push(fused: bool) -> None:
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.1, fused=fused)
    x, y = next(iter(adopted(optimizer, model)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    scaler.scale((model(x) - y).square().mean()).backward()
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.last.bias.grad.clone()))  # type: ignore[union-attr]
    gradient = model.last.bias.grad / 1024.0  # type: ignore[operator]
    scaler.step(optimizer)
    assert torch.equal(seen[0], gradient)


def test_a_step_that_a_gradient_scaler_skips_is_told() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    batches = iter(adopted(optimizer, model))
    x, y = next(batches)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    scaler.scale((model(x) - y).square().mean() * float("inf")).backward()
    scaler.step(optimizer)
    with pytest.raises(paceline.UserError, match=r"session.step\(\) was not called"):
        next(batches)


def test_an_optimizer_of_ones_own_is_not_taken_for_the_one_it_is_derived_from() -> None:
    class Shrinking(SGD):
        pass

    Shrinking.__name__ = "SGD"
    model = Net()
    with pytest.raises(paceline.UserError, match="the server has SGD, Adam, AdamW"):
        adopted(Shrinking(model.parameters(), lr=0.1), model)
