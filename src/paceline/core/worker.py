"""The worker: a generator that yields what it sends and is sent what it is told.

It cannot tell whether a process, a simulator or a replay drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from ctypes import c_float
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.buffers import MakeMemory, Memory, load_own
from paceline.core.compression import DENSE, Codecs, WorkerEnd
from paceline.core.messages import Deal, Join, Push, Reply
from paceline.interfaces import Batch, Layout, Loader, Parameter, Task

Redeal: TypeAlias = Callable[[Deal], Loader]
"""A worker's data under another deal, where the membership of a run can change."""


class Stretch(Batch):
    """Batches in a row that are stepped on locally at `lr`; each is loaded when its step comes, and counted then."""

    __slots__ = ("first", "loader", "lr", "steps")

    def __init__(self, loader: Loader, first: int, steps: int, lr: float) -> None:
        super().__init__(None, None, 0, 0)
        self.loader, self.first, self.steps, self.lr = loader, first, steps, lr

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.first, self.first + self.steps):
            batch = self.loader.batch(number)
            self.samples += batch.samples
            yield batch


def work(
    task: Task,
    loader: Loader,
    join: Join,
    end: WorkerEnd,
    gradient: Tensor,
    state: Tensor,
    redeal: Redeal | None = None,
) -> Generator[Join | Push, Reply, None]:
    """Join, then push the gradient of each batch dealt, until told that it is over.

    `end`, `gradient` and `state` are bound to the memory that `task` is bound to. The caller sends a reply only after
    its weights are in that memory.
    """
    reply, deal = (yield join), None
    while not reply.over:
        if end.decodes:
            end.receive()
        if reply.deal != deal and redeal is not None:
            assert reply.deal is not None, "a run that was dealt anew is not dealt as at first again"
            deal, loader = reply.deal, redeal(reply.deal)
        first, steps = reply.batch, reply.steps
        batch = Stretch(loader, first, steps, reply.lr) if steps else loader.batch(first)
        loss = c_float(task.gradient(batch)).value  # as the log keeps it; one that is too large becomes infinite
        seq = reply.serial  # one push a reply, so the reply's number names the push too
        update = end.send(seq) if end.encodes else gradient
        reply = yield Push(join.worker, join.incarnation, seq, reply.serial, batch.samples, loss, update, state)


class Seat:
    """A worker at work: its memory (this process's own, unless made otherwise), its generator, its next reply."""

    def __init__(
        self,
        task: Task,
        loader: Loader,
        join: Join,
        device: torch.device | None = None,
        codecs: Codecs = DENSE,
        make_memory: MakeMemory | None = None,
        redeal: Redeal | None = None,
    ) -> None:
        self.join = join
        self._end = WorkerEnd(codecs, join.worker, task, device)
        sizes = self._end.sizes
        self.memory = Memory.private(sizes, device) if make_memory is None else make_memory(sizes)
        self._end.bind(self.memory, task)
        self.pending: Reply | None = None
        self._generator = work(task, loader, join, self._end, self.memory.update, self.memory.state, redeal)
        next(self._generator)

    def recall(self, own: Tensor) -> None:
        """Put the worker's own state back to what these bytes say."""
        load_own(self._end.own, own)

    def push(self) -> Push | None:
        """Act on the pending reply: the next push, or None when it said that it is over."""
        assert self.pending is not None, "a seat that was not answered has nothing to compute"
        reply, self.pending = self.pending, None
        try:
            message = self._generator.send(reply)
        except StopIteration:
            return None
        assert isinstance(message, Push)
        return message


def one_vector(num_parameters: int) -> Layout:
    """A layout of so many floats and no matrices."""
    return Layout((Parameter("all", (num_parameters,), 0),), num_parameters)
