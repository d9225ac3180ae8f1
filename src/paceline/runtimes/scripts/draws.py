"""The order of a user's `DataLoader`: its sampler is drawn alike in every worker, and its batches are dealt in turn."""

from __future__ import annotations

import itertools
import operator
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.randomness import mix64
from paceline.settings.preprocessing import split_of

MAX_DRAWS, MAX_DRAWS_UNSIZED = 100_000_000, 10_000_000
"""The most a sampler may draw in one pass, with a length and without: a pass is drawn whole when it begins."""
_PURPOSE = 0x5A3B1E


@dataclass(frozen=True)
class LoaderOrder:
    """How a loader orders its samples. Without a `batch_size`, its sampler yields whole batches."""

    sampler: Any
    batch_size: int | None
    drop_last: bool
    shuffles: bool  # all samples once a pass, in random order: any such order will do
    initialises: bool  # whether the loader has a `worker_init_fn`

    @property
    def name(self) -> str:
        """The sampler, as messages name it."""
        return type(self.sampler).__name__


def order_of(loader: DataLoader[Any]) -> LoaderOrder:
    """Return a loader's order. Raise UserError if it cannot be kept on several workers."""
    kind, wanted = type(loader), "session.prepare(..., loader)"
    if kind.__iter__ is not DataLoader.__iter__:
        what = f"{wanted}: {kind.__name__} has an __iter__ of its own, which would not be called"
        raise UserError(f"{what}: give a plain DataLoader and change batches in the data set or collate_fn")
    if isinstance(loader.dataset, IterableDataset):
        what = f"{wanted}: {type(loader.dataset).__name__} is a stream, but Paceline assigns samples by number"
        raise UserError(f"{what}; give a DataLoader over a map-style data set")
    batches: Any = loader.batch_sampler
    if batches is None:
        raise UserError(f"{wanted}: batch_size=None leaves it to the data set to make batches: give batch_size=N")
    plain = type(batches) is BatchSampler  # a subclass may make its batches in another way
    sampler = batches.sampler if plain else batches
    for found in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(found, DistributedSampler) or getattr(found, "num_replicas", 1) != 1:
            what = f"{wanted}: {type(found).__name__} picks the samples of one worker, but Paceline divides them itself"
            raise UserError(f"{what}; leave it out, use shuffle=True")
    initialises = loader.worker_init_fn is not None
    if not plain:
        return LoaderOrder(sampler, None, False, False, initialises)
    shuffles = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type]
    )
    return LoaderOrder(sampler, int(batches.batch_size), bool(batches.drop_last), shuffles, initialises)


@dataclass(frozen=True)
class DrawnPass:
    """What a sampler drew for one pass: sample numbers, and where each batch begins and ends."""

    numbers: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, number: int) -> NDArray[np.int64]:
        """Return the sample numbers of one batch."""
        return self.numbers[self.bounds[number] : self.bounds[number + 1]]


class DrawnBatches:
    """One worker's batches of a loader with its own order: of n workers, each takes every n-th batch of a pass.

    All workers draw the same pass, because all random numbers of a draw come from (seed, pass). With split full, each
    worker draws and takes a pass of its own. A sampler with a state of its own must have the same in every worker. It
    is drawn once for each pass; the first draw also gives the sizes and `checksum`.
    """

    def __init__(
        self, order: LoaderOrder, dataset_size: int, config: RunConfig, worker: int, accumulate: int = 1
    ) -> None:
        _require_even_split(order, config)
        self._order, self._dataset_size, self._accumulate = order, dataset_size, accumulate
        self._full, workers = split_of(config).kind == "full", config.workers or 1
        self._seed, self._worker = config.seed, worker
        first = self._draw(0)
        self._first: DrawnPass | None = first  # until the first pass begins
        self._passes: dict[int, DrawnPass] = {}
        self._num_batches = len(first)
        if len(first) < (1 if self._full else workers):
            what = f"session.prepare(..., loader): its {order.name} makes {len(first)} batches for {workers} workers"
            raise UserError(f"{what}: use smaller batches, fewer workers or more data")
        self._own = range(len(first)) if self._full else range(worker, len(first), workers)
        sizes = np.diff(first.bounds)[self._own.start :: self._own.step]
        self._sizes = np.add.reduceat(sizes, np.arange(0, len(sizes), accumulate))
        self.per_epoch, self.num_samples = len(self._sizes), int(sizes.sum())
        self.epoch_samples = int(first.bounds[-1])
        """The samples in a pass of all workers."""
        self.batch_size = order.batch_size or max(1, round(self.epoch_samples / len(first)))
        self.checksum = zlib.crc32(first.bounds.tobytes(), zlib.crc32(first.numbers.tobytes()))

    def begin_pass(self, number: int, step: int) -> None:
        """Draw pass `number`, and forget those before `step`, which comes next.

        That may be a step of an earlier pass: the batches of a dropped push are given out again.
        """
        self._passes = {one: drawn for one, drawn in self._passes.items() if one >= step // self.per_epoch}
        drawn = self._first if number == 0 and self._first is not None else self._draw(number)
        self._first, self._passes[number] = None, drawn
        found, expected = len(drawn), self._num_batches
        if found != expected:
            what = f"{self._order.name} made {found} batches for pass {number + 1}, and {expected} for the first"
            raise UserError(f"{what}: workers share passes in advance, so let it make as many for each")

    def parts(self, number: int) -> list[NDArray[np.int64]]:
        """Return the batches that make step `number`, counted from the start of training."""
        number_of_pass, place = divmod(number, self.per_epoch)
        own = self._own[place * self._accumulate : (place + 1) * self._accumulate]
        return [self._passes[number_of_pass].batch(batch) for batch in own]

    def samples_before(self, number: int) -> int:
        """Return the number of samples in steps 0 to `number` - 1; of whole batches, by the sizes of the first draw."""
        epochs, place = divmod(number, self.per_epoch)
        return epochs * self.num_samples + int(self._sizes[:place].sum())

    def _draw(self, number: int) -> DrawnPass:
        order, sampler = self._order, self._order.sampler
        generators = [g for thing in (sampler, getattr(sampler, "sampler", None)) for g in _generators(thing)]
        key = mix64(self._seed, _PURPOSE, number, *((self._worker,) if self._full else ()))
        with _seeded(key, generators):
            try:
                drawn = _drawn_pass(order)
            except TypeError as error:
                raise UserError(f"{order.name} must yield sample numbers, or lists of them: {error}") from error
        wrong = drawn.numbers[(drawn.numbers < 0) | (drawn.numbers >= self._dataset_size)]
        if len(wrong):
            raise UserError(f"{order.name} drew sample {wrong[0]} of {self._dataset_size}: draw 0 or more, and less")
        return drawn


def _drawn_pass(order: LoaderOrder) -> DrawnPass:
    """Draw a pass. Raise UserError if it has no end that can be waited for."""
    try:
        length = len(order.sampler)
    except (TypeError, NotImplementedError):
        length = None
    most = MAX_DRAWS_UNSIZED if length is None else MAX_DRAWS
    shorter = "let __len__ say how often it draws, and draw less in a pass, for more epochs"
    if length is not None and length > most:
        what = f"session.prepare(..., loader): its {order.name} draws {length:,} times in a pass"
        raise UserError(f"{what}, and {most:,} is the most: {shorter}")
    limit = most if length is None else length
    drawn, sizes = itertools.islice(iter(order.sampler), limit + 1), []

    def each_number() -> Iterator[int]:
        for batch in drawn:
            sizes.append(len(batch))
            yield from map(operator.index, batch)

    found = map(operator.index, drawn) if order.batch_size is not None else each_number()
    numbers = np.fromiter(itertools.islice(found, most + 1), np.int64)
    if len(numbers) > most or (len(numbers) if order.batch_size is not None else len(sizes)) > limit:
        raise UserError(f"{order.name} went on after {limit:,} draws of a pass, which is the most: {shorter}")
    if order.batch_size is None:
        if 0 in sizes:
            raise UserError(f"{order.name} made an empty batch: let each hold a sample")
        return DrawnPass(numbers, np.cumsum([0, *sizes]))
    whole, rest = divmod(len(numbers), order.batch_size)
    num_batches = whole + (rest > 0 and not order.drop_last)
    return DrawnPass(numbers, np.minimum(np.arange(num_batches + 1) * order.batch_size, len(numbers)))


def _generators(thing: Any) -> list[torch.Generator]:
    return [value for value in getattr(thing, "__dict__", {}).values() if isinstance(value, torch.Generator)]


@contextmanager
def _seeded(key: int, generators: list[torch.Generator]) -> Iterator[None]:
    """Seed the global generators and `generators` by `key`; afterwards restore the state of each."""
    generators = [torch.default_generator, *generators]
    states = [generator.get_state() for generator in generators]
    state, legacy = random.getstate(), np.random.get_state()
    for generator in generators:
        generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        for generator, before in zip(generators, states, strict=True):
            generator.set_state(before)
        random.setstate(state)
        np.random.set_state(legacy)


def _require_even_split(order: LoaderOrder, config: RunConfig) -> None:
    """Refuse settings that choose samples for a worker: the sampler chooses them here."""
    asked = {
        f"--split {config.split}": split_of(config).kind not in ("iid", "full"),
        "--shard-weights": config.shard_weights is not None,
        f"--validation {config.validation:g}": bool(config.validation),
        f"--fold {config.fold}": config.fold is not None,
    }
    for flag in (flag for flag, given in asked.items() if given):
        what = f"{flag}: the loader's {order.name} decides what is trained on, and its batches are dealt in turn"
        raise UserError(f"{what}; leave it out, or give a loader with shuffle=True and no sampler")
