"""Read the batches of a data set with numbered samples: a torch `DataLoader` reads what an order says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from paceline.assembly.task import seed_generators
from paceline.runtimes.scripts.loading.facts import BatchKeys, DataFacts, samples_in
from paceline.runtimes.scripts.loading.shuffled import Columns
from paceline.tasks.nested import each

Waiting: TypeAlias = deque[tuple[int, int]]  # keys and samples; 0 samples: not yet known


class Order(Protocol):
    """The batches that one worker takes of each pass: lists or arrays of sample numbers."""

    facts: DataFacts

    def batches(self, number: int, start: int) -> Iterator[Any]: ...

    @property
    def is_stateless(self) -> bool: ...

    def skip(self, number: int) -> None: ...

    def num_batches(self) -> int: ...


class TensorRows(Dataset[Any]):
    """Whole batches of a data set that consists of tensors, without per-item Python."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, numbers: Any) -> Any:
        rows = np.asarray(numbers)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":  # a sampler may also draw slices, say
            return default_collate([self.dataset[number] for number in numbers])
        chosen = torch.from_numpy(rows)
        if isinstance(self.dataset, Tensor):
            return _select(self.dataset, chosen)
        if isinstance(self.dataset, Columns):
            return each(lambda tensor: _select(tensor, chosen), self.dataset.columns)
        return [_select(tensor, chosen) for tensor in self.dataset.tensors]


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


class SeededItems(Dataset[Any]):
    """A user's data set in a loader process: each batch comes with a key, which seeds the generators there."""

    def __init__(self, dataset: Any, items: Any) -> None:
        self.dataset, self._items = dataset, items

    def __getitems__(self, keyed: tuple[int, Any]) -> Any:
        key, numbers = keyed
        seed_generators(key)
        many = getattr(self._items, "__getitems__", None)  # as torch asks for a whole batch
        return many(numbers) if many else [self._items[number] for number in numbers]

    def __getitem__(self, keyed: tuple[int, Any]) -> Any:
        key, number = keyed
        seed_generators(key)
        return self._items[number]


class Feed:
    """The batch sampler of the reading `DataLoader`: it gives the batches of the pass that begins.

    With `in_process`, torch fetches each batch at once, else in a loader process, ahead of time.
    """

    def __init__(self, keys: BatchKeys, in_process: bool, single: bool, as_lists: bool) -> None:
        self._keys, self._in_process, self._single, self._as_lists = keys, in_process, single, as_lists
        self._batches: Iterator[Any] = iter(())

    def begin(self, batches: Iterator[Any], number: int, start: int) -> Waiting:
        """Give these batches from now on; return the queue of those that begin only when they are handed out."""
        waiting: Waiting = deque()
        self._batches = self._fed(batches, number, start, waiting)
        return waiting

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def _fed(self, batches: Iterator[Any], number: int, start: int, waiting: Waiting) -> Iterator[Any]:
        for place, numbers in enumerate(batches, start):
            key, samples = self._keys.of_batch(number, place), 0 if self._single else len(numbers)
            batch = numbers.tolist() if isinstance(numbers, np.ndarray) and self._as_lists else numbers
            batch = batch[0] if self._single else batch
            if not self._in_process:
                waiting.append((key, samples))
                yield key, batch
            elif self._single:
                waiting.append((key, samples))
                seed_generators(key)
                yield batch
            else:
                self._keys.begin(key, samples)
                yield batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_process(init: Callable[[int], None] | None, number: int) -> None:
    """Start a loader process as torch does, and show it the user's data set."""
    info = get_worker_info()
    assert info is not None
    items: Any = info.dataset
    object.__setattr__(info, "dataset", items.dataset)  # it is frozen
    if init is not None:
        init(number)


class IndexedReader:
    """One worker's batches of a user's loader over a data set with numbered samples."""

    def __init__(self, loader: DataLoader[Any], order: Order, keys: BatchKeys) -> None:
        self.facts, self._order, self._keys = order.facts, order, keys
        single, in_process = loader.batch_sampler is None, loader.num_workers == 0
        dataset: Any = loader.dataset
        tensors = type(dataset) in (TensorDataset, Columns) or isinstance(dataset, Tensor)  # a subclass may differ
        by_rows = tensors and not single and loader.collate_fn is default_collate
        items = TensorRows(dataset) if by_rows else dataset
        self._feed = Feed(keys, in_process, single, as_lists=not by_rows)
        self._seeds = torch.Generator()
        feed: Any = self._feed
        init: Any = None if in_process else partial(_start_process, loader.worker_init_fn)
        order_of_items: dict[str, Any] = {"batch_size": None, "sampler": feed} if single else {"batch_sampler": feed}
        self._loader: DataLoader[Any] = DataLoader(
            items if in_process else SeededItems(dataset, items),
            **order_of_items,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is if by_rows else loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=init,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._seeds,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )

    def read(self, number: int, start: int) -> Iterator[Any]:
        """Begin pass `number` at batch `start`, and return its batches."""
        waiting = self._feed.begin(self._order.batches(number, start), number, start)
        self._seeds.manual_seed(self._keys.of_pass(number))
        return _handed_out(iter(self._loader), self._keys, waiting)

    def skip(self, number: int) -> None:
        """Pass over pass `number`."""
        self._order.skip(number)

    def is_over(self, number: int, start: int) -> bool:
        """Whether pass `number` has no batch from `start` on; a sampler with a state of its own is not asked."""
        return self._order.is_stateless and next(self._order.batches(number, start), None) is None

    def num_batches(self) -> int:
        """Return the number of batches in a pass of this worker. Raise TypeError if it is unknown."""
        return self._order.num_batches()

    def state(self) -> dict[str, Any] | None:
        """Return None: the position says where to go on."""
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


def _handed_out(batches: Iterator[Any], keys: BatchKeys, waiting: Waiting) -> Iterator[Any]:
    for batch in batches:
        if waiting:
            key, samples = waiting.popleft()
            keys.begin(key, samples or samples_in(batch))
        yield batch
