"""What a session and its loaders tell each other: the facts of the data, and the start of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.config import RunConfig
from paceline.randomness import mix64
from paceline.tasks.nested import tensors_of

MAX_SAMPLES = 100_000_000
"""The most samples of a batch whose size is not known in advance."""


class LoopSession(Protocol):
    """What a loader needs of its session."""

    finished: bool

    @property
    def is_final(self) -> bool: ...

    def begin_batch(self, key: int) -> None: ...

    def begin_empty_pass(self) -> None: ...


@dataclass(frozen=True)
class DataFacts:
    """What the server learns of one worker's data."""

    batch_size: int  # the usual samples of a batch; 1 if unknown
    epoch_samples: int | None  # in one pass of all workers; None if unknown
    batches: int | None  # in one pass of this worker; None if unknown
    order: int | None = None  # checksum of the first draws, in which all workers agree; None if they need not
    skew: float = 0.0  # of labels
    max_samples: int = MAX_SAMPLES  # of one batch
    unresumable: str | None = None  # what cannot be resumed exactly; None: everything can
    keeps_state: bool = False  # whether a stream goes on exactly from the state that it has
    note: str | None = None  # what the user should know about how the data is shared


def told(known: DataFacts | None) -> dict[str, Any]:
    """Return what a loop's first message says of its data; None: it draws its own."""
    known = known if known is not None else DataFacts(batch_size=1, epoch_samples=None, batches=None)
    facts = {name: getattr(known, name) for name in ("order", "skew", "batch_size")}
    return {**facts, "num_samples": known.epoch_samples}


class PassReader(Protocol):
    """One worker's batches, pass by pass. Each begins with the session before it is handed out."""

    @property
    def facts(self) -> DataFacts: ...

    def read(self, number: int, start: int) -> Iterator[Any]: ...

    def skip(self, number: int) -> None: ...

    def is_over(self, number: int, start: int) -> bool: ...

    def num_batches(self) -> int: ...

    def state(self) -> dict[str, Any] | None: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class BatchKeys:
    """The keys of one loader's batches, and their start in the session."""

    def __init__(self, session: LoopSession, config: RunConfig, worker: int, loader: int) -> None:
        self._session, self._seed, self._worker, self._loader = session, config.seed, worker, loader
        self.samples = 0  # of the newest batch; 0 if it is evaluated, not trained on

    def of_pass(self, number: int) -> int:
        """Return the key of pass `number`."""
        return mix64(self._seed, self._worker, self._loader, number)

    def of_batch(self, number: int, batch: int) -> int:
        """Return the key of one batch of pass `number`."""
        return mix64(self._seed, self._worker, self._loader, number, batch)

    def begin(self, key: int, samples: int) -> None:
        """Begin a batch: the session seeds all generators by its key."""
        self.samples = samples if torch.is_grad_enabled() else 0
        self._session.begin_batch(key)


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor in a batch, or 1 if it has none.

    >>> import torch
    >>> samples_in({"ids": torch.zeros(3, 2)}), samples_in("text"), samples_in([torch.tensor(1.0)])
    (3, 1, 1)
    """
    found = tensors_of(batch) if not isinstance(batch, str) else []
    return len(found[0]) if found and found[0].dim() else 1


def length_of(thing: Any) -> int | None:
    """Return the length of something, or None if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def own_share(num_batches: int, worker: int, workers: int) -> int:
    """Return how many of the batches worker `worker` takes, if it takes every n-th.

    >>> [own_share(7, worker, 3) for worker in range(3)]
    [3, 2, 2]
    """
    return len(range(worker, num_batches, workers))
