"""Sort out what a script passes to `prepare`: model, data, optimizer and schedule, and the settings that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runtimes.scripts.draws import LoaderOrder, order_of
from paceline.tasks.nested import num_samples, require_samples

SCHEDULES = (LRScheduler, ReduceLROnPlateau)
DEFAULT_BATCH = 32


@dataclass(frozen=True)
class UserObjects:
    """The objects that a script passed to `prepare`, by kind."""

    model: nn.Module
    data: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    optimizer: Optimizer | None
    order: LoaderOrder | None  # of a loader, which a script iterates once per epoch; None: the data came without one
    columns: bool  # whether the data is a dict of tensors with a row per sample, not a collection of samples

    @property
    def num_samples(self) -> int:
        """The number of samples in the data."""
        return num_samples(self.data) if self.columns else len(self.data)

    @property
    def parameters(self) -> set[int]:
        """The ids of the parameters that the optimizer steps."""
        assert self.optimizer is not None
        return _parameters_of(self.optimizer)


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def sort_out(model: Any, things: tuple[Any, ...], batch_size: int | None) -> UserObjects:
    """Sort the objects into model, data, optimizer and schedule. Raise UserError if they do not fit together."""
    if not isinstance(model, nn.Module):
        raise UserError(f"session.prepare({type(model).__name__}, ...): the first thing is the model, an nn.Module")
    optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
    schedules = [thing for thing in things if isinstance(thing, SCHEDULES)]
    data = [thing for thing in things if not isinstance(thing, (Optimizer, *SCHEDULES))]
    if len(data) != 1 or len(optimizers) > 1:
        what = f"session.prepare(...) was given {len(data)} data sets or loaders and {len(optimizers)} optimizers"
        raise UserError(f"{what}: give what you train on, once, and at most one optimizer")
    optimizer = optimizers[0] if optimizers else None
    if any(schedule.optimizer is not optimizer for schedule in schedules):
        raise UserError("session.prepare(...): the schedule belongs to another optimizer than the one given")
    if optimizer is not None and not _parameters_of(optimizer) <= {id(parameter) for parameter in model.parameters()}:
        raise UserError("session.prepare(...): the optimizer has parameters that the model has not: give the model's")
    return _with_data(model, data[0], batch_size, optimizer)


def _with_data(model: nn.Module, data: Any, batch_size: int | None, optimizer: Optimizer | None) -> UserObjects:
    if not isinstance(data, DataLoader):
        if isinstance(data, tuple) and all(isinstance(part, torch.Tensor) for part in data):
            data = TensorDataset(*data)
        if isinstance(data, Mapping) and type(data) is not dict:
            what = f"session.prepare(...): {type(data).__name__} is a mapping, but not a plain dict"
            raise UserError(f"{what}: give dict(data) if its tensors have a row per sample, else a DataLoader over it")
        size = DEFAULT_BATCH if batch_size is None else batch_size
        return UserObjects(model, data, size, None, optimizer, None, _are_columns(data))
    order = order_of(data)
    if batch_size is not None and batch_size != order.batch_size:
        found = order.batch_size or f"{order.name}, which makes batches itself"
        raise UserError(f"session.prepare(...): batch_size={batch_size}, and the loader has {found}: leave it out")
    if _are_columns(data.dataset):
        what = "session.prepare(...): a DataLoader over a dict of tensors looks for samples 0, 1, ... among its keys"
        raise UserError(f"{what}: give the dict itself, with batch_size=N")
    return UserObjects(model, data.dataset, order.batch_size or 0, data.collate_fn, optimizer, order, columns=False)


def _are_columns(data: Any) -> bool:
    """Whether data is a plain dict of tensors with a row per sample. Raise UserError if it has no numbered samples."""
    if type(data) is dict and any(isinstance(key, str) for key in data):
        require_samples("session.prepare(...): training", data, None)
        return True
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        what = f"session.prepare(...): {type(data).__name__} has no length or cannot be indexed"
        why = "Paceline assigns samples by number"
        raise UserError(f"{what}; {why}: give a map-style data set, tensors, or a DataLoader over one")
    return False


def require_agreement(settings: Mapping[str, Any], config: RunConfig, typed: frozenset[str]) -> None:
    """Raise UserError if the command line and the script disagree."""
    for name, value in settings.items():
        if name in typed and getattr(config, name) != value:
            flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
            raise UserError(f"{flag}, and the script itself says {value}: leave out one of the two")
