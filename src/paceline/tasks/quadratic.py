"""A problem whose answer is known: every batch is a quadratic, and all have their minimum in the same place.

So each push points to the one answer, whoever sends it and however often: no mix of workers has another optimum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.interfaces import Batch, Layout, Parameter, State

ANSWER = (1.0, -0.5, 0.25, 2.0)
ANSWER_TENSOR = torch.tensor(ANSWER)


def curvature(worker: int, batch: int) -> float:
    """How steep the quadratic of a batch is: from 0.75 to 1.1875, exact in binary."""
    return 0.75 + ((5 * worker + 3 * batch) % 8) / 16


def gradient_at(weights: Tensor, worker: int, batch: int, out: Tensor) -> Tensor:
    """The gradient of curvature / 2 |weights - answer|^2."""
    return torch.sub(weights, ANSWER_TENSOR, out=out).mul_(curvature(worker, batch))


class Quadratic:
    """A worker's task and its data; its state counts the batches it computed. Batches count alike, or 1 to 3.

    The gradient of batch `poison` holds a NaN.
    """

    layout = Layout((Parameter("point", (len(ANSWER),), 0),), len(ANSWER))
    state_size = 1

    def __init__(self, worker: int, even: bool, poison: int | None = None) -> None:
        self.own: State = {}
        self._worker, self._even, self._poison = worker, even, poison

    def initial(self) -> Tensor:
        return torch.zeros(len(ANSWER))

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient, self._state = weights, gradient, state

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 2 if self._even else 1 + (self._worker + number) % 3, number)

    def gradient(self, batch: Batch) -> float:
        gradient_at(self._weights, self._worker, batch.key, self._gradient)
        self._state.add_(1.0)
        if batch.key == self._poison:
            self._gradient[-1] = math.nan
        loss: float = self._gradient.tolist()[0]  # nobody minimises it: it only has to tell pushes apart
        return loss
