"""Read a stream: every worker reads it alike and keeps every n-th batch, unless the stream can be divided."""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from paceline.assembly.task import seed_generators
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.randomness import mix64
from paceline.runtimes.scripts.loading.divisions import Divisions
from paceline.runtimes.scripts.loading.drawn import require_even_split
from paceline.runtimes.scripts.loading.facts import MAX_SAMPLES, BatchKeys, DataFacts, length_of, own_share, samples_in
from paceline.runtimes.scripts.loading.generators import DrawingState, generators_in
from paceline.settings.preprocessing import split_of

_PURPOSE = 0x57E4A3
_END = object()


def is_stream(data: Any) -> bool:
    """Whether data can be iterated, but has no samples that are known by number."""
    if isinstance(data, IterableDataset) or _is_hugging_face(data):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def _is_hugging_face(data: Any) -> bool:
    module = sys.modules.get("datasets")  # who has such a data set has imported it
    return module is not None and isinstance(data, getattr(module, "IterableDataset", ()))


def _divided(dataset: Any, worker: int, workers: int) -> Any:
    """Return one worker's part of a stream of Hugging Face `datasets`."""
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(dataset, rank=worker, world_size=workers)
    if hasattr(dataset, "_epoch"):
        part._epoch = dataset._epoch  # so that the script's dataset.set_epoch(...) holds for the part too
    return part


def _forgets_buffer(dataset: Any) -> bool:
    """Whether a stream of Hugging Face `datasets` shuffles in a buffer, which is no part of its state."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        if "Shuffle" in type(part).__name__ and hasattr(part, "buffer_size"):
            return True
        part = getattr(part, "ex_iterable", None)
    return False


class StreamReader:
    """One worker's batches of a stream: of `source`, a loader over one or any iterable of batches.

    All random numbers come from (seed, pass, batch of the stream), alike in all workers, so that streams that shuffle
    agree. With split full, each worker takes all batches, with random numbers of its own.
    """

    def __init__(self, source: Any, keys: BatchKeys, config: RunConfig, divisions: Divisions) -> None:
        self._loader: DataLoader[Any] | None = source if isinstance(source, DataLoader) else None
        dataset: Any = self._loader.dataset if self._loader is not None else source
        require_even_split(f"the stream {type(dataset).__name__}", config)
        self._source, self._keys, workers = source, keys, config.workers or 1
        self._in_process = self._loader is None or self._loader.num_workers == 0
        full, self._divisions, worker = split_of(config).kind == "full", divisions, divisions.worker
        _, self._first, self._stride = divisions.newest
        self._seeds = (config.seed, _PURPOSE, *((worker,) if full else ()))
        divides = _is_hugging_face(dataset) and workers > 1 and not full
        self._is_whole = full or divides  # whether this worker takes every batch that it reads
        if self._is_whole:
            self._first, self._stride = 0, 1
        if divides and divisions.is_elastic:
            what = (
                f"--max-workers {config.max_workers}: a stream of Hugging Face datasets is divided once, at the start"
            )
            raise UserError(f"{what}; leave it out, or give a data set with a length")
        if divides:
            dataset = _divided(dataset, worker, workers)
            self._source = dataset if self._loader is None else _with_dataset(self._loader, dataset)
        self._dataset, self._went_on = dataset, False  # whether the newest pass began at a state
        self._initial: Any = None  # the state before the first pass
        self._keeper = self._state_keeper(dataset)
        self._loaded: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None  # state that was handed out; the batch after it is not read yet
        self._pass, self._read, self._ended = (
            0,
            0,
            False,
        )  # of the newest pass: the stream's batches so far, and whether it is over
        self.facts = self._facts(dataset)

    def read(self, number: int, start: int) -> Iterator[Any]:
        """Begin pass `number`, and return its batches from batch `start` on; those before are read and dropped."""
        loaded, self._loaded, self._newest = self._loaded, None, None
        if not self._is_whole:
            _, self._first, self._stride = self._divisions.of_pass(number)
        self._pass, self._read, self._ended = number, 0, False
        if loaded is not None and own_share(loaded["read"], self._first, self._stride) > start:
            loaded = None  # the stream was divided otherwise then
        if self._went_on and loaded is None and _is_hugging_face(self._dataset):
            self._dataset.load_state_dict(None)  # else each later pass would begin at the state too
        self._went_on = loaded is not None
        if loaded is not None:
            self._keeper.load_state_dict(loaded["stream"])
            self._read, self._ended = int(loaded["read"]), bool(loaded["ended"])
            if self._ended:
                return iter(())
        expected = loaded.get("next") if loaded is not None else None
        return self._own(self._begin(number), number, start, self._read, expected)

    def skip(self, number: int) -> None:
        """Do nothing: a finished pass is not read again."""

    def is_over(self, number: int, start: int) -> bool:
        """Whether pass `number` is known to have no batch from `start` on: a stream must be read to know it."""
        return False

    def num_batches(self) -> int:
        """Return the number of batches in a pass of this worker. Raise TypeError if it is unknown."""
        if self._loader is None:
            return own_share(len(self._source), self._first, self._stride)
        dataset: Any = self._loader.dataset
        samples, size = len(dataset), self._loader.batch_size or 1
        batches = samples // size if self._loader.drop_last else -(-samples // size)
        return own_share(batches, self._first, self._stride)

    def state(self) -> dict[str, Any] | None:
        """Return the stream's state after the batches handed out so far, if it keeps one.

        When the next batch is read, its checksum is added to the state, as `next`.
        """
        if self._keeper is None:
            return None
        stream = _plain_copy(type(self._keeper).__name__, self._keeper.state_dict())
        batch = own_share(self._read, self._first, self._stride)
        place = {"pass": self._pass, "batch": batch, "read": self._read, "ended": self._ended}
        self._newest = {**place, "stream": stream}
        return self._newest

    def load_state(self, state: dict[str, Any]) -> None:
        """Let the next pass that is read go on from a state.

        If the batch that it leads to is not the one with the checksum `next`, the pass is read from its start.
        """
        self._loaded = state

    def _begin(self, number: int) -> Iterator[Any]:
        with DrawingState(mix64(*self._seeds, number), generators_in(self._source)).drawing():
            return iter(self._source)

    def _own(
        self, batches: Iterator[Any], number: int, start: int, place: int, expected: int | None = None
    ) -> Iterator[Any]:
        """Yield this worker's batches, from place `place` of the stream on."""
        key, first, stride = mix64(*self._seeds, number), self._first, self._stride
        while True:
            if self._in_process:
                seed_generators(mix64(key, place))
            batch = next(batches, _END)
            if expected is not None and (batch is _END or _checksum(batch) != expected):
                what = f"{type(self._keeper).__name__}.load_state_dict() does not lead to the batch that followed"
                print(f"{what}: the stream is read again from its start", file=sys.stderr)
                self._keeper.load_state_dict(_plain_copy("", self._initial))
                batches, place, expected = self._begin(number), 0, None
                continue
            expected = None
            if batch is _END:
                self._ended = self._ended or self._pass == number
                return
            if self._pass == number:  # else a newer pass has begun
                if self._newest is not None and self._newest["read"] == place:
                    self._newest["next"], self._newest = _checksum(batch), None
                self._read = place + 1
            own, other = divmod(place - first, stride)
            if other == 0 and own >= start:
                self._keys.begin(self._keys.of_batch(number, own), samples_in(batch))
                yield batch
            place += 1

    def _state_keeper(self, dataset: Any) -> Any:
        """Return the object that knows the state of the stream, if there is one."""
        candidates = (self._source, dataset) if self._in_process else (self._source,)
        for thing in candidates:
            if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict") and not _forgets_buffer(dataset):
                with DrawingState(mix64(*self._seeds, 0), generators_in(self._source)).drawing():
                    self._initial = _plain_copy(type(thing).__name__, thing.state_dict())
                return thing
        return None

    def _facts(self, dataset: Any) -> DataFacts:
        keeps_state = self._keeper is not None and self._in_process  # no state has the generators of loader processes
        size, length = self._loader.batch_size if self._loader is not None else None, length_of(dataset)
        skips = "the stream is read again from its start and the batches that were trained on are skipped"
        reads = f"each worker reads the whole stream and keeps one batch in {self._stride}"
        return DataFacts(
            batch_size=size or 1,
            epoch_samples=length if size else None,
            batches=self.num_batches() if length is not None else None,
            max_samples=size or MAX_SAMPLES,
            unresumable=None if keeps_state else f"{skips}: it must yield the same data again",
            keeps_state=keeps_state,
            note=reads if self._stride > 1 else None,
        )


def _with_dataset(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """Return a copy of a loader that reads another data set."""
    other = copy.copy(loader)
    other.__dict__["dataset"] = dataset  # torch refuses to set it
    return other


def _plain_copy(name: str, value: Any) -> Any:
    """Return a copy of a state; raise UserError unless it consists of values that can be saved."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain_copy(name, part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain_copy(name, part) for part in value]
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is not None and not isinstance(value, bool | int | float | str):
        what = f"session.prepare(...): the state_dict() of {name} holds {type(value).__name__}"
        raise UserError(f"{what}: keep numbers, text, tensors, and lists or dicts of them")
    return value


def _checksum(value: Any, check: int = 0) -> int:
    """Return a checksum of a batch: of its tensors, arrays, numbers and text.

    >>> _checksum({"x": [1, "a"]}) == _checksum({"x": [1, "a"]}) != _checksum({"x": [1, "b"]})
    True
    """
    if isinstance(value, Mapping):
        return _checksum([part for item in value.items() for part in item], check)
    if isinstance(value, tuple | list):
        for part in value:
            check = _checksum(part, check)
        return zlib.crc32(str(len(value)).encode(), check)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return zlib.crc32(content.data, zlib.crc32(f"{value.dtype}{value.shape}".encode(), check))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(value.tobytes(), check)
    known = value is None or isinstance(value, bool | int | float | str | bytes)
    return zlib.crc32((repr(value) if known else type(value).__name__).encode(), check)
