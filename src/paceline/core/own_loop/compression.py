"""The worker's end of an own loop's encoded exchange: each optimizer's part of the weights has codecs of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers, view
from paceline.core.compression import DENSE, Codecs, WorkerCompression
from paceline.core.messages import Push
from paceline.core.own_loop.settings import LoopLayout
from paceline.core.server.updates import Updater
from paceline.interfaces import Layout, State

BLOCK = 256  # values of which the largest is exact in every codec, whatever it rounds the others to


def optimizer_layouts(layout: Layout, loops: Sequence[LoopLayout]) -> list[Layout]:
    """Cut a layout into the parts of a loop's optimizers; without optimizers it is one part."""
    rows, parts = layout.to_rows(), []
    for loop in loops if any(loop.num_parameters for loop in loops) else ():
        parts.append(Layout.from_rows(rows[: loop.num_parameters]))
        rows = rows[loop.num_parameters :]
    return parts or [layout]


def largest_capacities(codecs: Iterable[Codecs]) -> tuple[int | None, int | None]:
    """The largest encoded push and the largest encoded reply of several optimizers, which use one buffer in turn."""
    pushed, pulled = zip(*(one.capacities for one in codecs), strict=True)
    return max((size for size in pushed if size is not None), default=None), max(
        (size for size in pulled if size is not None), default=None
    )


class PartOfModel:
    """The weights of one optimizer, as `WorkerCompression` sees them. The loop keeps all other state to itself."""

    state_size = 0

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.local_state: State = {}

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Do nothing: the model is bound to the whole buffers."""


class LoopCompression:
    """Encodes what an own loop pushes and decodes its replies; without codecs, both are the buffers themselves.

    The error feedback is private to the loop's process, because a new process of the loop begins with a new one.
    """

    def __init__(self, codecs: Sequence[Codecs], layouts: Sequence[Layout], worker: int) -> None:
        self._parts = [PartOfModel(layout) for layout in layouts]
        self._ends = [WorkerCompression(one, worker, part) for one, part in zip(codecs, self._parts, strict=True)]
        self.capacities = largest_capacities(codecs)
        self._update = torch.empty(0)

    def bind(self, memory: WorkerBuffers) -> Tensor:
        """Use this memory from now on; return where the loop writes its gradients, with all optimizers' parts."""
        self._update, is_encoded = memory.update, memory.sizes.payload is not None
        gradient, begin = torch.zeros(memory.sizes.weights) if is_encoded else memory.update, 0
        for end, part in zip(self._ends, self._parts, strict=True):
            span = slice(begin, begin + part.layout.size)
            end.bind(memory.of_optimizer(span, end.sizes), part, gradient[span])
            begin = span.stop
        return gradient

    def send(self, optimizer: int, seq: int, skipped: bool) -> Tensor:
        """Encode push `seq` of an optimizer, and return what it carries; a `skipped` step leaves the memory alone."""
        end = self._ends[optimizer]
        if not end.encodes:
            return self._update
        return end.send_nothing(seq) if skipped else end.send(seq)

    def receive(self, optimizer: int, seq: int, discarded: int | None) -> None:
        """Bring the weights up to the reply to push `seq`; `discarded` counts dropped pushes, if it was one."""
        end = self._ends[optimizer]
        if discarded is not None:
            end.take_back(seq, discarded)
        end.receive()


def as_it_is(layout: Layout) -> LoopCompression:
    """The exchange of a loop without codecs."""
    return LoopCompression([DENSE], [layout], 0)


def gradient_digest(push: Push, updater: Updater) -> bytes | None:
    """A digest that equal gradients of two workers have in common; None if all is zero, or not all is finite.

    Such a gradient tells nothing of the data behind it. A codec may round at random, but never the largest value of a
    block.
    """
    if updater.decoder is None:
        return _digest_of(push.update)
    update = updater.decoder.decode(push.update)
    largest = torch.stack([block.abs().amax() for block in torch.split(update, BLOCK)])
    updater.decoder.free(update)
    return _digest_of(largest)


def _digest_of(values: Tensor) -> bytes | None:
    return hashlib.sha256(view(values)).digest() if values.any() and values.isfinite().all() else None
