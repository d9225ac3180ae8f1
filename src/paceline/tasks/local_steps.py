"""Local steps: a worker that trains by itself for a while and pushes how far it drifted."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.interfaces import Batch, Loader, Task


class LocalSteps:
    """A task whose "gradient" is the drift of several steps: weights before minus weights after (arXiv 1805.09767).

    The optimizer starts anew with every push, so a push is a function of the weights it started from and its batches.
    """

    def __init__(self, task: Task, optimizer: Optimizer, lr: float) -> None:
        self._task, self._optimizer = task, optimizer
        self._lr = torch.tensor(lr)
        self.layout, self.state_size, self.initial = task.layout, task.state_size, task.initial
        self.own = task.own

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._drift = weights, gradient
        self._gradient = torch.zeros_like(gradient)
        self._lr = self._lr.to(weights.device)
        self._task.bind(weights, self._gradient, state)

    def gradient(self, batch: Batch) -> float:
        """Step once for each of the batches in `batch`; the loss is their mean."""
        self._drift.copy_(self._weights)
        state = self._optimizer.start(self._weights)
        losses = []
        for part in batch.inputs:
            losses.append(self._task.gradient(part))
            with torch.no_grad():
                self._optimizer.step(self._weights, state, self._gradient, self._lr)
        self._drift.sub_(self._weights)
        return sum(losses) / len(losses)


class SeveralBatches:
    """Deals a worker's batches in groups: group k holds batches k n to k n + n - 1."""

    def __init__(self, loader: Loader, number: int) -> None:
        self._loader, self._number = loader, number

    def batch(self, number: int) -> Batch:
        parts = [self._loader.batch(number * self._number + place) for place in range(self._number)]
        return Batch(parts, None, sum(part.samples for part in parts), parts[0].key)
