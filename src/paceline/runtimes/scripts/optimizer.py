"""A script's torch optimizer in its worker: `step()` becomes a push of gradients and settings to the server."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from paceline.core.own_loop.settings import Number
from paceline.core.own_loop.torch_optimizer import (
    GROUP,
    UNKEYED,
    OptimizerFailed,
    own_attributes,
    pack_state,
    unpack_places,
)
from paceline.errors import UserError
from paceline.interfaces import State

HOW = ("foreach", "fused", "capturable", "differentiable", "param_names")
"""Settings that choose how torch computes a step, which may differ in the server."""
MAX_OPTIMIZERS = 100
FUSED_ON_CPU = ("Adam", "AdamW", "SGD", "Adagrad")


def name_of(optimizer: Optimizer) -> str:
    """The optimizer as messages name it."""
    return type(optimizer).__name__


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether the rules with momentum of their own can replace this optimizer: SGD with one classical momentum."""
    groups = optimizer.param_groups
    return type(optimizer) is SGD and all(
        not (group["nesterov"] or group["dampening"] or group["maximize"])
        and float(group["momentum"]) == float(groups[0]["momentum"])
        for group in groups
    )


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Convert what the run's config can say of an optimizer. Its settings themselves come with every push."""
    groups = optimizer.param_groups
    lr = max(float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups)
    settings: dict[str, Any] = {"optimizer": "sgd" if is_plain_sgd(optimizer) else "script"}
    if lr > 0:
        settings["lr"] = lr
    if is_plain_sgd(optimizer):
        settings["momentum"] = float(groups[0]["momentum"])
    return settings


def require_servable(optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer that a server cannot step."""
    name = name_of(optimizer)
    if isinstance(optimizer, SparseAdam):
        raise UserError(
            f"optimizer {name} steps single rows, which no push brings: use Adam, or Adagrad with sparse=True"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        what = "evaluates the loss several times in a step, and a server has no loss"
        raise UserError(f"optimizer {name} {what}: train it alone ('python script.py'), or use another optimizer")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UserError(f"optimizer {name}: differentiable=True needs its steps in this process: leave it out")
    if "<locals>" in type(optimizer).__qualname__:
        raise UserError(
            f"optimizer {name} is defined inside a function: the server imports it, so define it in a module"
        )


def describe(optimizer: Optimizer) -> dict[str, Any]:
    """What the server needs to make an optimizer of the same class with the same settings, as JSON values."""
    kind, found = type(optimizer), own_attributes(optimizer)
    attributes = {name: value for name, value in found.items() if not name.startswith(("_step_supports", "found_inf"))}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    for group in (*groups, defaults := dict(optimizer.defaults)):
        group.pop("param_names", None)
        if "capturable" in group:
            group["capturable"] = False
        if group.get("fused") and kind.__name__ not in FUSED_ON_CPU:
            group["fused"] = None
    facts = {"module": kind.__module__, "name": kind.__qualname__, "attributes": attributes}
    return {key: _as_json(kind, key, value) for key, value in {**facts, "defaults": defaults, "groups": groups}.items()}


def _as_json(kind: type, name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_plain_number, allow_nan=False))
    except (TypeError, ValueError):
        short = " ".join(f"{value!r:.200}".split())  # an optimizer inside another is shown on many lines
        what = f"optimizer {kind.__name__}: its {name} hold a value that is no number or text ({short})"
        raise UserError(f"{what}: the server makes an optimizer of the same settings, so give it plain ones") from None


def _plain_number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(type(value).__name__)


def _multiply(gradients: list[Tensor], factor: Tensor) -> None:
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(float(factor))


class StateElsewhere(defaultdict[Any, Any]):
    """The empty state of an optimizer whose state is in the server. Reading or changing it calls `refuse` first."""

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


class PushStep(Protocol):
    """Pushes the gradients in place of a step. `scale`: they are multiplied by it; `skipped`: they are infinite."""

    def __call__(self, number: int, loss: Any, scale: float | None, skipped: bool) -> None: ...


class AdoptedOptimizer:
    """A user's optimizer after `prepare`: its state is in the server, its settings go there with every push."""

    def __init__(self, optimizer: Optimizer, number: int = 0) -> None:
        """`number` is its place among the optimizers of the script."""
        require_servable(optimizer)
        self.number = number
        self.optimizer, self.name = optimizer, name_of(optimizer)
        self.description = describe(optimizer)
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.initial_state = dict(optimizer.state)  # what the user has loaded
        self.numbers: list[Number] = []
        self._fixed: list[tuple[int, str, Any]] = []
        for place, group in enumerate(optimizer.param_groups):
            for setting, value in group.items():
                if setting != "params" and setting not in HOW:
                    self._add_setting(place, setting, value)
        self._ids = [id(parameter) for parameter in self.parameters]
        self._pushed = False

    def _add_setting(self, group: int, setting: str, value: Any) -> None:
        if isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            self.numbers.append(Number(group, setting))
        elif (
            isinstance(value, tuple | list) and value and all(isinstance(part, int | float | Tensor) for part in value)
        ):
            self.numbers += [Number(group, setting, index) for index in range(len(value))]
        else:
            self._fixed.append((group, setting, value))

    @property
    def group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def settings(self) -> list[float]:
        """The settings now, in the order of `numbers`. Raise UserError for a change that the server cannot follow."""
        groups = self.optimizer.param_groups
        if [id(parameter) for group in groups for parameter in group["params"]] != self._ids:
            what = f"optimizer {self.name}: its parameters or groups are not those at session.prepare(...)"
            instead = "give all from the start, and freeze those that wait with requires_grad_(False)"
            raise UserError(f"{what}, which the server keeps: {instead}")
        for number, setting, value in self._fixed:
            if groups[number].get(setting) != value:
                what = f"optimizer {self.name}: {setting} was {value} at session.prepare(...)"
                raise UserError(f"{what} and is {groups[number].get(setting)} now: only numbers may change")
        return [
            float(groups[group][setting] if index is None else groups[group][setting][index])
            for group, setting, index in self.numbers
        ]

    def set_rates(self, settings: list[float]) -> None:
        """Put the learning rates where they were at the predecessor's last push."""
        for (group, setting, _), value in zip(self.numbers, settings, strict=True):
            if setting == "lr":
                self.optimizer.param_groups[group]["lr"] = value

    def take_over(self, push: PushStep, read_state: Callable[[int], State], begun: bool) -> None:
        """Replace `step()` by a push, in place: schedulers and scalers keep their reference.

        In a run that goes on (`begun`), a scheduler may step through finished epochs before the first push.
        """
        optimizer = self.optimizer
        optimizer._opt_called = begun  # type: ignore[attr-defined]  # read by a scheduler

        def step(this: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            infinite, scale = getattr(this, "found_inf", None), getattr(this, "grad_scale", None)
            self._pushed = True
            push(self.number, loss, None if scale is None else float(scale), infinite is not None and bool(infinite))
            this._opt_called = True  # type: ignore[attr-defined]
            return loss

        hooked = Optimizer.profile_hook_step(step)  # calls the hooks that are registered with the optimizer
        divides = getattr(optimizer, "_step_supports_amp_scaling", False)  # as fused ones do, also in plain torch

        def unscaled(this: Optimizer, *arguments: Any, **named: Any) -> Any:
            """A GradScaler divides the gradients before the step and its hooks, or calls neither."""
            scale = getattr(this, "grad_scale", None)
            if not divides and bool(getattr(this, "found_inf", False)):
                self._pushed = True
                return push(self.number, None, None, True)
            if not divides and scale is not None:
                _multiply([p.grad for p in self.parameters if p.grad is not None], scale.double().reciprocal().float())
                this.grad_scale = None  # type: ignore[attr-defined]
            return hooked(this, *arguments, **named)

        unscaled._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a scheduler warns, or wraps it again
        optimizer.step = MethodType(unscaled, optimizer)  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        # So a GradScaler calls step() also if it skips the step, and says so in `found_inf`: the server must know.
        self._guard_state(optimizer, read_state)

    def _guard_state(self, optimizer: Optimizer, read_state: Callable[[int], State]) -> None:
        """Read the state from the server, and refuse to change what is not here. Before the first push it is empty."""
        read, load = optimizer.state_dict, optimizer.load_state_dict
        where = "the optimizer's state is in the server"

        def state_dict() -> dict[str, Any]:
            places = unpack_places(read_state(self.number))
            optimizer.state = defaultdict(dict, self._as_torch(places))
            try:
                found = read()
            finally:
                optimizer.state = StateElsewhere(refuse)
            for number, group in enumerate(found["param_groups"]):
                group.update(places.get(f"{GROUP}{number}", {}))
            return found

        def load_state(state_dict: dict[str, Any]) -> None:
            if self._pushed or state_dict.get("state"):
                raise UserError(f"{self.name}.load_state_dict(...) after session.prepare(...): {where}; load it before")
            load(state_dict)
            optimizer.state = StateElsewhere(refuse)  # torch has put another there

        def refuse() -> None:
            if self._pushed:
                what = f"{self.name}.state was read or changed after session.prepare(...): {where}"
                instead = "what else needs it (train() and eval() of a schedule-free optimizer) trains only alone"
                raise UserError(f"{what}; {self.name}.state_dict() reads it; {instead}")

        optimizer.state = StateElsewhere(refuse)
        optimizer.state_dict = state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = load_state  # type: ignore[method-assign]

    def release(self, state: dict[str, Any]) -> None:
        """Keep this state here from now on: training is over, and the server ends."""
        del self.optimizer.state_dict, self.optimizer.load_state_dict  # the class has its own
        self.optimizer.state = defaultdict(dict)
        self.optimizer.load_state_dict(state)

    def _as_torch(self, places: Mapping[str, dict[str, Any]]) -> dict[Any, Any]:
        numbers = sorted(int(place) for place in places if place.isdecimal())
        return {**{self.parameters[number]: places[str(number)] for number in numbers}, **places.get(UNKEYED, {})}

    def packed_state(self) -> State:
        """The state that the user had loaded before `prepare`, as the server keeps it."""
        places: dict[int | str, dict[Any, Any]] = {
            number: self.initial_state.get(parameter, {}) for number, parameter in enumerate(self.parameters)
        }
        places[UNKEYED] = {key: value for key, value in self.initial_state.items() if isinstance(key, str)}
        try:
            packed = [pack_state(place, name, value) for place, kept in places.items() for name, value in kept.items()]
        except OptimizerFailed as error:
            raise UserError(f"optimizer {self.name}: {error}") from None
        return {key: tensor.detach().cpu() for key, tensor in packed}


def join_states(states: Sequence[State]) -> State:
    """The states of several optimizers under one set of names, for one file."""
    return {f"{number}/{name}": tensor for number, state in enumerate(states) for name, tensor in state.items()}


def split_states(joined: Mapping[str, Tensor]) -> list[State]:
    """The inverse of `join_states`.

    >>> split_states(join_states([{}, {"a": torch.ones(1)}]))
    [{}, {'a': tensor([1.])}]
    """
    found: list[State] = []
    for name, tensor in joined.items():
        number, _, rest = name.partition("/")
        if not number.isdecimal() or int(number) >= MAX_OPTIMIZERS:
            raise ValueError(f"a state of optimizer {number[:20]}")
        found += [{} for _ in range(int(number) + 1 - len(found))]
        found[int(number)][rest] = tensor
    return found
