"""Run a task on a GPU while its weights and gradient are exchanged in host memory, for workers over TCP."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.interfaces import Batch, Task


class HostStagedTask:
    """Copies weights to the device before each step, and gradient and state back after it.

    Codecs, transports and checkpoints see host memory only. The device buffers keep their addresses, so that a step
    can be captured. Copies are asynchronous if the host memory is pinned.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self.layout, self.state_size, self.initial = task.layout, task.state_size, task.initial
        self.local_state = task.local_state

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._results = weights, (gradient, state)
        self._device_weights, *self._device_results = (
            torch.zeros_like(buffer, device=self._device) for buffer in (weights, gradient, state)
        )
        self._task.bind(self._device_weights, *self._device_results)

    def gradient(self, batch: Batch) -> float | None:
        with torch.no_grad():
            self._device_weights.copy_(self._weights, non_blocking=True)
        loss = self._task.gradient(batch)
        with torch.no_grad():
            for result, device_result in zip(self._results, self._device_results, strict=True):
                result.copy_(device_result, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return loss


def pinned_memory(sizes: BufferSizes) -> WorkerBuffers:
    """Return a worker's buffers in pinned memory, which a GPU can copy asynchronously."""
    parts = {name: torch.zeros(count, dtype=dtype).pin_memory() for name, (dtype, count) in sizes.parts().items()}
    return WorkerBuffers(sizes, parts)
