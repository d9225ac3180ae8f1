"""Inputs of a lab run at each update: sample indices, sample weights, keys of dropout masks and augmentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig
from paceline.data.sampler import Batches
from paceline.randomness import mix64_array
from paceline.simulation.lab.arrival_order import NO_WORKER, ArrivalOrder
from paceline.simulation.lab.augmentation import augmented, hashes_of


@dataclass(frozen=True)
class RunInputs:
    """The inputs of one run, one row per update; padding has weight zero."""

    samples: NDArray[np.int32]  # [T, pushes, batch]
    weights: NDArray[np.float32]  # [T, pushes, batch]: 1 / samples of the update
    keys: NDArray[np.uint64]  # [T, pushes]: dropout key per push


def feed_of(trace: ArrivalOrder, work: WorkAssignment, config: RunConfig) -> RunInputs:
    """Return the batches of every push in the arrival order."""
    shape, size = trace.workers.shape, config.batch_size
    samples, filled = np.zeros((*shape, size), np.int32), np.zeros(shape, np.int64)
    for worker in range(config.workers or 1):
        rows, places = np.nonzero(trace.workers == worker)
        if not len(rows):
            continue
        numbers = trace.batches[rows, places]
        order, counts = _all_batches(work.batches(worker, config), int(numbers.max()) + 1, size)
        samples[rows, places], filled[rows, places] = order[numbers], counts[numbers]
    weights = (np.arange(size) < filled[..., None]).astype(np.float32)
    weights /= filled.sum(1).astype(np.float32)[:, None, None]
    workers, batches = (np.where(trace.workers == NO_WORKER, 0, each) for each in (trace.workers, trace.batches))
    return RunInputs(samples, weights, mix64_array(config.seed, workers, batches))


def _all_batches(batches: Batches, number: int, size: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the first `number` batches, padded to `size`, and the number of samples in each."""
    order, counts = np.zeros((number, size), np.int32), np.zeros(number, np.int64)
    for place in range(number):
        indices = batches.indices(place)
        counts[place] = len(indices)
        order[place, : len(indices)] = indices
    return order, counts


@dataclass(frozen=True)
class Images:
    """A data set on the device, as uint8 images."""

    images: Tensor  # uint8 [N, H, W, C]
    labels: Tensor  # int64 [N]
    scale: Tensor
    shift: Tensor
    _padded: dict[int, Tensor] = field(default_factory=dict)

    def select(self, rows: Tensor, hashes: Tensor | None = None, ways: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
        """Return normalised images and labels of the samples `rows`, a tensor of any shape; augment them by `ways`."""
        flat = rows.flatten()
        chosen = self.images.index_select(0, flat)
        if hashes is not None:
            chosen = augmented(chosen, hashes.flatten(1), ways)
        images = torch.addcmul(self.shift, chosen.to(torch.float32), self.scale)
        return images.view(*rows.shape, *images.shape[1:]), self.labels.index_select(0, flat).view(rows.shape)

    def padded(self, margin: int) -> Tensor:
        """Return all images normalised, with `margin` zeros around each (cached)."""
        if margin not in self._padded:
            images = torch.addcmul(self.shift, self.images.to(torch.float32), self.scale)
            wide = F.pad(images, (0, 0, margin, margin, margin, margin))
            behind = 8 * wide[0, 0].numel() + 1024  # a kernel's tile may read past the last patch
            self._padded[margin] = F.pad(wide.flatten(), (0, behind))[: wide.numel()].view(wide.shape)
        return self._padded[margin]


@dataclass(frozen=True, eq=False)
class BatchInputs:
    """The inputs of R runs at each of T updates; `at` is the current update."""

    data: Images
    at: Tensor  # int64 [1]
    samples: Tensor  # int32 [T, R, S]: S = pushes x batch
    weights: Tensor  # [T, R, S]: weight of each sample in its update
    keys: list[tuple[Tensor, Tensor]]  # per dropout layer, int32 [T, R, pushes], low and high halves
    owner: Tensor  # int64 [T or 1, R]: row of `held` at which the gradient is computed
    held: Tensor  # [rows, P]: the workers' copies of the weights
    batch: int
    ways: tuple[str, ...] = ()  # of augmentation
    choices: tuple[Tensor, Tensor] | None = None  # its keys, int32 [T, R, pushes], low and high halves

    def now(self, each: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return both halves of the current update's keys."""
        low, high = (half.index_select(0, self.at)[0] for half in each)
        return low, high

    def batch_now(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images, labels and sample weights of the current update."""
        rows = self.samples.index_select(0, self.at)[0]
        hashes = hashes_of(*self.now(self.choices), self.batch) if self.choices is not None else None
        images, labels = self.data.select(rows, hashes, self.ways)
        return images, labels, self.weights.index_select(0, self.at)[0]

    @property
    def owners_now(self) -> Tensor:
        return self.owner[0] if len(self.owner) == 1 else self.owner.index_select(0, self.at)[0]


Gradients = Callable[[], None]  # computes the gradients and losses of all runs of a batch from its inputs
