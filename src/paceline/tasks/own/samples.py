"""From what the user gives as data to tensors in memory: a pair, a map-style `Dataset`, or a `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.errors import UserError
from paceline.system.memory import require_memory
from paceline.tasks.nested import Structure, each, require_samples, tensors_of

CHUNK = 256  # samples that are read and collated at once
READ_TWICE = 16  # samples that are compared with a second reading: a random flip leaves all alike once in 65,536

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Samples:
    """Inputs and targets in memory, and what the user's loader said about batches."""

    pair: tuple[Structure, Structure]
    batch_size: int | None = None  # of the loader, if one was given
    shuffles: bool = True


def read_samples(part: str, given: Any) -> Samples:
    """Return the samples of `given`; raise UserError, which names the `part`, if they are none."""
    batch_size, shuffles = None, True
    if isinstance(given, DataLoader):
        batch_size, shuffles = given.batch_size, isinstance(given.sampler, RandomSampler)
        pair = _of_dataset(part, *_dataset_of(part, given))
    elif isinstance(given, tuple | list) and len(given) == 2:
        pair = _as_tensors(part, given[0]), _as_tensors(part, given[1])
    else:
        pair = _of_dataset(part, given, default_collate)
    require_samples(part, *pair)
    return Samples(pair, batch_size, shuffles)


def require_alike(train: tuple[Structure, Structure], test: tuple[Structure, Structure]) -> None:
    """Raise UserError if test and train data differ in structure, type or number of axes; sizes may differ."""
    for what, ours, theirs in zip(("inputs", "targets"), train, test, strict=True):
        if _kind(ours) != _kind(theirs):
            raise UserError(
                f"the train {what} are {describe(ours)}, the test {what} {describe(theirs)}: give both the same "
                "structure, type and number of axes"
            )


def describe(data: Structure) -> str:
    """Return types and shapes in words.

    >>> describe((torch.zeros(4, 2), {"y": torch.zeros(4, dtype=torch.int64)}))
    '(float32 [4, 2], {y: int64 [4]})'
    """
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{name}: {describe(one)}" for name, one in data.items()) + "}"
    if isinstance(data, tuple | list):
        return "(" + ", ".join(map(describe, data)) + ")"
    return type(data).__name__


def _kind(data: Structure) -> Any:
    kinds = each(lambda tensor: (tensor.dtype, tensor.dim()), data)
    return repr(list(kinds) if isinstance(kinds, tuple) else kinds)


def _as_tensors(part: str, data: Any) -> Structure:
    """Replace arrays of numpy by tensors."""
    if isinstance(data, np.ndarray):
        try:
            return torch.as_tensor(data.copy() if not data.flags.writeable else np.ascontiguousarray(data))
        except TypeError:
            raise UserError(f"{part} data: an array of {data.dtype}; give an array of numbers") from None
    if type(data) is dict:
        return {name: _as_tensors(part, one) for name, one in data.items()}
    if type(data) in (tuple, list):
        return type(data)(_as_tensors(part, one) for one in data)
    return data


def _dataset_of(part: str, loader: DataLoader[Any]) -> tuple[Any, Collate]:
    """Return the data set of a loader and its collate function; refuse a loader whose batches would be others."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset, loader.collate_fn  # refused below
    sampler, why = loader.sampler, None
    if loader.batch_size is None:
        why = "has its own batch_sampler or none"
    elif type(sampler) not in (RandomSampler, SequentialSampler):
        why = f"draws with {type(sampler).__name__}"
    elif isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):  # type: ignore[arg-type]
        why = "draws with replacement, or not all samples"
    elif loader.drop_last:
        why = "has drop_last=True"
    if why is not None:
        raise UserError(
            f"{part} data: the DataLoader {why}, and Paceline makes the batches of a Task itself: give its dataset, or "
            "keep the loader in your own loop with paceline.join()"
        )
    return loader.dataset, loader.collate_fn


def _of_dataset(part: str, dataset: Any, collate: Collate) -> tuple[Structure, Structure]:
    """Read all samples of a map-style data set once."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UserError(f"{part} data: {name} is a stream, and a Task needs all samples: use it with paceline.join()")
    plain = isinstance(dataset, tuple | Mapping | str | Tensor | np.ndarray)
    if plain or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        found = f"a tuple of {len(dataset)}" if isinstance(dataset, tuple) else name
        raise UserError(f"{part} data: {found}; give a pair (inputs, targets), a Dataset or a DataLoader")
    if not len(dataset):
        raise UserError(f"{part} data: {name} has no samples; is its path or its filter right?")
    if type(dataset) is TensorDataset and collate is default_collate:
        return _split(part, dataset.tensors)
    first = _collated(part, dataset, collate, range(min(READ_TWICE, len(dataset))))
    again = _collated(part, dataset, collate, range(min(READ_TWICE, len(dataset))))
    for one, other in zip(tensors_of(first), tensors_of(again), strict=True):
        if one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num()):
            raise UserError(
                f"{part} data: samples of {name} differ from one reading to the next (a random transform?), but they "
                "are read once: leave it out of the data set, and give augment=, a function of (inputs, key)"
            )
    total = len(dataset)
    nbytes = sum(tensor.nbytes for tensor in tensors_of(first)) * total // min(READ_TWICE, total)
    require_memory(nbytes, f"{part} data {name} of a process", "memory")
    whole = each(lambda tensor: torch.empty((total, *tensor.shape[1:]), dtype=tensor.dtype), first)
    for start in range(0, total, CHUNK):
        rows = range(start, min(start + CHUNK, total))
        read = tensors_of(_collated(part, dataset, collate, rows))
        for place, tensor in zip(tensors_of(whole), read, strict=True):
            if (len(rows), *place.shape[1:]) != tuple(tensor.shape) or tensor.dtype != place.dtype:
                raise _uneven(part, name, f"{describe(place[0])} and {describe(tensor[0])}")
            place[rows.start : rows.stop] = tensor
    return _split(part, whole)


def _collated(part: str, dataset: Dataset[Any], collate: Collate, rows: range) -> Structure:
    """Read some samples and make a batch of them."""
    name, samples = type(dataset).__name__, [dataset[row] for row in rows]
    try:
        batch = collate(samples)
    except (TypeError, RuntimeError, ValueError) as error:
        shapes = list(dict.fromkeys(describe(_as_tensors(part, sample)) for sample in samples))
        if len(shapes) > 1:
            raise _uneven(part, name, f"{shapes[0]} and {shapes[1]}") from error
        what = f"a sample of {name} is {shapes[0]}, of which no batch can be made"
        raise UserError(f"{part} data: {what}: let its transform return tensors or numbers") from error
    if (found := {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)}) - {len(rows)}:
        what = f"{len(rows)} samples of {name} make a batch of {min(found - {len(rows)})} rows"
        raise UserError(f"{part} data: {what}: collate_fn must give each sample one row")
    return batch


def _uneven(part: str, name: str, found: str) -> UserError:
    return UserError(f"{part} data: samples of {name} differ ({found}): pad or crop them to one shape and type")


def _split(part: str, batch: Structure) -> tuple[Structure, Structure]:
    """Split a batch into inputs and targets; a dict or a single tensor has no targets."""
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) > 2:
        what = f"samples have {len(batch)} parts, and which are targets is not said"
        raise UserError(f"{part} data: {what}: let them be pairs (input, target), with a tuple or dict of inputs")
    return batch[0], batch[1] if len(batch) == 2 else None
