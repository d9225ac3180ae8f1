"""Nested inputs and targets: a tensor, or tuples and dicts of tensors, with samples along the first axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import UserError

Structure: TypeAlias = Any  # A tensor, None, or a tuple, list or dict of structures


def each(function: Callable[[Tensor], Any], data: Structure) -> Structure:
    """Apply `function` to each tensor; return the same structure.

    >>> each(lambda tensor: tensor.shape[0], {"ids": torch.zeros(3, 2), "pair": (torch.zeros(3), None)})
    {'ids': 3, 'pair': (3, None)}
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {name: each(function, part) for name, part in data.items()}
    if isinstance(data, tuple | list):
        parts = [each(function, part) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data


def tensors_of(data: Structure) -> list[Tensor]:
    """Return the tensors of a structure, in a fixed order."""
    found: list[Tensor] = []
    each(found.append, data)
    return found


def rows_of(data: Structure, rows: slice | Tensor) -> Structure:
    """Return the structure with only the samples `rows`."""
    return each(lambda tensor: tensor[rows], data)


def num_samples(data: Structure) -> int:
    """Return the number of samples."""
    return len(tensors_of(data)[0])


def require_samples(part: str, inputs: Structure, targets: Structure) -> None:
    """Raise UserError unless a data set holds tensors alone, each with one row per sample."""
    _require_tensors(part, (inputs, targets))
    counts = [len(tensor) if tensor.dim() else 0 for tensor in tensors_of(inputs)]
    if not counts:
        raise UserError(f"{part} data: the inputs hold no tensor; give a tensor, or a tuple or dict of tensors")
    if not any(counts):
        raise UserError(f"{part} data: the inputs have no rows; give at least one sample, along the first axis")
    if len(set(counts)) > 1:
        found = " and ".join(map(str, counts))
        raise UserError(f"{part} data: tensors of {found} inputs; give the same number for each")
    for tensor in tensors_of(targets):
        if not tensor.dim() or len(tensor) != counts[0]:
            count = len(tensor) if tensor.dim() else 0
            raise UserError(f"{part} data: {counts[0]} inputs but {count} targets; give one target per input")


def _require_tensors(part: str, data: Structure) -> None:
    """Raise UserError if a batch could not be taken from all of a structure, or would not be what indexing returns."""
    if isinstance(data, dict) and type(data).__getitem__ is not dict.__getitem__:
        what = f"{part} data: {type(data).__name__} has a __getitem__ of its own, which would not be called"
        raise UserError(f"{what}; give a plain dict of tensors")
    if isinstance(data, Mapping | tuple | list):
        for one in data.values() if isinstance(data, Mapping) else data:
            _require_tensors(part, one)
    elif data is not None and not isinstance(data, Tensor):
        raise UserError(f"{part} data: {type(data).__name__} among the tensors, which has no rows; give tensors alone")


def device_of(data: Structure) -> torch.device:
    """Return the device of the first tensor."""
    return tensors_of(data)[0].device


def outputs_of(model: nn.Module, inputs: Structure, tensors: dict[str, Tensor] | None = None) -> Any:
    """Call the model on `inputs` (a tuple as arguments, a dict as keywords), with `tensors` in place of its own."""
    if isinstance(inputs, Mapping):
        arguments, named = (), dict(inputs)
    else:
        arguments, named = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
    return model(*arguments, **named) if tensors is None else functional_call(model, tensors, arguments, named)
