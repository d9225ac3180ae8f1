"""The order of shuffled data: it is divided over the workers, and each shuffles its shard again for every pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from paceline.assembly.task import class_labels
from paceline.assembly.work import divide_work
from paceline.config import RunConfig
from paceline.runtimes.scripts.loading.divisions import Divisions
from paceline.runtimes.scripts.loading.facts import MAX_SAMPLES, DataFacts
from paceline.settings.preprocessing import split_of
from paceline.tasks.nested import Structure, num_samples, rows_of


class Columns(Dataset[Any]):
    """A dict of tensors as a data set: sample k has row k of each."""

    def __init__(self, columns: dict[str, Structure]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return num_samples(self.columns)

    def __getitem__(self, number: int) -> Any:
        return rows_of(self.columns, torch.tensor(number))


class ShuffledOrder:
    """One worker's batches of a loader with `shuffle=True`, or of data without a loader."""

    is_stateless = True

    def __init__(
        self, dataset: Any, batch_size: int | None, drop_last: bool, config: RunConfig, divisions: Divisions
    ) -> None:
        size = batch_size or 1  # None: the data set makes a batch of each number
        config = replace(config, batch_size=size)
        labels = class_labels(targets_of(dataset), len(dataset), config)
        self._work = work = divide_work(labels, config, size if drop_last else 1)
        self._config, self._divisions = config, divisions
        shards = [work.batches(number, config) for number in range(config.workers or 1)]
        self._division, self._batches = divisions.newest, work.batches(divisions.worker, config)
        full = split_of(config).kind == "full"
        samples = self._batches.num_samples if full else sum(shard.num_samples for shard in shards)
        self.facts = DataFacts(
            batch_size=size,
            epoch_samples=samples if batch_size else None,
            batches=self._batches.per_epoch,
            skew=work.skew,
            max_samples=batch_size or MAX_SAMPLES,
        )

    def batches(self, number: int, start: int) -> Iterator[NDArray[np.int64]]:
        """Return the sample numbers of the batches of pass `number`, from batch `start` on."""
        if (division := self._divisions.of_pass(number)) != self._division:
            self._division = division
            self._batches = self._work.part(self._divisions.worker, self._config, *division)
        own, per_epoch = copy.copy(self._batches), self._batches.per_epoch  # it keeps the order of one pass
        return (own.indices(number * per_epoch + place) for place in range(start, per_epoch))

    def skip(self, number: int) -> None:
        """Do nothing: each pass is known by its number."""

    def num_batches(self) -> int:
        """Return the number of batches in a pass of this worker."""
        return self._batches.per_epoch


def targets_of(dataset: Any) -> Tensor | None:
    """Return the class numbers of the samples, in their order, if they are known."""
    targets = dataset.columns.get("labels") if type(dataset) is Columns else _targets(dataset)
    return targets if isinstance(targets, Tensor) and targets.shape[:1] == (len(dataset),) else None


def _targets(dataset: Any) -> Any:
    if type(dataset) is Subset:
        targets = _targets(dataset.dataset)
        return targets[torch.as_tensor(list(dataset.indices))] if targets is not None else None
    if type(dataset) is ConcatDataset:
        parts = [_targets(part) for part in dataset.datasets]
        return torch.cat(parts) if all(part is not None for part in parts) else None
    if type(dataset) is TensorDataset:
        return dataset.tensors[1] if len(dataset.tensors) > 1 else None
    targets = getattr(dataset, "targets", None)
    targets = torch.as_tensor(targets) if isinstance(targets, list | np.ndarray) else targets
    return targets if isinstance(targets, Tensor) and targets.shape[:1] == (len(dataset),) else None
