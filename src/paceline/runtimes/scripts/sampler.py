"""The batches of a user's own loop, by number, until training is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from paceline.data.sampler import Batches
from paceline.errors import UserError
from paceline.tasks.nested import each


class BatchConsumer(Protocol):
    """What the batches need from their session."""

    finished: bool
    stepped: bool

    @property
    def batch_number(self) -> int: ...

    @property
    def step_number(self) -> int: ...

    def next_batch(self, number: int, samples: int, parts: int) -> None: ...

    def next_part(self) -> None: ...


class AddressedBatches:
    """This worker's batches. Tensor data sets are indexed as whole tensors, without per-item Python.

    With `in_epochs`, each iteration is one pass over this worker's data. Accumulated batches come in `parts`.
    """

    def __init__(
        self,
        session: BatchConsumer,
        dataset: Any,
        batches: Batches,
        collate: Callable[[list[Any]], Any] | None = None,
        in_epochs: bool = False,
        parts: int = 1,
    ) -> None:
        self._session, self._dataset, self._batches = session, dataset, batches
        self._collate, self._in_epochs, self._parts = collate, in_epochs, parts
        self._passes = 0

    def __len__(self) -> int:
        """The number of batches (or parts of batches) in one pass over this worker's data."""
        return self._batches.per_epoch * self._parts

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        last = self._passes * self._batches.per_epoch if self._in_epochs else None
        while not self._session.finished and (last is None or self._session.step_number < last):
            number = self._session.batch_number
            indices = self._batches.indices(number)
            parts = np.array_split(indices, self._parts)
            self._session.next_batch(number, len(indices), len(parts))
            for part in parts:
                self._session.next_part()
                yield self._fetch(part)
            if not self._session.stepped:
                call = "call it (or the step() of the optimizer you passed) once for every batch"
                several = "to step after several, session.prepare(..., accumulate=N)"
                raise UserError(f"a batch was taken but session.step() was not called: {call}; {several}")

    def _fetch(self, indices: np.ndarray[Any, Any]) -> Any:
        if self._collate in (None, default_collate):
            rows = torch.from_numpy(indices)
            if isinstance(self._dataset, TensorDataset):
                return [tensor.index_select(0, rows) for tensor in self._dataset.tensors]
            if isinstance(self._dataset, Mapping):
                return each(lambda tensor: tensor.index_select(0, rows), self._dataset)
        collate = self._collate or default_collate
        return collate([self._dataset[int(index)] for index in indices])


def targets_of(dataset: Any) -> Any:
    """The class numbers of a data set, if it has them."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return dataset.tensors[1]
    targets = dataset.get("labels") if isinstance(dataset, Mapping) else getattr(dataset, "targets", None)
    return torch.as_tensor(targets) if isinstance(targets, list | np.ndarray) else targets
