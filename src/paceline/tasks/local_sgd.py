"""Local SGD: a worker takes several optimizer steps by itself and pushes the change of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.core.worker import LocalBatches
from paceline.interfaces import Batch, State, Task


class LocalSteps:
    """A task whose "gradient" is the drift of several steps: weights before minus weights after (arXiv 1805.09767).

    The steps change a copy; the bound weights stay as the server sent them. The optimizer's state belongs to the worker
    and persists between pushes, so a push is a function of the weights received, its batches and `local_state`.
    """

    def __init__(self, task: Task, optimizer: Optimizer, device: torch.device | None = None) -> None:
        self._task, self._optimizer = task, optimizer
        self.layout, self.state_size, self.initial = task.layout, task.state_size, task.initial
        self._moving = torch.zeros(self.layout.size, device=device)
        self._gradient = torch.zeros_like(self._moving)
        self._lr = torch.zeros((), device=device)
        self.local_state: State = {**task.local_state, **optimizer.start(self._moving)}

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._drift = weights, gradient
        self._task.bind(self._moving, self._gradient, state)

    def gradient(self, batch: Batch) -> float | None:
        """Take one step on each of the local batches; return their mean loss, None if there is none."""
        assert isinstance(batch, LocalBatches), "local SGD needs the number of local steps"
        self._moving.copy_(self._weights)
        self._lr.fill_(batch.lr)
        losses: float | None = 0.0
        for part in batch:
            loss = self._task.gradient(part)
            losses = losses + loss if losses is not None and loss is not None else None
            with torch.no_grad():
                self._optimizer.step(self._moving, self.local_state, self._gradient, self._lr)
        torch.sub(self._weights, self._moving, out=self._drift)
        return losses / batch.steps if losses is not None else None
