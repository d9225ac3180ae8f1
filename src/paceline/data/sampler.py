"""Which samples make batch k of a worker: a function of (seed, worker, deal, k), the same in any process and order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError
from paceline.randomness import rng


class Batches:
    """The endless batches of one worker's shard; each epoch is a fresh permutation, its last batch may be short."""

    def __init__(self, shard: NDArray[np.int64], batch_size: int, seed: int, worker: int, generation: int = 0) -> None:
        if not 1 <= batch_size <= len(shard):
            raise UserError(
                f"batch size {batch_size} was asked for, but worker {worker} has {len(shard)} samples: "
                + ("choose at least 1" if batch_size < 1 else "use smaller batches, fewer workers or more data")
            )
        self.num_samples = len(shard)
        self.per_epoch = -(-len(shard) // batch_size)
        self._shard = np.asarray(shard, dtype=np.int64)
        self._batch_size = batch_size
        self._seed = seed
        self._worker = worker
        self.generation = generation
        """Of the deal that the shard is from; its order is one of its own."""
        self._epoch = -1
        self._order = self._shard

    def indices(self, number: int) -> NDArray[np.int64]:
        """The sample indices of batch `number`, counted from the start of training."""
        assert number >= 0, number
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            dealt = (self.generation,) if self.generation else ()
            self._order = rng(self._seed, "batches", self._worker, epoch, *dealt).permutation(self._shard)
            self._epoch = epoch
        start = place * self._batch_size
        return self._order[start : start + self._batch_size].copy()

    def samples_before(self, number: int) -> int:
        """How many samples batches 0 to `number` - 1 hold together."""
        epochs, place = divmod(number, self.per_epoch)
        return epochs * self.num_samples + place * self._batch_size
