"""The batches of a user's own loop, by number, until training is over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.hooks import RemovableHandle

from paceline.assembly.task import class_labels
from paceline.assembly.work import divide_work
from paceline.config import RunConfig
from paceline.core.schedules import Budget
from paceline.data.sampler import Batches
from paceline.errors import UserError
from paceline.runtimes.scripts.adopt import UserObjects
from paceline.runtimes.scripts.draws import MAX_DRAWS, DrawnBatches
from paceline.settings.preprocessing import split_of
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

    def next_part(self, weight: float) -> None: ...


class StepBatches(Protocol):
    """The samples of each step of one worker, in the batches that the loop sees."""

    @property
    def per_epoch(self) -> int: ...

    def begin_pass(self, number: int, step: int) -> None: ...

    def parts(self, number: int) -> list[NDArray[np.int64]]: ...


class ShuffledBatches:
    """Batches of `size` of one worker's shard, in an order that Paceline draws."""

    def __init__(self, batches: Batches, size: int) -> None:
        self._batches, self._size = batches, size
        self.per_epoch = batches.per_epoch

    def begin_pass(self, number: int, step: int) -> None:
        """Do nothing: each batch is known by its number."""

    def parts(self, number: int) -> list[NDArray[np.int64]]:
        """Return the batches that make step `number`, counted from the start of training."""
        indices = self._batches.indices(number)
        return [indices[start : start + self._size] for start in range(0, len(indices), self._size)]


@dataclass(frozen=True)
class LoopShare:
    """One worker's share of the data of a loop, and how long it trains on it."""

    batches: StepBatches
    batch_size: int  # of a step; with a sampler that makes batches itself, their mean
    epoch_samples: int  # in one pass of all workers
    quota: int | None
    quota_samples: int  # in all batches of the quota; 0 without one
    skew: float
    order: int | None = None  # checksum of a sampler's first draw, in which all workers agree
    drawn_most: int | None = None  # the most samples of a step, if a sampler makes batches of any size

    @property
    def max_samples(self) -> int:
        """The most samples of a step, which the server holds this worker to."""
        return self.batch_size if self.drawn_most is None else self.drawn_most

    def budget(self, config: RunConfig) -> Budget:
        """The budget of this worker alone."""
        return loop_budget(config, self.epoch_samples, self.quota_samples)


def loop_budget(config: RunConfig, epoch_samples: int, quota_samples: int) -> Budget:
    """How long loops train whose quotas are `quota_samples` together: these, or `--epochs` or `--steps` of all."""
    own = config.epoch_mode == "own"
    samples = quota_samples if own else max(1, round(config.epochs * epoch_samples))
    return Budget(samples, epoch_samples, steps=config.steps, per_worker=own)


def share_data(handed: UserObjects, config: RunConfig, worker: int, accumulate: int) -> LoopShare:
    """Divide the data of a loop over the workers, and return the share of one."""
    if handed.order is not None and handed.order.initialises and worker == 0:
        warnings.warn("worker_init_fn is not called: items are loaded in the process of the loop", stacklevel=3)
    full = split_of(config).kind == "full"
    if handed.order is not None and not handed.order.shuffles:
        drawn = DrawnBatches(handed.order, handed.num_samples, config, worker, accumulate)
        steps = max(1, round(config.epochs * drawn.per_epoch))
        sizes = drawn.batch_size * accumulate, drawn.epoch_samples, steps, drawn.samples_before(steps)
        most = MAX_DRAWS if handed.order.batch_size is None else None
        return LoopShare(drawn, *sizes, skew=0.0, order=None if full else drawn.checksum, drawn_most=most)
    config = replace(config, batch_size=handed.batch_size * accumulate)
    labels = class_labels(targets_of(handed), handed.num_samples, config)
    drops = handed.order is not None and handed.order.drop_last
    work = divide_work(labels, config, handed.batch_size if drops else 1)
    shards = [work.batches(number, config) for number in range(config.workers or 1)]
    own, quota = shards[worker], work.quotas[worker]
    epoch_samples = own.num_samples if full else sum(shard.num_samples for shard in shards)
    samples = own.samples_before(quota) if quota is not None else 0
    batches = ShuffledBatches(own, handed.batch_size)
    return LoopShare(batches, config.batch_size, epoch_samples, quota, samples, work.skew)


class AddressedBatches:
    """This worker's batches. Tensor data sets are indexed as whole tensors, without per-item Python.

    With `in_epochs`, each iteration is one pass over this worker's data. `accumulate` batches make a step. If the last
    step of a pass has fewer, its last batch comes again, with weight 0. The gradient of a batch is weighed by its
    samples, so that losses divided by `accumulate` give the mean over the samples of the step.
    """

    def __init__(
        self,
        session: BatchConsumer,
        handed: UserObjects,
        batches: StepBatches,
        in_epochs: bool = False,
        accumulate: int = 1,
    ) -> None:
        self._session, self._batches, self._fetch = session, batches, fetcher(handed)
        self._parameters = list(handed.model.parameters())
        self._in_epochs, self._accumulate = in_epochs, accumulate
        self._passes = self._begun_at = self._iterations = 0
        self._hooks: list[RemovableHandle] = []

    def __len__(self) -> int:
        """The number of batches in one pass over this worker's data."""
        return self._batches.per_epoch * self._accumulate

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        iteration = self._iterations
        try:
            for batch in self._iterate():
                yield batch
                if iteration != self._iterations:
                    raise UserError("two loops over one loader at a time: a step has one batch; take them in one loop")
        finally:
            if iteration == self._iterations:
                self._scale_gradients(1.0)

    def _iterate(self) -> Iterator[Any]:
        if self._session.finished:
            return
        last = self._begin_pass() if self._in_epochs else None
        while not self._session.finished and (last is None or self._session.step_number < last):
            number = self._session.batch_number
            parts = self._batches.parts(number)
            samples = sum(len(part) for part in parts)
            weights = [len(part) * self._accumulate / samples for part in parts]
            missing = self._accumulate - len(parts)
            self._session.next_batch(number, samples, self._accumulate)
            for part, weight in zip([*parts, *parts[-1:] * missing], [*weights, *[0.0] * missing], strict=True):
                self._session.next_part(weight)
                self._scale_gradients(weight)
                yield self._fetch(part)
            if not self._session.stepped:
                call = "call it (or the step() of the optimizer you passed) once for every batch"
                several = "to step after several, session.prepare(..., accumulate=N)"
                raise UserError(f"a batch was taken but session.step() was not called: {call}; {several}")

    def _begin_pass(self) -> int:
        """Begin the next pass, or the same one again if it had no step. Return the number of the step after it."""
        number, per_epoch = self._session.step_number, self._batches.per_epoch
        left = self._passes * per_epoch - number
        if left > 0 and number > self._begun_at:
            what = f"the loop left the loader after {per_epoch - left} of the {per_epoch} steps of a pass"
            shorter = "for shorter passes, give the loader sampler=RandomSampler(dataset, num_samples=N)"
            raise UserError(f"{what}, and began another: workers share whole passes; {shorter}")
        self._passes += left <= 0
        self._begun_at = number
        self._batches.begin_pass(self._passes - 1, self._session.batch_number)
        return self._passes * per_epoch

    def _scale_gradients(self, factor: float) -> None:
        """From now on, multiply what a backward adds to the gradients by `factor`; clipping sees the right values."""
        for hook in self._hooks:
            hook.remove()
        scaled = [parameter for parameter in self._parameters if parameter.requires_grad and factor != 1.0]
        self._hooks = [
            parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
            for parameter in scaled
        ]


def fetcher(handed: UserObjects) -> Callable[[NDArray[np.int64]], Any]:
    """Return the function that makes a batch of samples, as a `DataLoader` would."""
    dataset, collate = handed.data, handed.collate or default_collate
    many = getattr(dataset, "__getitems__", None)  # as torch asks for a whole batch
    if handed.columns:
        return lambda rows: each(lambda tensor: _select(tensor, rows), dataset)
    if collate is default_collate and type(dataset) is TensorDataset:  # a subclass may return other samples
        return lambda rows: [_select(tensor, rows) for tensor in dataset.tensors]
    if many:
        return lambda rows: collate(many(rows.tolist()))
    return lambda rows: collate([dataset[number] for number in rows.tolist()])


def _select(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


def targets_of(handed: UserObjects) -> Tensor | None:
    """The class numbers of the samples, in their order, if they are known."""
    targets = handed.data.get("labels") if handed.columns else _targets(handed.data)
    return targets if isinstance(targets, Tensor) and targets.shape[:1] == (handed.num_samples,) else None


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
