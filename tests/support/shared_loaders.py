"""A session that counts, and loaders that share data through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.assembly.task import seed_generators
from paceline.config import RunConfig
from paceline.runtimes.scripts.loading.loader import WorkerLoader, share
from paceline.settings.resolve import resolve


class CountingSession:
    """Seeds generators as a session does, and is over after `limit` batches."""

    def __init__(self, limit: int | None = None) -> None:
        self.finished, self.is_final, self._limit = False, False, limit
        self.begun: list[int] = []  # keys

    def begin_batch(self, key: int) -> None:
        self.begun.append(key)
        seed_generators(key)
        self.finished = self._limit is not None and len(self.begun) >= self._limit

    def begin_empty_pass(self) -> None: ...


def shared(
    data: Any, worker: int = 0, workers: int = 1, session: CountingSession | None = None, **options: Any
) -> WorkerLoader:
    """One worker's share of `data`."""
    of_share = {name: options.pop(name) for name in ("number", "batch_size", "in_passes") if name in options}
    config = resolve(RunConfig(workers=workers, task="script:loop", epoch_mode="own", **options))
    return share(data, session or CountingSession(), config, worker, **of_share)


def first_tensor(batch: Any) -> Tensor:
    while not isinstance(batch, Tensor):
        batch = batch[0]
    return batch


def one_pass(loader: Any) -> list[list[int]]:
    """The sample numbers of each batch of the next pass, if samples hold their own number."""
    return [first_tensor(batch).flatten().int().tolist() for batch in loader]


def equal(one: Any, other: Any) -> bool:
    """Whether two lists of batches are equal, bit by bit."""
    return len(one) == len(other) and all(
        all(torch.equal(a, b) for a, b in zip(left, right, strict=True)) for left, right in zip(one, other, strict=True)
    )
