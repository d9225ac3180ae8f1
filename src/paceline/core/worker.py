"""The worker: a generator that yields messages and is sent replies, by a process, a simulator or a replay."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.buffers import MakeMemory, WorkerBuffers
from paceline.core.compression import DENSE, Codecs, WorkerCompression
from paceline.core.messages import DataAssignment, Join, Push, Reply, loss_of_push
from paceline.interfaces import Batch, Layout, Loader, Parameter, Task

Redeal: TypeAlias = Callable[[DataAssignment], Loader]
"""Returns a worker's data under another assignment, if the membership of a run can change."""


class LocalBatches(Batch):
    """Consecutive batches for local steps at `lr`; each is loaded, and its samples are counted, at its step."""

    __slots__ = ("first", "loader", "lr", "steps")

    def __init__(self, loader: Loader, first: int, steps: int, lr: float) -> None:
        super().__init__(None, None, 0, 0)
        self.loader, self.first, self.steps, self.lr = loader, first, steps, lr

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.first, self.first + self.steps):
            batch = self.loader.batch(number)
            self.samples += batch.samples
            if batch.weight is not None:
                self.weight = (self.weight or 0.0) + batch.weight
            yield batch


class CountedLoader(Loader):
    """A worker's data, and how many batches were taken of it: the worker's progress within a push."""

    def __init__(self, loader: Loader, reassign: Redeal | None) -> None:
        self.loader, self._reassign, self.count = loader, reassign, 0

    def batch(self, number: int) -> Batch:
        """Return a batch, and count it."""
        self.count += 1
        return self.loader.batch(number)

    def reassign(self, assignment: DataAssignment) -> Loader:
        """Go on with the worker's data under another assignment."""
        assert self._reassign is not None, "the membership of this run cannot change"
        self.loader = self._reassign(assignment)
        return self


def work(
    task: Task,
    loader: Loader,
    join: Join,
    end: WorkerCompression,
    gradient: Tensor,
    state: Tensor,
    reassign: Redeal | None = None,
) -> Generator[Join | Push, Reply, None]:
    """Join, then push the gradient of each batch that a reply names, until a reply says that it is over.

    `end`, `gradient`, `state` and `task` are bound to the same memory. The driver writes the weights of a reply into
    that memory before it sends the reply.
    """
    reply, assignment, discarded = (yield join), None, 0
    end.begin()
    while not reply.finished:
        if reply.discarded != discarded:
            discarded = reply.discarded
            end.take_back(reply.serial - 1, discarded)
        if end.codecs.pull is not None:
            end.receive()
        if reply.assignment != assignment and reassign is not None:
            assert reply.assignment is not None, "after its first assignment, a run always has one"
            assignment, loader = reply.assignment, reassign(reply.assignment)
        first, steps = reply.batch, reply.steps
        batch = LocalBatches(loader, first, steps, reply.lr) if steps else loader.batch(first)
        loss = loss_of_push(task.gradient(batch))
        seq = reply.serial  # one push per reply, so both have the same number
        update = end.send(seq) if end.encodes else gradient
        named = (join.worker, join.incarnation, seq, reply.serial)
        reply = yield Push(*named, batch.samples, loss, update, state, batch.weight)


class LocalWorker:
    """One running worker: its memory (private, unless `make_memory` makes it), its generator, its next reply."""

    def __init__(
        self,
        task: Task,
        loader: Loader,
        join: Join,
        device: torch.device | None = None,
        codecs: Codecs = DENSE,
        make_memory: MakeMemory | None = None,
        reassign: Redeal | None = None,
    ) -> None:
        self.join = join
        self._end = WorkerCompression(codecs, join.worker, task, device)
        sizes = self._end.sizes
        self.memory = WorkerBuffers.private(sizes, device) if make_memory is None else make_memory(sizes)
        self._end.bind(self.memory, task)
        self.pending: Reply | None = None
        self._data = data = CountedLoader(loader, reassign)
        redeal = data.reassign if reassign is not None else None
        self._generator = work(task, data, join, self._end, self.memory.update, self.memory.state, redeal)
        next(self._generator)

    @property
    def num_steps(self) -> int:
        """How many steps this worker has begun. Another thread may read it while the worker computes."""
        return self._data.count

    def load_state(self, local_state: Tensor) -> None:
        """Load the worker's own state from these bytes."""
        self._end.load_state(local_state)

    def push(self) -> Push | None:
        """Act on the pending reply; return the next push, or None if the reply said that it is over."""
        assert self.pending is not None, "a worker without a reply has nothing to compute"
        reply, self.pending = self.pending, None
        try:
            message = self._generator.send(reply)
        except StopIteration:
            return None
        assert isinstance(message, Push)
        return message


def one_vector(num_parameters: int) -> Layout:
    """A layout of one vector of `num_parameters` floats."""
    return Layout((Parameter("all", (num_parameters,), 0),), num_parameters)
