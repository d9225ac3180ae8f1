"""One worker's own loop makes the steps that plain torch makes, bit for bit, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam
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
from paceline.config import RunConfig
from tests.support.own_optimizers import (
    Counting,
    CountingElsewhere,
    Demanding,
    Described,
    Failing,
    Restless,
    Unsaveable,
    Wrapping,
)

STEPS = 12
ALONE = RunConfig(strategy="classic")  # a server in this process; without settings nothing is served


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
        self.scaler = torch.amp.GradScaler("cpu", init_scale=case.scale, growth_interval=3)  # type: ignore
        self.scales: list[float] = []

    def step(self, number: int, x: Tensor, y: Tensor) -> None:
        self.number = number
        if number % self.case.accumulate == 0:
            self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        self.case.at(number, self)
        loss = (self.model(x) - y).square().mean()
        if self.case.stepping in (scaled, unscaled_and_clipped):
            loss = self.scaler.scale(loss)
        loss.backward()
        if (number + 1) % self.case.accumulate:
            return
        self.case.stepping(self, loss)
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(1.0)
        elif self.schedule is not None:
            self.schedule.step()


def plainly(loop: Loop, loss: Tensor) -> None:
    loop.optimizer.step()


def scaled(loop: Loop, loss: Tensor) -> None:
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.scales.append(loop.scaler.get_scale())


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """What a user's loop does; `refused` is a part of the line that refuses it, None if it is equal to plain torch."""

    optimizer: Callable[[Any], Optimizer]
    schedule: Callable[[Optimizer], Any] | None = None
    refused: str | None = None
    at: Callable[[int, Loop], None] = nothing
    stepping: Callable[[Loop, Tensor], None] = plainly
    before: Callable[[Any], None] = nothing
    set_to_none: bool = True
    accumulate: int = 1
    scale: float = 1024.0


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


def four_groups(kind: type[Optimizer], **options: Any) -> Callable[[Any], Optimizer]:
    """Groups that differ in everything, and do not follow the order of the model."""

    def make(model: Any) -> Optimizer:
        groups = [
            {"params": model.last.parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": [model.branch.weight], "weight_decay": 0.2},
            {"params": [model.first.bias, model.branch.bias], "lr": 0.005},
            {"params": [model.first.weight], "lr": 0.0},
        ]
        return kind(groups, lr=0.01, **options)  # type: ignore[call-arg]

    return make


def named(model: nn.Module) -> Optimizer:
    return AdamW(model.named_parameters(), lr=0.01)


def matrices(kind: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind([p for p in model.parameters() if p.dim() == 2], lr=0.02)


def every_class() -> dict[str, Case]:
    """Each optimizer of torch that a server can step, with its defaults and with weight decay."""
    found: dict[str, Case] = {}
    for name, kind in sorted(vars(torch.optim).items()):
        if not isinstance(kind, type) or not issubclass(kind, Optimizer) or kind in (Optimizer, LBFGS, SparseAdam):
            continue
        if name == "Muon":
            found[name] = Case(matrices(kind))
            continue
        found[name] = Case(lambda model, kind=kind: kind(model.parameters(), lr=0.02))  # type: ignore[misc]
        if name != "Rprop":
            found[f"{name} in groups"] = Case(four_groups(kind))
    assert len(found) > 20
    return found


def with_state(model: nn.Module) -> Optimizer:
    return trained_before(SGD(model.parameters(), lr=0.1, momentum=0.9))


def with_other_state(model: nn.Module) -> Optimizer:
    """A state that was loaded, as from a checkpoint of another run."""
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(trained_before(Adam(model.parameters(), lr=0.1)).state_dict())
    return optimizer


def trained_before(optimizer: Optimizer) -> Optimizer:
    """An optimizer after a step that left the weights as they were."""
    (group,) = optimizer.param_groups
    lr, group["lr"] = group["lr"], 0.0
    for number, parameter in enumerate(group["params"]):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    optimizer.zero_grad()
    group["lr"] = lr
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


def cycle_momentum(number: int, loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["momentum"] = 0.5 + 0.04 * (number % 5)


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


def overflow(number: int, loop: Loop) -> None:
    """An infinite gradient in steps 5 and 9."""
    if number in (5, 9):
        loop.model.last.bias.register_hook(lambda gradient: gradient * torch.inf if loop.number == number else gradient)


def other_lr(number: int, loop: Loop) -> None:
    for place, group in enumerate(loop.optimizer.param_groups):
        group["lr"] = 0.01 * (place + 1) / (number + 1)


def skip_branch(number: int, loop: Loop) -> None:
    loop.model.takes_branch = number % 2 == 0


def late_branch(number: int, loop: Loop) -> None:
    loop.model.takes_branch = number >= 4


def no_branch(number: int, loop: Loop) -> None:
    loop.model.takes_branch = False


def reload(number: int, loop: Loop) -> None:
    if number == 4:
        loop.model.load_state_dict({name: tensor / 2 for name, tensor in loop.model.state_dict().items()})


def change_data(number: int, loop: Loop) -> None:
    loop.model.last.weight.data.add_(0.5)


def with_closure(loop: Loop, loss: Tensor) -> None:
    loop.optimizer.step(lambda: loss)


def clip_by_value(loop: Loop, loss: Tensor) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    loop.optimizer.step()


def clip_by_norm(loop: Loop, loss: Tensor) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()


def unscaled_and_clipped(loop: Loop, loss: Tensor) -> None:
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    scaled(loop, loss)


def cosine(optimizer: Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=STEPS)


def one_cycle(**options: Any) -> Callable[[Optimizer], Any]:
    return lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS, **options)


CASES = every_class() | {
    "SGD": Case(sgd(momentum=0.0)),
    "momentum": Case(sgd()),
    "Nesterov": Case(sgd(nesterov=True, weight_decay=0.01)),
    "dampening": Case(sgd(dampening=0.1)),
    "maximize": Case(sgd(maximize=True, lr=0.001)),
    "foreach": Case(sgd(foreach=True)),
    "foreach Adam": Case(adam(foreach=True)),
    "fused": Case(adam(fused=True)),
    "fused SGD": Case(sgd(fused=True)),
    "Adam": Case(adam(betas=(0.8, 0.95))),
    "amsgrad": Case(adam(amsgrad=True)),
    "eps": Case(adam(eps=1e-3)),
    "Adam with decay": Case(adam(weight_decay=0.1)),
    "Adam with decoupled decay": Case(adam(weight_decay=0.1, decoupled_weight_decay=True)),
    "AdamW": Case(adamw(weight_decay=0.1)),
    "centered RMSprop": Case(lambda model: RMSprop(model.parameters(), 0.01, centered=True, momentum=0.5)),
    "Adagrad with a start": Case(lambda model: Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5)),
    "decay groups": Case(decay_groups),
    "two learning rates": Case(two_rates, at=no_branch),
    "named parameters": Case(named),
    "no learning rate": Case(sgd(lr=0.0), at=set_group("lr", 0.1)),
    "whole numbers": Case(sgd(lr=1, momentum=0), stepping=clip_by_value),
    "cosine": Case(sgd(), cosine),
    "warm-up": Case(adamw(), lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))),
    "steps": Case(sgd(), lambda optimizer: StepLR(optimizer, 3)),
    "exponential": Case(sgd(), lambda optimizer: ExponentialLR(optimizer, 0.8)),
    "plateau": Case(sgd(), lambda optimizer: ReduceLROnPlateau(optimizer, patience=1)),
    "one cycle of lr": Case(sgd(), one_cycle(cycle_momentum=False)),
    "one cycle": Case(sgd(), one_cycle()),
    "one cycle of betas": Case(adam(), one_cycle()),
    "one cycle in groups": Case(four_groups(AdamW), one_cycle()),
    "cycled momentum": Case(sgd(), lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)),
    "lr by hand": Case(sgd(), at=set_group("lr", 0.01)),
    "lr of groups by hand": Case(four_groups(AdamW), at=other_lr),
    "momentum by hand": Case(sgd(momentum=0), at=cycle_momentum),
    "weight decay by hand": Case(sgd(), at=set_group("weight_decay", 0.1)),
    "weight decay of Adam by hand": Case(adam(), at=set_group("weight_decay", 0.1)),
    "betas by hand": Case(adam(), at=set_group("betas", (0.5, 0.9))),
    "maximize by hand": Case(sgd(lr=0.001), at=set_group("maximize", True)),
    "state from before": Case(with_state),
    "state loaded": Case(with_other_state),
    "accumulation": Case(adam(), accumulate=3),
    "accumulation of zeros": Case(sgd(), accumulate=4, set_to_none=False),
    "hook before the step": Case(clipping),
    "clipping in the loop": Case(sgd(), stepping=clip_by_value),
    "clipping by norm": Case(adam(), stepping=clip_by_norm),
    "closure": Case(sgd(), stepping=with_closure),
    "branch without momentum": Case(sgd(momentum=0.0), at=skip_branch),
    "branch with momentum": Case(sgd(), at=skip_branch),
    "branch with decay": Case(sgd(momentum=0.0, weight_decay=0.1), at=no_branch),
    "branch of zeros": Case(sgd(), at=skip_branch, set_to_none=False),
    "branch that comes late": Case(sgd(), at=late_branch),
    "late branch of Adam": Case(adam(), at=late_branch),
    "branch that never comes": Case(adam(), at=no_branch),
    "frozen from the start": Case(sgd(), before=lambda model: model.first.requires_grad_(False)),
    "frozen later": Case(sgd(), at=freeze),
    "frozen later with Adam": Case(adamw(), at=freeze),
    "unfrozen": Case(sgd(), at=unfreeze, before=freeze_branch),
    "unfrozen with Adam": Case(adam(), at=unfreeze, before=freeze_branch),
    "scaler": Case(sgd(), stepping=scaled),
    "scaler with Adam": Case(adam(), stepping=scaled),
    "scaler of any scale": Case(sgd(), stepping=scaled, scale=1000.0),
    "scaler and fused": Case(adam(fused=True), stepping=scaled),
    "scaler and accumulation": Case(adam(), stepping=scaled, accumulate=2),
    "scaler and a hook": Case(clipping, stepping=scaled),
    "scaler and clipping": Case(sgd(), stepping=unscaled_and_clipped),
    "overflow": Case(sgd(), stepping=scaled, at=overflow),
    "overflow with Adam": Case(adam(), stepping=scaled, at=overflow),
    "overflow and fused": Case(adam(fused=True), stepping=scaled, at=overflow),
    "overflow and a hook": Case(clipping, stepping=scaled, at=overflow),
    "own class": Case(lambda model: Counting(model.parameters(), lr=0.1)),
    "own class that counts elsewhere": Case(lambda model: CountingElsewhere(model.parameters(), lr=0.1)),
    "own class that skips": Case(lambda model: Counting(model.parameters(), lr=0.1), at=skip_branch),
    "LBFGS": Case(lambda model: LBFGS(model.parameters()), refused="evaluates the loss several times"),
    "SparseAdam": Case(lambda model: SparseAdam(list(model.parameters())), refused="use Adam, or Adagrad"),
    "differentiable": Case(sgd(differentiable=True), refused="differentiable=True"),
    "own class with a closure": Case(lambda model: Demanding(model.parameters()), refused="evaluates the loss"),
    "one inside another": Case(lambda m: Wrapping(m.parameters()), refused=r"text \(.*SGD \( Parameter Group 0"),
    "own class with an object": Case(lambda model: Described(model.parameters()), refused="no number or text"),
    "own state that cannot be saved": Case(lambda m: Unsaveable(m.parameters()), refused="state 'seen' is a set"),
    "own class that fails": Case(
        lambda m: Failing(m.parameters()), refused="fails in the server: ValueError: the first"
    ),
    "own learning rate": Case(lambda m: Restless(m.parameters()), refused="changes its learning rate in step"),
    "hook after the step": Case(clamping, refused="was changed or moved between two steps"),
    "weights loaded": Case(sgd(), refused="was changed or moved between two steps", at=reload),
    "weights changed by .data": Case(
        sgd(), refused="parameter .* was changed or moved between two steps", at=change_data
    ),
    "group added": Case(lambda model: SGD(model.first.parameters(), 0.1), refused="parameters or groups", at=add_group),
    "a setting that is text": Case(
        lambda m: Counting(m.parameters(), 0.1, "a"), refused="only numbers may change", at=set_group("anything", "b")
    ),
}


def trained(case: Case) -> tuple[Loop, Loop]:
    """A loop through a session and a plain loop, after the same batches."""
    loops = Loop(case), Loop(case)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4 * STEPS, 4, generator=generator), torch.randn(4 * STEPS, 1, generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    session = paceline.join(ALONE)
    *_, batches = session.prepare(loops[0].model, loops[0].optimizer, loader, epochs=1)
    for number, batch in enumerate(batches):
        for loop in loops:
            loop.step(number, *batch)
    assert session.finished or case.at is overflow, "skipped samples are not trained on"
    assert session.iteration == STEPS // case.accumulate
    return loops


def assert_equal_states(found: Any, expected: Any, where: str = "state") -> None:
    """Equal bits, equal kinds, equal names."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_equal_states(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal_states(one, other, f"{where}.{place}")
    else:
        assert type(found) is type(expected) and found == expected, where


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is None])
def test_a_step_is_that_of_plain_torch(name: str) -> None:
    ours, plain = trained(CASES[name])
    before = Loop(CASES[name]).model
    assert not all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), before.parameters(), strict=True))
    for (part, parameter), expected in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(parameter, expected), part
        assert (parameter.grad is None) is (expected.grad is None), "gradients stay, as in torch"
    assert_equal_states(ours.optimizer.state_dict(), plain.optimizer.state_dict())
    assert ours.scales == plain.scales
    if "overflow" in name:
        assert any(after < before for before, after in pairwise(plain.scales)), "the scale fell"
    elif plain.scales:
        assert plain.scales[-1] > plain.scales[0]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused is not None])
def test_what_would_be_another_step_is_refused_in_one_line(name: str) -> None:
    case = CASES[name]
    with pytest.raises(paceline.UserError, match=case.refused) as error:
        trained(case)
    assert "\n" not in str(error.value)


def test_a_learning_rate_in_a_tensor_is_that_number() -> None:
    """Torch then rounds in another order."""
    ours, plain = trained(Case(adam(lr=torch.tensor(0.02))))
    for parameter, expected in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0.0, atol=1e-6)


def adopted(optimizer: Optimizer, model: nn.Module) -> Any:
    """Batches of a session that has taken over the optimizer."""
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    *_, batches = paceline.join(ALONE).prepare(model, optimizer, loader, epochs=1)
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
    found = optimizer.state_dict()
    assert torch.equal(found["state"][0]["momentum_buffer"], model.first.weight.grad)  # type: ignore[arg-type]
    with pytest.raises(paceline.UserError, match=r"SGD.load_state_dict\(...\) .* load it before"):
        optimizer.load_state_dict(found)
    for look in (lambda: optimizer.state.clear(), lambda: [*optimizer.state.values()], lambda: optimizer.state["any"]):
        with pytest.raises(paceline.UserError, match=r"SGD.state was read .* in the server; .* trains only alone"):
            look()
    found["state"][0]["momentum_buffer"].zero_()
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].any(), "what is read is a copy"


def test_gradients_stay_after_a_step_and_are_added_to() -> None:
    """As in torch: a loop that forgets zero_grad() is as wrong here as there."""
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    optimizer, other = (SGD(one.parameters(), lr=0.1) for one in (model, plain))
    for x, y in adopted(optimizer, model):
        for one, stepping in ((model, optimizer), (plain, other)):
            (one(x) - y).square().mean().backward()
            stepping.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        assert torch.equal(parameter.grad, expected.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_gradient_scaler_unscales_before_the_hooks_and_the_push(kind: type[Optimizer]) -> None:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    x, y = next(iter(adopted(optimizer, model)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    scaler.scale((model(x) - y).square().mean()).backward()
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.last.bias.grad.clone()))  # type: ignore[union-attr]
    gradient = model.last.bias.grad / 1024.0  # type: ignore[operator]
    scaler.step(optimizer)
    assert torch.equal(seen[0], gradient) and torch.equal(model.last.bias.grad, gradient)  # type: ignore[arg-type]


def test_a_step_that_a_gradient_scaler_skips_calls_no_hook_and_counts_as_one() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = paceline.join(ALONE)
    session.prepare(model, optimizer, steps=2)
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(0))  # type: ignore[arg-type]
    optimizer.register_step_post_hook(lambda *_: called.append(1))  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
    for _ in range(2):
        assert not session.finished
        scaler.scale((model(torch.ones(1, 4)) * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert session.finished and not called and scaler.get_scale() == 256.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 4, sparse=sparse), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids).mean(1))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("kind", [Adagrad, SGD])
def test_sparse_gradients_move_the_rows_that_plain_torch_moves(kind: Any) -> None:
    torch.manual_seed(5)
    models = [Words(sparse=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    start = models[0].words.weight.detach().clone()
    optimizers = [kind(model.parameters(), lr=0.5) for model in models]
    session = paceline.join(ALONE)
    session.prepare(models[0], optimizers[0])
    seen = set()
    for number in range(12):
        ids = torch.randint(0, 20, (3, 2), generator=torch.Generator().manual_seed(number))
        seen |= set(ids.flatten().tolist())
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(ids) - 1.0).square().mean().backward()
            assert model.words.weight.grad.is_sparse  # type: ignore[union-attr]
            optimizer.step()
    torch.testing.assert_close(models[0].words.weight, models[1].words.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(models[0].last.weight, models[1].last.weight, rtol=1e-5, atol=1e-6)
    rest = [row for row in range(50) if row not in seen]
    assert torch.equal(models[0].words.weight[rest], start[rest]) and len(rest) > 20


def test_an_optimizer_of_ones_own_must_be_importable() -> None:
    class Shrinking(SGD):
        pass

    model = Net()
    with pytest.raises(paceline.UserError, match="is defined inside a function: the server imports it"):
        adopted(Shrinking(model.parameters(), lr=0.1), model)


def test_an_optimizer_of_ones_own_is_not_taken_for_the_one_it_is_derived_from() -> None:
    """A subclass of SGD under SGD's name steps in its own way."""
    Doubling.__name__ = "SGD"
    models = Net(), Net()
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Doubling(model.parameters(), lr=0.1) for model in models]
    for x, y in adopted(optimizers[0], models[0]):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    for parameter, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(parameter, expected)


class Doubling(SGD):
    """Steps twice."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step()


def test_alone_without_settings_nothing_is_touched() -> None:
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    before, session = [id(parameter) for parameter in model.parameters()], paceline.join()
    storage = [parameter.data_ptr() for parameter in model.parameters()]
    found = session.prepare(model, optimizer, loader)
    assert found[0] is model and found[1] is optimizer and found[2] is loader
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    assert [id(parameter) for parameter in model.parameters()] == before
    assert [parameter.data_ptr() for parameter in model.parameters()] == storage
    assert "step" not in vars(optimizer) and optimizer.state[model.first.weight]["step"] == 4
    assert session.iteration == 4
    session.finish()
