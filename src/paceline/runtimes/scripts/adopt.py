"""Sort out what a script passes to `prepare`: models, optimizers, schedulers and data, and check that they fit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MethodType
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.features import OF_OPTIMIZER, SCRIPT_MAY_DECIDE
from paceline.settings.preprocessing import split_of

SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
ACCELERATE = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "DataLoaderShard": "base_dataloader",
}
"""What Accelerate makes of an object, and the attribute that holds it; the wrappers stay in use."""

UNNAMED = ("Dataset", "DatasetDict", "IterableDataset")  # of data libraries: classes that any data may have
MAX_NAME = 80  # characters of a name in the result


@dataclass(frozen=True)
class UserObjects:
    """The objects that a script passed to `prepare`, by kind, each in their order."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler | ReduceLROnPlateau]
    data: list[Any]

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that the server trains, by name: those of each optimizer in turn, else all that are trained.

        Tied parameters have their first name. With several models, names begin with the number of the model.
        """
        names = {id(p): name for name, p in self.container.named_parameters()}
        if not self.optimizers:
            return {name: p for name, p in self.container.named_parameters() if p.requires_grad}
        found: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self.optimizers):
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for place, parameter in enumerate(own):
                name = names.get(id(parameter), f"optimizer{number}.{place}")
                if name in found:
                    raise UserError(f"session.prepare(...): parameter {name} is in two optimizers: give it to one")
                if is_lazy(parameter):
                    what = f"session.prepare(...): parameter {name} has no shape yet"
                    raise UserError(f"{what}: run a batch through the model before")
                if not parameter.is_floating_point():
                    raise UserError(f"session.prepare(...): parameter {name} is {parameter.dtype}: train real floats")
                found[name] = parameter
        return found

    @property
    def container(self) -> nn.Module:
        """All models as one module."""
        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)

    def names(self) -> dict[str, str | None]:
        """The class names of the models and of the first data set, for the result; None if a class says nothing."""
        dataset: Any = self.data[0] if self.data else None
        while type(dataset).__module__.startswith("torch.utils.data") and hasattr(dataset, "dataset"):
            dataset = dataset.dataset  # of a DataLoader or a Subset
        kind = type(dataset)
        says_nothing = kind.__module__.split(".")[0] in ("builtins", "torch", "numpy") or kind.__name__ in UNNAMED
        models = " + ".join(type(model).__name__ for model in self.models)
        return {"model": models[:MAX_NAME], "dataset": None if says_nothing else kind.__name__[:MAX_NAME]}


def is_of_accelerate(thing: Any) -> bool:
    """Whether `accelerator.prepare` has wrapped this. Its loaders pretend to be others by `__class__`."""
    return type(thing).__module__.split(".")[0] == "accelerate"


def unwrapped(thing: Any) -> Any:
    """Return what Accelerate has wrapped, or the thing itself. Raise UserError for a wrapper that hides the steps."""
    if not is_of_accelerate(thing):
        return thing
    name = type(thing).__name__
    if name not in ACCELERATE:
        what = f"session.prepare(...): a {name} reads for all processes of Accelerate, and Paceline divides the data"
        instead = "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
        raise UserError(f"{what}: use {instead}")
    if getattr(thing, "scaler", None) is not None:
        what = "session.prepare(...): the scaler of Accelerate's fp16 calls the optimizer past the server"
        raise UserError(f"{what}: use mixed_precision='bf16', or torch.amp.GradScaler in the loop")
    return unwrapped(getattr(thing, ACCELERATE[name]))


def returned(things: tuple[Any, ...], data: list[Any], shared: Iterator[Any]) -> tuple[Any, ...]:
    """The script's objects, its `data` replaced by what is `shared`; inside Accelerate's loaders, if it has some."""
    found = []
    for thing in things:
        inner = unwrapped(thing)
        if any(inner is one for one in data):
            share = next(shared)
            if inner is thing:
                thing = share
            else:
                thing.base_dataloader = share
        found.append(thing)
    return tuple(found)


def number_process(worker: int) -> None:
    """Tell Accelerate, if the script uses it, that only worker 0 is its main process: the one that prints and saves."""
    states = sys.modules.get("accelerate.state")
    for kind in (states.PartialState, states.AcceleratorState) if states is not None else ():
        if kind._shared_state:
            kind._shared_state |= {"process_index": worker, "local_process_index": worker}


def sort_out(things: tuple[Any, ...]) -> UserObjects:
    """Sort the objects into models, optimizers, schedulers and data. Raise UserError if they do not fit together."""
    things = tuple(map(unwrapped, things))
    models = [getattr(thing, "_orig_mod", thing) for thing in things if isinstance(thing, nn.Module)]  # not compiled
    optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
    schedulers = [thing for thing in things if isinstance(thing, SCHEDULERS)]
    data = [thing for thing in things if not isinstance(thing, (nn.Module, Optimizer, *SCHEDULERS))]
    if not models:
        given = f"{type(things[0]).__name__}, ..." if things else ""
        raise UserError(f"session.prepare({given}): the first thing is the model, an nn.Module")
    for thing in data:
        if callable(getattr(thing, "step", None)):
            what = f"session.prepare(...): {type(thing).__name__} has a step() and is no torch optimizer or scheduler"
            raise UserError(f"{what}: give the torch optimizer that it wraps, and leave it out")
    if any(unwrapped(schedule.optimizer) not in optimizers for schedule in schedulers):
        raise UserError("session.prepare(...): the schedule belongs to another optimizer than the one given")
    found = UserObjects(models, optimizers, schedulers, data)
    known = {id(parameter) for model in models for parameter in model.parameters()}
    trained = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    if optimizers and not known & trained:
        what = f"session.prepare(...): {type(optimizers[0]).__name__} has no parameter of the model given"
        raise UserError(f"{what}: give the model that it trains")
    if not found.parameters():
        raise UserError("the model has no parameter that requires a gradient: there is nothing to train")
    return found


def require_agreement(settings: Mapping[str, Any], config: RunConfig, typed: frozenset[str]) -> None:
    """Raise UserError if the command line and the script disagree, or if a setting of the first would do nothing."""
    for name in (name for name in SCRIPT_MAY_DECIDE if name in typed):
        flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
        if name in settings and getattr(config, name) != settings[name]:
            raise UserError(f"{flag}, and the script itself says {settings[name]}: leave out one of the two")
        if name not in settings and "optimizer" in settings and name in OF_OPTIMIZER:
            what = "the script gives session.prepare(...) an optimizer, which has its own settings"
            instead = "clip in the loop" if name == "clip" else "set it there"
            raise UserError(f"{flag}: {what}: leave it out, and {instead}")


def require_data(config: RunConfig, typed: frozenset[str], steps: int | None, num_loaders: int) -> None:
    """Raise UserError if a setting is about data that the script does not hand over, or about its length twice."""
    asked = f"--split {config.split}" if split_of(config).kind not in ("iid", "full") else None
    asked = "--shard-weights" if config.shard_weights is not None else asked
    if asked is not None and not num_loaders:
        raise UserError(f"{asked}: the script gives session.prepare(...) no data to divide: leave it out")
    if "epochs" in typed and steps is not None:
        raise UserError(f"--epochs {config.epochs:g}, and the script says steps={steps}: leave out one of the two")


def require_numbers(epochs: Any, **counts: Any) -> None:
    """Raise UserError for an argument of `prepare` that is given and is no positive number; counts are whole."""
    kinds: dict[str, tuple[Any, type, str]] = {"epochs": (epochs, Real, "number")}
    kinds |= {name: (value, Integral, "whole number") for name, value in counts.items()}
    for name, (value, kind, what) in kinds.items():
        is_number = isinstance(value, kind)
        if value is not None and not (is_number and value > 0):
            raise UserError(f"session.prepare(..., {name}={value!r}): give a positive {what}")
    if epochs is not None and counts.get("steps") is not None:
        raise UserError(f"session.prepare(..., epochs={epochs}, steps={counts['steps']}): leave out one of the two")


def require_figures(figures: Mapping[str, Any]) -> None:
    """Raise UserError if what a script reports is no number."""
    for name, value in figures.items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise UserError(f"session.report({name}={value!r}): give a number, or a tensor of one element")


Place: TypeAlias = tuple[tuple[int, int], ...]
"""The pass of each loader, and how many of its batches were handed out."""


class FollowedScheduler:
    """A scheduler that was handed to `prepare`: counts its steps for the worker's next incarnation to go on there.

    They are counted from the state that the script loads into it, if it does. The next incarnation loads that too.
    While a loop runs through epochs that its predecessor has finished, `is_ignored` is true and steps do nothing.
    """

    def __init__(
        self, scheduler: LRScheduler | ReduceLROnPlateau, is_ignored: Callable[[], bool], where: Callable[[], Place]
    ) -> None:
        self.count, self._step = 0, cast(Callable[..., None], MethodType(type(scheduler).step, scheduler))
        self.can_go_on = not isinstance(scheduler, ReduceLROnPlateau)
        self._pushed_at: Place | None = None
        self._gone_on = 0  # steps that the predecessor had made, until the first push
        self._before: list[dict[str, Any]] = []  # the settings of the optimizer before these
        self._optimizer: Any = scheduler.optimizer
        self._following = self._usual = 0  # steps between a push and the next batch: after the last push, and usually

        kind = type(scheduler)

        def step(this: Any, *arguments: Any, **named: Any) -> None:
            if not is_ignored():
                self.count += 1
                self.can_go_on = self.can_go_on and not (arguments or named)
                self._following += where() == self._pushed_at
                kind.step(this, *arguments, **named)

        def load_state_dict(this: Any, state_dict: dict[str, Any]) -> None:
            for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
                group.update(before)
            kind.load_state_dict(this, state_dict)
            self.count = 0
            if self._gone_on:
                self._make_steps(self._gone_on)

        # In a class of its own: what is in the instance would be part of its `state_dict()`.
        calls = {"step": step, "load_state_dict": load_state_dict, "__module__": kind.__module__}
        scheduler.__class__ = type(kind.__name__, (kind,), calls)

    def count_after(self, place: Place) -> int:
        """The steps by the time the loop asks for its next batch, after the push at `place`.

        A loop that steps its schedule after every push will do so after this one; at the end of a pass, the next
        incarnation does it too.
        """
        if self._pushed_at is not None and [number for number, _ in place] == [number for number, _ in self._pushed_at]:
            self._usual = self._following
        self._pushed_at, self._following = place, 0
        self._gone_on, self._before = 0, []
        count = self.count + self._usual
        return count if self.can_go_on else -1 - count

    def go_on(self, count: int) -> None:
        """Make as many steps as the predecessor had made; one whose steps have arguments stays where it is."""
        self.can_go_on = self.can_go_on and count >= 0
        self._gone_on = count if count >= 0 else -1 - count
        groups = self._optimizer.param_groups
        self._before = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self._make_steps(self._gone_on)

    def _make_steps(self, count: int) -> None:
        self.count = count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it steps before its optimizer does
            for _ in range(count if self.can_go_on else 0):
                self._step()
