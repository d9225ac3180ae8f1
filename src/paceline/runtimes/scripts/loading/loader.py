"""What `session.prepare` returns for a user's data: the user's own loader, with one worker's share of its batches."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runtimes.scripts.loading.divisions import Divisions
from paceline.runtimes.scripts.loading.drawn import DrawnOrder, SamplerBatches
from paceline.runtimes.scripts.loading.facts import BatchKeys, DataFacts, LoopSession, PassReader
from paceline.runtimes.scripts.loading.handed_out import HandedOut
from paceline.runtimes.scripts.loading.indexed import IndexedReader, Order
from paceline.runtimes.scripts.loading.shuffled import Columns, ShuffledOrder
from paceline.runtimes.scripts.loading.streams import StreamReader, is_stream
from paceline.tasks.nested import require_samples

DEFAULT_BATCH = 32
_FOR_ITER = dis.opmap["FOR_ITER"]
LOOPS_BY_NEXT = ("accelerate.data_loader", "lightning.pytorch.utilities.combined_loader")
"""Modules that loop over a loader by calling `next`."""


class FinishedPass:
    """A pass that an earlier incarnation of the worker has finished: a `for` ends at once.

    But `next(...)` gives its first batch: scripts look at one (`next(iter(loader))`) before they loop.
    """

    def __init__(self, reader: PassReader, number: int, handed_out: HandedOut, on_empty: Callable[[], None]) -> None:
        self._reader, self._number, self._handed_out, self._on_empty = reader, number, handed_out, on_empty
        self._is_read = False

    def __iter__(self) -> FinishedPass:
        return self

    def __next__(self) -> Any:
        if self._is_read or not _is_next_call(sys._getframe(1)):
            self.leave()
            raise StopIteration
        self._is_read = True
        batch = next(self._reader.read(self._number, 0))
        self._handed_out.look(batch)
        return batch

    def leave(self) -> None:
        """Pass over it, unless a batch of it was read; what the script looked at is no longer its newest batch."""
        self._handed_out.look(None)
        if not self._is_read:
            self._is_read = True
            self._reader.skip(self._number)
            self._on_empty()


def _is_next_call(caller: FrameType) -> bool:
    """Whether the code that asks for a batch calls `next`, and does not loop or make a list."""
    code = caller.f_code
    if caller.f_globals.get("__name__") in LOOPS_BY_NEXT:
        return False
    return code.co_code[caller.f_lasti] != _FOR_ITER and "next" in code.co_names


class WorkerLoader(DataLoader[Any]):
    """One worker's batches. To the eye it is the user's loader; each iteration is the next pass.

    Without `in_passes`, an iteration goes on from pass to pass. Every iteration ends when training is over.
    """

    facts: DataFacts

    def __init__(
        self, loader: DataLoader[Any], reader: PassReader, session: LoopSession, keys: BatchKeys, in_passes: bool
    ) -> None:
        self.__dict__.update(loader.__dict__)
        self.handed_out, self._keys = HandedOut(), keys
        self._users, self._reader, self._session, self.in_passes = loader, reader, session, in_passes
        self.facts = reader.facts
        self._passes, self._start, self._position = 0, (0, 0), (0, 0)
        self._finished_pass: FinishedPass | None = None  # the newest iteration, if it was one
        self._pushed_at = (0, 0)
        self.has_given = False  # whether a batch to train on was handed out in this process
        self.empty_passes = 0  # that the loop began and an earlier incarnation has finished
        self.counts_left = False  # whether `session.epochs` counts its passes
        self.on_empty: Callable[[], None] = lambda: None  # called after each of these

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_users" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self._users, name)  # what a subclass of DataLoader has beside

    @property
    def position(self) -> tuple[int, int]:
        """The pass of the newest iteration, and how many of its batches were handed out."""
        return self._position

    @property
    def passes(self) -> int:
        """How many passes have begun, those of an earlier process included."""
        return max(self._passes, self._start[0] + (self._start[1] > 0))

    def pass_at_next_push(self) -> int:
        """The newest pass that the loop will have begun by its next push, if that takes as many batches as the last.

        Called once for each push.
        """
        (number, batch), before = self.handed_out.trained, self._pushed_at
        self._pushed_at = self.handed_out.trained
        taken = max(1, batch - before[1] if number == before[0] else batch)
        try:
            return number + -(-(batch + taken) // len(self)) - 1
        except TypeError:  # its length is unknown
            return number + 1

    @property
    def begun(self) -> int:
        """How many passes have begun in this process, those included that were left out."""
        return self._passes

    @property
    def finished(self) -> int:
        """How many passes an earlier incarnation has finished, by what is known while no batch was handed out."""
        return max(self._start[0], self._passes)

    def finished_ahead(self, with_end: bool) -> int:
        """How many of the next passes an earlier incarnation of this worker has finished.

        `with_end`: also the one of which it has trained on the last batch, and begun no other.
        """
        number, batch = self._start
        is_over = with_end and batch > 0 and number >= self._passes and self._reader.is_over(number, batch)
        return max(0, number - self._passes) + is_over

    def leave_out(self, passes: int) -> None:
        """Leave out the next passes, as if the loop had run through them."""
        self.counts_left = True
        self._leave_finished()
        for number in range(self._passes, self._passes + passes):
            self._reader.skip(number)
        self._passes += passes

    @property
    def skips_passes(self) -> bool:
        """Whether the loop runs through passes that an earlier incarnation of this worker has finished."""
        return self._passes <= self._start[0] and self._start[0] > 0

    def resume_at(self, passes: int, batches: int) -> None:
        """Let the first `passes` iterations end at once, and the next one begin at batch `batches`."""
        assert not self._passes, "the loader was iterated already"
        self._start = self._position = (passes, batches)
        self.handed_out.go_on(self._position)

    def state(self) -> dict[str, Any] | None:
        """Return the state of a stream that keeps one, after the batches handed out so far; None: it keeps none."""
        return self._reader.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Let the pass that `resume_at` names go on from the state of a stream."""
        self._reader.load_state(state)

    def __len__(self) -> int:
        """The number of batches in one pass of this worker."""
        return self._reader.num_batches()

    def __iter__(self) -> Any:
        measures = self._session.is_final and not torch.is_grad_enabled()  # a pass after the end, without training
        if self._session.finished and not measures:
            self._session.begin_empty_pass()
            return iter(())
        self._leave_finished()
        while self._passes < self._start[0]:
            self._passes += 1
            if self.in_passes:
                number = self._passes - 1
                self._finished_pass = FinishedPass(self._reader, number, self.handed_out, self._note_empty)
                return self._finished_pass
            self._reader.skip(self._passes - 1)
        if self.in_passes:
            return self._handed_out(*self._begin(), measures)
        return self._endless(measures)

    def _leave_finished(self) -> None:
        if self._finished_pass is not None:
            self._finished_pass.leave()
            self._finished_pass = None

    def _note_empty(self) -> None:
        self.empty_passes += 1
        self.on_empty()

    def _begin(self) -> tuple[int, int, Iterator[Any]]:
        """Begin the next pass: return its number, its first batch and its batches."""
        number = self._passes
        start = self._start[1] if number == self._start[0] else 0
        batches = self._reader.read(number, start)
        self._passes, self._position = number + 1, (number, start)
        return number, start, batches

    def _handed_out(self, number: int, place: int, batches: Iterator[Any], measures: bool) -> Iterator[Any]:
        while measures or not self._session.finished:
            try:
                batch = next(batches)
            except StopIteration:
                self.empty_passes += place > 0 and (number, place) == self._start
                self.handed_out.end_pass()
                return
            place, self.has_given = place + 1, True
            if self._position[0] == number:  # else a newer iteration has begun
                self._position = (number, place)
            self.handed_out.add(self._position, self._keys.samples, batch)
            yield batch

    def _endless(self, measures: bool) -> Iterator[Any]:
        passes = 0
        while passes < 1 if measures else not self._session.finished:
            passes += 1
            number, start, batches = self._begin()
            yield from self._handed_out(number, start, batches, measures)
            if self._position == (number, 0) and not self._session.finished:
                raise UserError(f"pass {number + 1} over {type(self.dataset).__name__} has no batch: give more data")


def share(
    data: Any,
    session: LoopSession,
    config: RunConfig,
    place: int | Divisions,
    *,
    number: int = 0,
    batch_size: int | None = None,
    in_passes: bool | None = None,
) -> WorkerLoader:
    """Return one worker's share of a user's data: a loader, a data set, tensors, a dict of tensors, or a stream.

    `place` is the worker's number, or its divisions of the data, if these may change.
    `number` tells the loaders of a script apart. With `in_passes`, which loaders and streams have by default, each
    iteration is one pass.
    """
    divisions = Divisions(config, place) if isinstance(place, int) else place
    keys = BatchKeys(session, config, divisions.worker, number)
    if in_passes is None:
        in_passes = isinstance(data, DataLoader) or is_stream(data)
    loader = _require_usable(data, batch_size) if isinstance(data, DataLoader) else _loader_of(data, batch_size)
    if is_stream(loader.dataset):
        batched = isinstance(data, DataLoader) or batch_size is not None
        stream = StreamReader(loader if batched else data, keys, config, divisions)
        return WorkerLoader(loader, stream, session, keys, in_passes)
    batches = SamplerBatches(loader)
    order: Order = (
        ShuffledOrder(loader.dataset, batches.batch_size, batches.drop_last, config, divisions)
        if batches.is_shuffle
        else DrawnOrder(batches, config, divisions)
    )
    return WorkerLoader(loader, IndexedReader(loader, order, keys), session, keys, in_passes)


def _require_usable(loader: DataLoader[Any], batch_size: int | None) -> DataLoader[Any]:
    """Return a user's loader. Raise UserError if its batches cannot be shared."""
    kind = type(loader)
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", DataLoader)
    if kind.__iter__ not in (DataLoader.__iter__, stateful.__iter__):
        what = f"session.prepare(..., loader): {kind.__name__} has an __iter__ of its own, which would not be called"
        raise UserError(f"{what}: give a plain DataLoader and change batches in the data set or collate_fn")
    batches: Any = loader.batch_sampler
    size = batches.batch_size if type(batches) is BatchSampler else loader.batch_size
    if batch_size is not None and batch_size != size:
        maker = loader.dataset if batches is None else batches
        found = size or f"{type(maker).__name__}, which makes batches itself"
        raise UserError(f"session.prepare(...): batch_size={batch_size}, and the loader has {found}: leave it out")
    if _are_columns(loader.dataset):
        what = "session.prepare(...): a DataLoader over a dict of tensors looks for samples 0, 1, ... among its keys"
        raise UserError(f"{what}: give the dict itself, with batch_size=N")
    return loader


def _loader_of(data: Any, batch_size: int | None) -> DataLoader[Any]:
    """Return a loader for data that came without one: it shuffles; what a stream yields are batches already."""
    if is_stream(data):
        if batch_size is None or isinstance(data, IterableDataset):
            sampler: Any = None if isinstance(data, IterableDataset) else ()
            return DataLoader(data, batch_size, sampler=sampler)
        what = f"session.prepare(..., batch_size={batch_size}): {type(data).__name__} yields batches"
        raise UserError(f"{what}: leave batch_size out, or give an IterableDataset of samples")
    if isinstance(data, tuple) and all(isinstance(part, torch.Tensor) for part in data):
        require_samples("session.prepare(...): training", data, None)
        data = TensorDataset(*data)
    if isinstance(data, Mapping) and type(data) is not dict:
        what = f"session.prepare(...): {type(data).__name__} is a mapping, but not a plain dict"
        raise UserError(f"{what}: give dict(data) if its tensors have a row per sample, else a DataLoader over it")
    if _are_columns(data):
        data = Columns(data)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        what = f"session.prepare(...): {type(data).__name__} has no length or cannot be indexed"
        raise UserError(f"{what}: give a map-style data set, tensors, a stream, or a DataLoader over one")
    size = DEFAULT_BATCH if batch_size is None else batch_size
    if size < 1 or not len(data):
        what = f"session.prepare(..., batch_size={size}): {type(data).__name__} with {len(data)} samples"
        raise UserError(f"{what}: give data, and a batch size of at least 1")
    return DataLoader(data, size, shuffle=True)


def _are_columns(data: Any) -> bool:
    """Whether data is a plain dict of tensors with a row per sample. Raise UserError if its rows are unclear."""
    if type(data) is dict and any(isinstance(key, str) for key in data):
        require_samples("session.prepare(...): training", data, None)
        return True
    return False
