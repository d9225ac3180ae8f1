"""Gradients averaged over all ranks by DistributedDataParallel, during backward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig
from paceline.data.sampler import Batches
from paceline.errors import UserError
from paceline.interfaces import Batch, Loader
from paceline.tasks.supervised import SupervisedTask

BUCKET_MIB = 25  # the size of a bucket. A smaller model is sent as one message.


def make_parallel(task: SupervisedTask) -> DistributedDataParallel:
    """Make backward exchange gradients. Call it after `bind`: buckets are made for the bound weights.

    Only the weights are bound to flat memory: gradients are in the buckets, and are copied out once per step.
    """
    task.flat.grad_in_place = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for broadcast_buffers, 2.6 has not
        parallel = GradientCoverage(
            task.model, broadcast_buffers=False, init_sync=False, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
        )
    task.forward = parallel
    return parallel


class GradientCoverage(DistributedDataParallel):
    """Requires a gradient of every parameter. The step after one that left a parameter without raises UserError."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise UserError(
                "a step left some parameters without a gradient, and ranks of allreduce wait for all of them: use "
                "--strategy sync, in which such a gradient counts as zero, or freeze what is never used"
            ) from None


class SampleWeightedLoader:
    """A worker's batches, with losses weighted by samples, so that the mean over ranks is the mean over samples.

    Batch sizes differ only at the end of an epoch, and every rank can compute all of them. If the task weighs batches,
    every rank computes the weights of all, from the targets that each rank has.
    """

    def __init__(
        self, loader: Loader, task: SupervisedTask, work: WorkAssignment, config: RunConfig, worker: int
    ) -> None:
        self._loader, self._task, self._worker = loader, task, worker
        self._batches = [work.batches(place, config) for place in range(config.workers or 1)]

    def batch(self, number: int) -> Batch:
        weights = [self._weight(batches, number) for batches in self._batches]
        self._task.loss_weight = weights[self._worker] * len(weights) / sum(weights)
        return self._loader.batch(number)

    def _weight(self, batches: Batches, number: int) -> float:
        if self._task.weight is None:
            return batches.samples_before(number + 1) - batches.samples_before(number)
        return self._task.weight_of(torch.from_numpy(batches.indices(number)))
