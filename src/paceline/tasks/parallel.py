"""Gradients that are the mean over all ranks, sent by DistributedDataParallel while backward goes on."""

from __future__ import annotations

import warnings

from torch.nn.parallel import DistributedDataParallel

from paceline.config import RunConfig
from paceline.division import Work
from paceline.interfaces import Batch, Loader
from paceline.tasks.supervised import SupervisedTask

BUCKET_MIB = 25
"""What is sent at once; a model that is smaller goes as one message."""


def make_parallel(task: SupervisedTask) -> DistributedDataParallel:
    """Have backward exchange gradients; after `bind`, since the buckets are made for the memory weights lie in.

    Only the weights are bound to flat memory: gradients lie in the buckets, and are copied out of them once a step.
    """
    task.flat.hooks = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for broadcast_buffers, 2.6 has not
        parallel = DistributedDataParallel(
            task.model, broadcast_buffers=False, init_sync=False, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
        )
    task.forward = parallel
    return parallel


class EvenShares:
    """A worker's batches; each one's loss is weighed by its samples, so that the mean over ranks is one over samples.

    Batches of one round differ only where an epoch ends; their sizes are known to all by address.
    """

    def __init__(self, loader: Loader, task: SupervisedTask, work: Work, config: RunConfig, worker: int) -> None:
        self._loader, self._task = loader, task
        self._batches = [work.batches(place, config) for place in range(config.workers or 1)]
        self._worker = worker

    def batch(self, number: int) -> Batch:
        sizes = [batches.samples_before(number + 1) - batches.samples_before(number) for batches in self._batches]
        self._task.loss_weight = sizes[self._worker] * len(sizes) / sum(sizes)
        return self._loader.batch(number)
