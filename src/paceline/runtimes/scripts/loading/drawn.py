"""The order of a loader's own sampler: it is drawn alike in every worker, and its batches are dealt in turn."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.config import RunConfig, max_workers_of
from paceline.errors import UserError
from paceline.randomness import mix64
from paceline.runtimes.scripts.loading.divisions import Divisions
from paceline.runtimes.scripts.loading.facts import MAX_SAMPLES, DataFacts, length_of, own_share
from paceline.runtimes.scripts.loading.generators import DrawingState, generators_in
from paceline.settings.preprocessing import split_of

CHUNK_BATCHES, CHUNK_SAMPLES = 256, 65_536
"""A sampler is drawn this far at a time, whichever is reached first."""
MAX_SKIPPED = 10_000_000
"""The most samples that are drawn of a finished pass, to bring a sampler with a state of its own to the next one."""
_STATELESS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, range, list, tuple)
_PURPOSE = 0x5A3B1E
_END = object()


class SamplerBatches:
    """The batches that a loader's sampler makes; without a batch size, each sample is one."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches: Any = loader.batch_sampler
        self.single = batches is None
        self.source: Any = loader.sampler if self.single else batches
        plain = type(batches) is BatchSampler  # a subclass may make its batches in another way
        self.sampler: Any = batches.sampler if plain else self.source
        self.batch_size: int | None = int(batches.batch_size) if plain else None
        self.drop_last = plain and bool(batches.drop_last)
        self.name = type(self.sampler).__name__
        self._dataset_size = length_of(loader.dataset)
        for found in (self.sampler, getattr(self.sampler, "sampler", None)):
            if isinstance(found, DistributedSampler) or getattr(found, "num_replicas", 1) != 1:
                what = f"session.prepare(..., loader): {type(found).__name__} picks the samples of one worker"
                raise UserError(f"{what}, but Paceline divides them itself; leave it out, use shuffle=True")

    @property
    def is_shuffle(self) -> bool:
        """Whether a pass has all samples once, in random order: any such order will do."""
        sampler = self.sampler
        if type(sampler) is not RandomSampler or sampler.replacement:
            return False
        return len(sampler) == len(sampler.data_source) == self._dataset_size

    @property
    def is_stateless(self) -> bool:
        """Whether a pass depends on nothing but the generators that are seeded for it."""
        return type(self.sampler) in _STATELESS

    @property
    def num_batches(self) -> int | None:
        """The batches in a pass, by the sampler's own account."""
        return length_of(self.source)

    @property
    def num_samples(self) -> int | None:
        """The samples in a pass, by the sampler's own account; None if it makes batches of any size."""
        length = length_of(self.sampler) if self.batch_size is not None else None
        return length // self.batch_size * self.batch_size if length and self.batch_size and self.drop_last else length

    def checked(self, batch: Any) -> list[Any]:
        """Return a batch as a list. Raise UserError if it is empty, or has samples that the data set has not."""
        try:
            numbers = [batch] if self.single else list(batch)
        except TypeError:
            what = f"{self.name} must yield sample numbers, or lists of them"
            raise UserError(f"{what}: as a batch sampler, it yielded {batch!r:.40}") from None
        if not numbers:
            raise UserError(f"{self.name} made an empty batch: let each hold a sample")
        if self._dataset_size is None:
            return numbers
        try:
            low, high = min(numbers), max(numbers)
            wrong = low if low < 0 else high if high >= self._dataset_size else None
        except (TypeError, ValueError, RuntimeError):  # names, or tuples: what the data set makes of them is its affair
            return numbers
        if wrong is not None:
            raise UserError(f"{self.name} drew sample {wrong} of {self._dataset_size}: draw 0 or more, and less")
        return numbers


class PassDraws:
    """One pass of a sampler, drawn chunk by chunk, with random numbers that come from `key` alone."""

    def __init__(self, batches: SamplerBatches, key: int) -> None:
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._state = DrawingState(key, generators_in(batches.sampler, getattr(batches.sampler, "sampler", None)))
        self._waiting: list[list[Any]] | None = None
        self.ended = False

    def look(self) -> list[list[Any]]:
        """Draw the first chunk, and keep it for the first `draw`."""
        self._waiting = self.draw()
        return self._waiting

    def draw(self) -> list[list[Any]]:
        """Draw the next chunk; return no batch after the last one."""
        if self._waiting is not None:
            chunk, self._waiting = self._waiting, None
            return chunk
        chunk, samples = list[list[Any]](), 0
        with self._state.drawing():
            if self._iterator is None:
                self._iterator = iter(self._batches.source)
            while not self.ended and len(chunk) < CHUNK_BATCHES and samples < CHUNK_SAMPLES:
                batch = next(self._iterator, _END)
                self.ended = batch is _END
                if not self.ended:
                    chunk.append(self._batches.checked(batch))
                    samples += len(chunk[-1])
        return chunk


class DrawnOrder:
    """One worker's batches of a loader with its own sampler: of n workers, each takes every n-th batch of a pass.

    All workers draw the same pass, because all random numbers of a pass come from (seed, pass). With split full, each
    worker draws and takes a pass of its own. A sampler with a state of its own must have the same in every worker.
    """

    def __init__(self, batches: SamplerBatches, config: RunConfig, divisions: Divisions) -> None:
        self._batches, self._divisions = batches, divisions
        require_even_split(f"the loader's {self._batches.name}", config)
        self._full = split_of(config).kind == "full"
        self._seed, self._worker, self._most = config.seed, divisions.worker, max_workers_of(config)
        self._divide(0)
        self._begun: PassDraws | None = PassDraws(self._batches, self._key(0))  # until the first pass begins
        self.facts = self._facts(self._begun.look(), self._begun.ended)

    def batches(self, number: int, start: int) -> Iterator[list[Any]]:
        """Begin pass `number`; return the sample numbers of its batches from batch `start` on, drawn when needed."""
        self._divide(number)
        return self._own(self._begin(number), self._first + start * self._stride)

    def skip(self, number: int) -> None:
        """Bring a sampler with a state of its own through pass `number`."""
        draws = self._begin(number)
        drawn = 0
        while not self._batches.is_stateless and not draws.ended and drawn < MAX_SKIPPED:
            drawn += sum(map(len, draws.draw()))

    @property
    def is_stateless(self) -> bool:
        """Whether a pass can be drawn again."""
        return self._batches.is_stateless

    def num_batches(self) -> int:
        """Return the number of batches in a pass of this worker. Raise TypeError if it is unknown."""
        total = self._batches.num_batches
        if total is not None:
            return own_share(total, self._first, self._stride)
        if self.facts.batches is None:
            raise TypeError(f"object of type '{self._batches.name}' has no len()")
        return self.facts.batches

    def _key(self, number: int) -> int:
        return mix64(self._seed, _PURPOSE, number, *((self._worker,) if self._full else ()))

    def _begin(self, number: int) -> PassDraws:
        draws = self._begun if number == 0 and self._begun is not None else PassDraws(self._batches, self._key(number))
        self._begun = None
        return draws

    def _divide(self, number: int) -> None:
        _, index, count = self._divisions.of_pass(number)
        self._first, self._stride = (0, 1) if self._full else (index, count)

    def _own(self, draws: PassDraws, first: int) -> Iterator[list[Any]]:
        stride = self._stride
        while chunk := draws.draw():
            yield from chunk[first::stride]
            first = first - len(chunk) if first >= len(chunk) else (first - len(chunk)) % stride

    def _facts(self, chunk: list[list[Any]], ended: bool) -> DataFacts:
        batches, samples = self._batches, sum(map(len, chunk))
        total = len(chunk) if ended else batches.num_batches
        needed = 1 if self._full else self._most
        if not chunk and length_of(batches.sampler) == 0:
            what = f"session.prepare(..., loader): the loader has no samples: its {batches.name} draws none"
            raise UserError(f"{what}; is the path of the data right, or a filter of it?")
        if (total is not None and total < needed) or not chunk:
            made = f"{total or 0} batch{'es' * (total != 1)} for {needed} worker{'s' * (needed > 1)}"
            what = f"session.prepare(..., loader): its {batches.name} makes {made}"
            raise UserError(f"{what}: use smaller batches, fewer workers or more data")
        mean = samples / len(chunk)
        whole = samples if ended else batches.num_samples
        if whole is None and total is not None:
            whole = max(1, round(mean * total))
        return DataFacts(
            batch_size=batches.batch_size or max(1, round(mean)),
            epoch_samples=None if batches.single else whole,
            batches=own_share(total, self._first, self._stride) if total is not None else None,
            order=None if self._full else _checksum(chunk),
            max_samples=batches.batch_size or MAX_SAMPLES,
        )


def _checksum(chunk: list[list[Any]]) -> int:
    value = zlib.crc32(np.array([len(batch) for batch in chunk], np.int64).tobytes())
    for batch in chunk:
        try:
            value = zlib.crc32(np.asarray(batch, np.int64).tobytes(), value)
        except (TypeError, ValueError):  # not numbers
            value = zlib.crc32(str(len(batch)).encode(), value)
    return value


def require_even_split(chooser: str, config: RunConfig) -> None:
    """Refuse settings that choose samples for a worker: the sampler or stream chooses them here."""
    asked = {
        f"--split {config.split}": split_of(config).kind not in ("iid", "full"),
        "--shard-weights": config.shard_weights is not None,
        f"--validation {config.validation:g}": bool(config.validation),
        f"--fold {config.fold}": config.fold is not None,
    }
    for flag in (flag for flag, given in asked.items() if given):
        what = f"{flag}: {chooser} decides what is trained on, and its batches are dealt in turn"
        raise UserError(f"{what}; leave it out, or give a loader with shuffle=True and no sampler")
