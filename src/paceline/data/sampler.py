"""Sampler of one worker: batch k is a function of (seed, worker, assignment, k), in any process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError
from paceline.randomness import rng


class Batches:
    """The endless batches of one worker's shard: a new permutation per epoch, whose last batch may be short.

    An epoch has a multiple of `multiple_of` samples: the rest of its permutation is left out.
    """

    def __init__(
        self,
        shard: NDArray[np.int64],
        batch_size: int,
        seed: int,
        worker: int,
        generation: int = 0,
        multiple_of: int = 1,
    ) -> None:
        if not 1 <= batch_size <= len(shard):
            raise UserError(
                f"batch size {batch_size} was asked for, but worker {worker} has {len(shard)} samples: "
                + ("choose at least 1" if batch_size < 1 else "use smaller batches, fewer workers or more data")
            )
        self.num_samples = len(shard) // multiple_of * multiple_of
        self.per_epoch = -(-self.num_samples // batch_size)
        self._shard = np.asarray(shard, dtype=np.int64)
        self._batch_size, self._seed, self._worker = batch_size, seed, worker
        self.generation = generation
        """Number of the data assignment that the shard is from; each assignment has its own order."""
        self._epoch, self._order = -1, self._shard

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the sample indices of batch `number`, counted from the start of training."""
        assert number >= 0, number
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            generation = (self.generation,) if self.generation else ()
            self._order = rng(self._seed, "batches", self._worker, epoch, *generation).permutation(self._shard)
            self._epoch = epoch
        start = place * self._batch_size
        return self._order[start : min(start + self._batch_size, self.num_samples)].copy()

    def samples_before(self, number: int) -> int:
        """Return the number of samples in batches 0 to `number` - 1."""
        return samples_before(number, self.num_samples, self._batch_size)


def samples_before(number: int, num_samples: int, batch_size: int) -> int:
    """Return the number of samples in batches 0 to `number` - 1 of a shard of `num_samples`.

    >>> [samples_before(number, 10, 4) for number in range(5)]
    [0, 4, 8, 10, 14]
    """
    epochs, place = divmod(number, -(-num_samples // batch_size))
    return epochs * num_samples + place * batch_size
