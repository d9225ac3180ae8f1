"""Local steps: a worker that trains by itself for a while and pushes how far it drifted."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.core.worker import Stretch
from paceline.interfaces import Batch, State, Task


class LocalSteps:
    """A task whose "gradient" is the drift of several steps: weights before minus weights after (arXiv 1805.09767).

    Steps are made on a copy: the bound weights stay what the server sent. The optimizer's state is the worker's own and
    lasts from push to push, so a push is a function of the weights sent, its batches and `own`.
    """

    def __init__(self, task: Task, optimizer: Optimizer, device: torch.device | None = None) -> None:
        self._task, self._optimizer = task, optimizer
        self.layout, self.state_size, self.initial = task.layout, task.state_size, task.initial
        self._moving = torch.zeros(self.layout.size, device=device)
        self._gradient = torch.zeros_like(self._moving)
        self._lr = torch.zeros((), device=device)
        self.own: State = {**task.own, **optimizer.start(self._moving)}

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._drift = weights, gradient
        self._task.bind(self._moving, self._gradient, state)

    def gradient(self, batch: Batch) -> float:
        """Step once on each batch of a stretch; the loss is their mean."""
        assert isinstance(batch, Stretch), "the server of local steps says how many"
        self._moving.copy_(self._weights)
        self._lr.fill_(batch.lr)
        losses = 0.0
        for part in batch:
            losses += self._task.gradient(part)
            with torch.no_grad():
                self._optimizer.step(self._moving, self.own, self._gradient, self._lr)
        torch.sub(self._weights, self._moving, out=self._drift)
        return losses / batch.steps
