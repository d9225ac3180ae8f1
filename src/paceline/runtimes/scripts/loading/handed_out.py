"""Which batches of a loader are in the gradients of a push: a loop may take the next batch before it steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.tasks.nested import tensors_of

MAX_WAITING = 1024
"""Batches that are remembered until the next push; earlier ones count as trained on."""


@dataclass(frozen=True, eq=False)
class HandedBatch:
    """A batch that no push is known to hold."""

    place: tuple[int, int]  # its pass, and how many batches of it were handed out then
    samples: int
    tensors: list[weakref.ref[Tensor]] = field(repr=False)

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that the loop still has."""
        return [tensor for one in self.tensors if (tensor := one()) is not None and tensor.numel()]

    def shares_memory(self, inputs: Sequence[Tensor]) -> bool:
        """Whether one of the inputs is in this batch, or a view of a tensor in it."""
        spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in self.kept]
        return any(begin <= one.data_ptr() < end for one in inputs for begin, end in spans)


class HandedOut:
    """The batches of one loader that were handed out, up to the newest push.

    A push holds the batches that a model was called with. If no tensor of theirs is its input (they were divided by
    255, say), the first call after a batch is handed out uses the oldest batch that the loop still has: one that it
    skipped is gone. If it has none (they were copied to a GPU), it uses all. If no model is called, a push holds all.
    """

    def __init__(self) -> None:
        self.trained = (0, 0)  # where the loop goes on after the newest push
        self.is_unclear = False  # whether batches were passed over that the loop may have copies of
        self.waiting: deque[HandedBatch] = deque(maxlen=MAX_WAITING)
        self._used = 0  # samples of the batches that a model was called with, since the newest push
        self._place = (0, 0)  # of the newest of these
        self._is_due = self._is_over = False  # whether the next call uses a batch; whether the pass is over
        self._ever_called = False
        self._looked_at: HandedBatch | None = None

    def add(self, place: tuple[int, int], samples: int, batch: Any) -> None:
        """Note a batch that is handed out."""
        self._is_due, self._is_over = True, False
        self.waiting.append(HandedBatch(place, samples, [weakref.ref(tensor) for tensor in _in_memory(batch)]))

    def look(self, batch: Any) -> None:
        """Note a batch of a finished pass that the script looks at, or None: it does so no longer."""
        tensors = [] if batch is None else [weakref.ref(tensor) for tensor in _in_memory(batch)]
        self._looked_at = None if batch is None else HandedBatch((0, 0), 0, tensors)

    def trains_on_look(self, inputs: Any, is_other_waiting: bool) -> bool:
        """Whether a model is called with what the script only looked at: that batch was trained on before."""
        looked = self._looked_at
        return looked is not None and (not is_other_waiting or looked.shares_memory(_in_memory(inputs)))

    def end_pass(self) -> None:
        """Note the end of a pass: each further call uses a batch that waits."""
        self._is_over = True

    def forward(self, inputs: Any) -> None:
        """Note that a model is called, to be trained on these inputs."""
        self._ever_called = True
        given = _in_memory(inputs) if self.waiting else []
        found = next((one for one in reversed(self.waiting) if one.shares_memory(given)), None)
        if found is None and (self._is_due or self._is_over) and self.waiting:
            found = next((one for one in self.waiting if one.kept), self.waiting[-1])
            first = next(one for one in self.waiting if one.place[0] == found.place[0])
            self.is_unclear |= found is not first
        if found is not None:
            self._use_up_to(found)
            self._is_due = False

    def push(self) -> int:
        """Note a push; return the samples in the batches that no earlier one holds."""
        if not self._ever_called and self.waiting:
            self._use_up_to(self.waiting[-1])
        self.trained, samples, self._used = self._place, self._used, 0
        return samples

    def go_on(self, place: tuple[int, int]) -> None:
        """Go on where an earlier incarnation of the worker was."""
        self.trained = self._place = place

    def _use_up_to(self, batch: HandedBatch) -> None:
        while batch in self.waiting:
            self._used += self.waiting.popleft().samples
        self._place = batch.place


def _in_memory(batch: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(batch) if tensor.layout is torch.strided]
