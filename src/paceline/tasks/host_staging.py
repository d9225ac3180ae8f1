"""A task on a GPU behind memory of the host: what a worker needs whose weights come over a network."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.buffers import Memory, Sizes
from paceline.interfaces import Batch, Task


class Staged:
    """Weights cross to the device before each step; gradient and state come back after it.

    What the host has is what the server knows: codecs, doors and checkpoints never meet the device. The task's own
    memory there keeps its addresses, so that a step can be captured. Where the host's is pinned, the device copies.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self.layout, self.state_size, self.initial = task.layout, task.state_size, task.initial
        self.own = task.own

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._results = weights, (gradient, state)
        self._weights_there, *self._results_there = (
            torch.zeros_like(here, device=self._device) for here in (weights, gradient, state)
        )
        self._task.bind(self._weights_there, *self._results_there)

    def gradient(self, batch: Batch) -> float:
        with torch.no_grad():
            self._weights_there.copy_(self._weights, non_blocking=True)
        loss = self._task.gradient(batch)
        with torch.no_grad():
            for here, there in zip(self._results, self._results_there, strict=True):
                here.copy_(there, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return loss


def pinned_memory(sizes: Sizes) -> Memory:
    """A worker's memory that a GPU reads and writes by itself."""
    parts = {name: torch.zeros(count, dtype=dtype).pin_memory() for name, (dtype, count) in sizes.parts().items()}
    return Memory(sizes, parts)
