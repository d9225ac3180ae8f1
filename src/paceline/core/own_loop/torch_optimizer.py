"""Any torch optimizer as the server's: an instance of the user's class steps views of the flat weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.core.own_loop.settings import LoopLayout
from paceline.interfaces import Layout, State

MakeOptimizer: TypeAlias = Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]
"""Makes an optimizer over the parameters of each group."""
PREFIX = "optimizer."
"""The state of parameter i is at `optimizer.i.NAME`. The optimizer makes it with its first steps, not in `start`."""
GROUP, SELF, UNKEYED = "group", "self", "state"
"""What belongs to no parameter: a value that the optimizer changes in group i is at `optimizer.groupi.NAME`, one of
its attributes at `optimizer.self.NAME`, and what `optimizer.state` has under a name at `optimizer.state.NAME`."""
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_KINDS = ("json", *(kind.__name__ for kind in _NUMBERS))
MAX_VIEWED = 256  # gradients whose views are remembered: one per worker and the mean of a round


class OptimizerFailed(Exception):
    """A user's optimizer cannot step in the server: it raises an error, or keeps what no checkpoint can hold."""


def pack_state(place: int | str, name: str, value: Any) -> tuple[str, Tensor]:
    """Return the key and the tensor for one value of a parameter's state. Raise OptimizerFailed if it cannot be saved.

    >>> pack_state(3, "step", 7)
    ('optimizer.3.step:int', tensor(7))
    """
    key = f"{PREFIX}{place}.{name}"
    if isinstance(value, Tensor):
        return key, value
    if type(value) in _NUMBERS:
        return f"{key}:{type(value).__name__}", torch.tensor(value, dtype=_NUMBERS[type(value)])
    try:
        text = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError):
        what = f"the optimizer's state '{name}' is a {type(value).__name__}"
        instead = "the server saves tensors and JSON values: keep only these in its state"
        raise OptimizerFailed(f"{what}; {instead}") from None
    return f"{key}:json", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unpack_places(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return all values by their place, as a text; the inverse of `pack_state`."""
    found: dict[str, dict[str, Any]] = {}
    for key, tensor in state.items():
        if not key.startswith(PREFIX):
            continue
        place, _, rest = key.removeprefix(PREFIX).partition(".")
        name, _, kind = rest.rpartition(":")
        value: Any = tensor
        if kind in _KINDS and name:
            rest, value = name, json.loads(tensor.numpy().tobytes()) if kind == "json" else tensor.item()
        found.setdefault(place, {})[rest] = value
    return found


def unpack_state(state: Mapping[str, Tensor]) -> dict[int, dict[str, Any]]:
    """Return each parameter's state by the number of the parameter.

    >>> unpack_state(dict([pack_state(3, "step", 7), pack_state(3, "tag", [1, None])]))
    {3: {'step': 7, 'tag': [1, None]}}
    """
    return {int(place): values for place, values in unpack_places(state).items() if place.isdecimal()}


@cache
def _inherited_names() -> frozenset[str]:
    return frozenset(vars(torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {})))


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps in attributes that torch's base class does not have; no functions."""
    inherited = _inherited_names()
    return {name: value for name, value in vars(optimizer).items() if name not in inherited and not callable(value)}


class TorchOptimizer:
    """Steps as plain torch does, bit for bit, with the settings that the loop of the pushing worker has now.

    The state is in the server's `State`; if that has others than the optimizer made (a checkpoint, a state that the
    user had loaded), the optimizer takes them over at its next step. `lr` multiplies the learning rate of each group.
    """

    def __init__(self, make: MakeOptimizer, layout: Layout, loop: LoopLayout, initial: State | None = None) -> None:
        self._make, self._layout, self._loop, self._initial = make, layout, loop, initial or {}
        self._settings: list[float] = []
        self._lrs: list[float] = []
        self._has_gradient: Sequence[float] = ()
        self._viewed: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by address of a gradient, which is kept alive
        self._known: dict[str, Tensor] = {}  # the state as the optimizer has it

    def start(self, weights: Tensor) -> State:
        with torch.inference_mode(False):
            views = self._layout.views(weights).values()
            self._parameters = [nn.Parameter(view, requires_grad=True) for view in views]
            groups = [[self._parameters[number] for number in group] for group in self._loop.groups]
            self._optimizer = self._make(groups)
        self._lrs = [float(group.get("lr", 1.0)) for group in self._optimizer.param_groups]
        self._has_gradient = [1.0] * len(self._parameters)
        return {name: tensor.clone() for name, tensor in self._initial.items()}

    def follow(self, settings: Sequence[float], has_gradient: Sequence[float]) -> None:
        """Use the settings of a worker's loop for the next step."""
        self._has_gradient = has_gradient
        if settings == self._settings:
            return
        before: Sequence[float | None] = self._settings or [None] * len(settings)
        self._settings = list(settings)
        groups = self._optimizer.param_groups
        for (number, setting, index), value, last in zip(self._loop.numbers, settings, before, strict=True):
            group = groups[number]
            if value == last:
                continue  # the optimizer may have changed it itself
            if setting == "lr":
                self._lrs[number] = value
            elif index is None:
                group[setting] = _as_kind(group[setting], value)
            else:
                parts = list(group[setting])
                parts[index] = _as_kind(parts[index], value)
                group[setting] = type(group[setting])(parts)

    def step(self, weights: Tensor, state: State, gradient: Tensor, lr: Tensor) -> None:
        factor = float(lr)
        with torch.inference_mode(False), torch.no_grad():
            if not self._knows(state):
                self._take_over(state)
            rates = [value * factor for value in self._lrs]
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            before = self._others()
            for parameter, view, flag in zip(self._parameters, self._views(gradient), self._has_gradient, strict=True):
                parameter.grad = view if flag else None
            try:
                self._optimizer.step()
            except Exception as error:
                raise OptimizerFailed(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
            if [group["lr"] for group in self._optimizer.param_groups] != rates:
                what = "it changes its learning rate in step(), and the server uses that of your loop"
                raise OptimizerFailed(f"{what}: use a scheduler instead")
            self._write_back(state, before)

    def _others(self) -> dict[str, dict[str, Any]]:
        """What belongs to no parameter and may change in a step: settings of groups, attributes, other state."""
        optimizer = self._optimizer
        groups = {f"{GROUP}{number}": dict(group) for number, group in enumerate(optimizer.param_groups)}
        for group in groups.values():
            del group["params"], group["lr"]
        state: Mapping[Any, Any] = optimizer.state
        unkeyed = {key: value for key, value in state.items() if isinstance(key, str)}
        return {**groups, SELF: own_attributes(optimizer), UNKEYED: unkeyed}

    def _views(self, gradient: Tensor) -> list[Tensor]:
        known = self._viewed.get(gradient.data_ptr())
        if known is None:
            if len(self._viewed) >= MAX_VIEWED:
                self._viewed.clear()
            views = list(self._layout.views(gradient).values())
            known = self._viewed[gradient.data_ptr()] = gradient, views
        return known[1]

    def _knows(self, state: State) -> bool:
        """Whether the optimizer has the server's state: all of it, and nothing else."""
        keys = [key for key in state if key.startswith(PREFIX)]
        return len(keys) == len(self._known) and all(self._known.get(key) is state[key] for key in keys)

    def _take_over(self, state: State) -> None:
        """Give the optimizer the state that the server has. Tensors are shared, so that steps change both."""
        optimizer = self._optimizer
        kept: dict[Any, Any] = optimizer.state
        kept.clear()
        for place, values in unpack_places(state).items():
            if place.isdecimal():
                kept[self._parameters[int(place)]] = values
            elif place == SELF:
                vars(optimizer).update(values)
            elif place == UNKEYED:
                kept.update(values)
            else:
                optimizer.param_groups[int(place.removeprefix(GROUP))].update(values)
        self._known = {key: tensor for key, tensor in state.items() if key.startswith(PREFIX)}

    def _write_back(self, state: State, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Put what the optimizer has made or replaced into the server's state."""
        optimizer = self._optimizer
        for place, values in self._others().items():
            for name, value in values.items():
                if name not in before[place] or _may_differ(value, before[place][name]):
                    self._write(place, name, value, state)
        for number, parameter in enumerate(self._parameters) if optimizer.state else ():
            for name, value in optimizer.state.get(parameter, {}).items():
                self._write(number, name, value, state)

    def _write(self, place: int | str, name: str, value: Any, state: State) -> None:
        known = self._known
        if isinstance(value, Tensor) and known.get(f"{PREFIX}{place}.{name}") is value:
            return
        key, packed = pack_state(place, name, value)
        if key not in known:
            self._forget(f"{PREFIX}{place}.{name}", state)
        known[key] = state[key] = packed

    def _forget(self, key: str, state: State) -> None:
        """Remove a value that was of another kind: a number that becomes a fraction, a None that becomes a tensor."""
        for stale in (key, *(f"{key}:{kind}" for kind in _KINDS)):
            self._known.pop(stale, None)
            state.pop(stale, None)


def _may_differ(value: Any, before: Any) -> bool:
    """Whether a value has changed in a step; a list, a dict or a tensor may have changed in place."""
    return isinstance(value, list | dict | Tensor) or (value is not before and value != before)


def _as_kind(before: Any, value: float) -> Any:
    """A setting of the kind that it had; a whole number (`momentum=0`) may become a fraction."""
    return value if isinstance(before, int) and not value.is_integer() else type(before)(value)
