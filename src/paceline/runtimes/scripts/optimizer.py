"""A script's torch optimizer: the server makes its steps, `step()` becomes a push, and what would differ is refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.errors import UserError

KINDS: dict[type[Optimizer], str] = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}
"""The torch optimizers that the server has too."""
FIXED = {"dampening": 0, "maximize": False, "amsgrad": False, "eps": 1e-8, "differentiable": False}
"""Optimizer settings that the server does not support, with the only value it allows."""
FREE = {"lr", "foreach", "fused", "capturable"}
"""Settings that may change: the learning rate is sent, the others only choose how torch computes."""


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Convert a torch optimizer to the settings of a run."""
    name, kind = type(optimizer).__name__, KINDS.get(type(optimizer))
    if kind is None:
        known = ", ".join(known.__name__ for known in KINDS)
        instead = "leave it out of session.prepare(...), call session.step(loss) and give --optimizer lars"
        raise UserError(f"optimizer {name}: the server has {known}; use one of them, or {instead}")
    if optimizer.state:
        where = "the server begins without one, and 'paceline resume' continues a run"
        raise UserError(f"optimizer {name}: it has a state already; {where}: give a new optimizer")
    for setting, wanted in FIXED.items():
        for group in optimizer.param_groups:
            if group.get(setting, wanted) != wanted:
                raise UserError(f"optimizer {name}: {setting}={group[setting]}, and the server has {wanted}: use that")
    decays = {float(group["weight_decay"]) for group in optimizer.param_groups} - {0.0}
    if len(decays) > 1:
        raise UserError(f"optimizer {name}: weight decays {sorted(decays)}; the server has one, or none, a parameter")
    lr, decay = lr_of(optimizer, "initial_lr"), max(decays, default=0.0)
    if not lr > 0:
        raise UserError(
            f"optimizer {name}: lr={lr:g} at session.prepare(...): a schedule scales it, so give one above 0"
        )
    if kind != "sgd":
        kind = "adamw" if _common(optimizer, "decoupled_weight_decay", kind == "adamw") else "adam"
    settings = {"optimizer": kind, "lr": lr, "weight_decay": decay}
    for setting in ("momentum", "nesterov", "betas"):
        if setting in optimizer.defaults:
            value = _common(optimizer, setting)
            settings[setting] = [float(beta) for beta in value] if setting == "betas" else value
    return settings


def _common(optimizer: Optimizer, setting: str, default: Any = None) -> Any:
    """The value of a setting that all groups must share."""
    values = [group.get(setting, default) for group in optimizer.param_groups]
    if any(value != values[0] for value in values):
        raise UserError(f"optimizer {type(optimizer).__name__}: groups with {setting} {values}; the server has one")
    return values[0]


def lr_of(optimizer: Optimizer, which: str = "lr") -> float:
    """The current learning rate of all groups, or the `initial_lr` that a schedule started from."""
    rates = [float(group.get(which, group["lr"])) for group in optimizer.param_groups]
    if any(rate != rates[0] for rate in rates):
        raise UserError(f"optimizer {type(optimizer).__name__}: groups with learning rates {rates}; the server has one")
    return rates[0]


def decay_of(optimizer: Optimizer) -> Callable[[str, nn.Parameter], bool]:
    """Return a function that says whether a parameter has weight decay."""
    touched = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    return lambda name, parameter: id(parameter) in touched


class StateElsewhere(defaultdict[Any, Any]):
    """The empty state of an optimizer whose state is in the server: whoever looks into it calls `refuse` first."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__(dict)
        self._refuse = refuse

    def __getitem__(self, key: Any) -> Any:
        self._refuse()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[Any]:
        self._refuse()
        return super().__iter__()

    def items(self) -> Any:
        self._refuse()
        return super().items()

    def values(self) -> Any:
        self._refuse()
        return super().values()

    def clear(self) -> None:
        self._refuse()
        super().clear()


class AdoptedOptimizer:
    """A user's optimizer after `prepare`. Its state is in the server, which has its settings as they were then."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, begun: bool) -> None:
        """In a resumed run (`begun`), a schedule may step through finished epochs before the first push."""
        self._optimizer, self._begun = optimizer, begun
        self._name, self._counts_steps = type(optimizer).__name__, not isinstance(optimizer, SGD)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._watched = [setting for setting in optimizer.defaults if setting not in FREE]
        self._values, self._parameters = self._current_values(), self._current_parameters()
        self._needed = [parameter.requires_grad for parameter in self._parameters]
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._decayed = [decay_of(optimizer)("", parameter) for parameter in self._trained]
        self._remembers = self._counts_steps or bool(optimizer.param_groups[0]["momentum"])
        self._had: list[bool] | None = None if begun else [False] * len(self._trained)  # gradients before this step
        self._pushed = False
        for parameter in self._trained:
            parameter.grad = None  # as of a new optimizer, so that a parameter without a gradient can be told

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return lr_of(self._optimizer)

    def take_over(self, push: Callable[[Any], None]) -> None:
        """Replace `step()` by a push, in place: schedules and scalers keep their reference."""
        optimizer = self._optimizer
        optimizer._opt_called = self._begun  # type: ignore[attr-defined]  # read by a schedule

        def step(this: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            push(loss)
            this._opt_called = True  # type: ignore[attr-defined]
            return loss

        hooked = Optimizer.profile_hook_step(step)  # calls the hooks that are registered with the optimizer
        hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a schedule warns, or wraps it again
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = False  # else a GradScaler leaves it to step() to unscale gradients
        self._guard_state(optimizer)

    def _guard_state(self, optimizer: Optimizer) -> None:
        """Refuse to read or load a state that is not here. Before the first push it is empty, and some libraries do."""
        read, load = optimizer.state_dict, optimizer.load_state_dict
        where = "the optimizer's state is in the server: its checkpoints and 'paceline resume' keep it"

        def read_state() -> dict[str, Any]:
            if self._pushed:
                raise UserError(f"{self._name}.state_dict() after session.prepare(...): {where}; leave it out")
            return read()

        def load_state(state_dict: dict[str, Any]) -> None:
            if self._pushed or state_dict.get("state"):
                raise UserError(f"{self._name}.load_state_dict(...) after session.prepare(...): {where}; leave it out")
            load(state_dict)
            optimizer.state = StateElsewhere(refuse)  # torch has put another there

        def refuse() -> None:
            if self._pushed:
                raise UserError(f"{self._name}.state was read or changed after session.prepare(...): {where}")

        optimizer.state = StateElsewhere(refuse)
        optimizer.state_dict = read_state  # type: ignore[method-assign]
        optimizer.load_state_dict = load_state  # type: ignore[method-assign]

    def require_same(self) -> None:
        """Raise UserError if plain torch would make another step now than the server."""
        self._require_same_settings()
        self._require_same_parameters()
        missing = [parameter.grad is None for parameter in self._trained]
        had = self._had if self._had is not None else [not none for none in missing]
        for parameter, none, before, decays in zip(self._trained, missing, had, self._decayed, strict=True):
            if none and (decays or (before and self._remembers)):
                what = f"parameter {self._names[id(parameter)]} has no gradient in this step"
                why = "torch skips it, and the server steps it with a gradient of zero"
                instead = "call zero_grad(set_to_none=False), or leave the optimizer out and call session.step(loss)"
                raise UserError(f"{what}: {why}; {instead}")
            if self._counts_steps and self._pushed and not none and not before:
                what = f"parameter {self._names[id(parameter)]} gets its first gradient after steps without one"
                why = f"the server's {self._name} counts one number of steps for all"
                raise UserError(f"{what}, and {why}: leave the optimizer out and call session.step(loss)")
        self._had = [before or not none for before, none in zip(had, missing, strict=True)]
        self._pushed = True

    def _current_values(self) -> list[list[Any]]:
        groups = self._optimizer.param_groups
        return [[_number(group.get(setting)) for setting in self._watched] for group in groups]

    def _current_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _require_same_settings(self) -> None:
        values = self._current_values()
        if values == self._values:
            return
        if len(values) != len(self._values):
            what = f"optimizer {self._name}: {len(values)} parameter groups, and {len(self._values)} at first"
            raise UserError(f"{what}: the server keeps those; give all parameters from the start")
        for before, now in zip(self._values, values, strict=True):
            for setting, one, other in zip(self._watched, before, now, strict=True):
                if one != other:
                    what = f"optimizer {self._name}: {setting} was {one} at session.prepare(...) and is {other} now"
                    instead = "only lr may change; CyclicLR and OneCycleLR take cycle_momentum=False"
                    raise UserError(f"{what}, but the server keeps the first: {instead}")

    def _require_same_parameters(self) -> None:
        parameters = self._current_parameters()
        same = len(parameters) == len(self._parameters)
        if not same or any(now is not before for now, before in zip(parameters, self._parameters, strict=True)):
            what = f"optimizer {self._name}: its parameters are not those at session.prepare(...)"
            raise UserError(f"{what}: the server keeps those; give all parameters from the start")
        for parameter, needed in zip(parameters, self._needed, strict=True):
            if parameter.requires_grad != needed:
                what = f"parameter {self._names[id(parameter)]} has requires_grad={not needed} now"
                instead = "start another run from the saved weights to freeze or unfreeze layers"
                raise UserError(f"{what}, {needed} at session.prepare(...), and the server keeps that: {instead}")


def _number(value: Any) -> Any:
    """A setting without its tensors, which compare elementwise."""
    if isinstance(value, tuple | list):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) else value
