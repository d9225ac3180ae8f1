"""Synthetic tasks: one without computation, for timing simulations, and a quadratic, for the soak test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.messages import DataAssignment
from paceline.core.worker import LocalBatches
from paceline.interfaces import Batch, Layout, Parameter, State


class TimingModel:
    """A model of `num_parameters` parameters that are not allocated; pushes and weights are empty."""

    def __init__(self, num_parameters: int, batch_size: int) -> None:
        self.num_parameters = num_parameters
        self.layout = Layout((), 0)
        self.state_size = 0
        self.local_state: State = {}
        self._batch = Batch(None, None, batch_size, 0)

    def initial(self) -> Tensor:
        return torch.empty(0)

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        pass

    def gradient(self, batch: Batch) -> None:
        if isinstance(batch, LocalBatches):
            batch.samples = self._batch.samples * batch.steps

    def batch(self, number: int) -> Batch:
        """Return the same batch for each number."""
        return self._batch

    def mixture(self, states: list[Tensor], samples: Sequence[int] | None = None) -> Tensor | None:
        return None

    def estimated(self, weights: Tensor, state: Tensor) -> Tensor:
        return state

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        return {}


OPTIMUM = (1.0, -0.5, 0.25, 2.0)
_OPTIMUM_TENSOR = torch.tensor(OPTIMUM)


def shard_of(worker: int, assignment: DataAssignment | None) -> int:
    """Return the worker's shard: its number, or its place in the data assignment, shifted with each assignment."""
    return worker if assignment is None else assignment.members.index(worker) + 3 * assignment.generation


def curvature(shard: int, batch: int) -> float:
    """Return the curvature of a batch's quadratic: from 0.75 to 1.1875, exact in binary."""
    return 0.75 + ((5 * shard + 3 * batch) % 8) / 16


def gradient_at(weights: Tensor, shard: int, batch: int, out: Tensor) -> Tensor:
    """Return the gradient of curvature / 2 |weights - optimum|^2."""
    return torch.sub(weights, _OPTIMUM_TENSOR, out=out).mul_(curvature(shard, batch))


class Quadratic:
    """A quadratic task with its own batches; its state counts the batches computed.

    Batches have 2 samples each, or 1 to 3 if not `even`; if `weighted`, also a weight of 0.5 to 3.5. The gradient of
    batch `poison` contains a NaN.
    """

    layout = Layout((Parameter("point", (len(OPTIMUM),), 0),), len(OPTIMUM))
    state_size = 1

    def __init__(self, shard: int, even: bool, poison: int | None = None, weighted: bool = False) -> None:
        self.local_state: State = {}
        self._shard, self._even, self._poison, self._weighted = shard, even, poison, weighted

    def initial(self) -> Tensor:
        return torch.zeros(len(OPTIMUM))

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient, self._state = weights, gradient, state

    def batch(self, number: int) -> Batch:
        weight = 0.5 + (self._shard + 3 * number) % 4 if self._weighted else None
        return Batch(self._shard, None, 2 if self._even else 1 + (self._shard + number) % 3, number, weight)

    def gradient(self, batch: Batch) -> float:
        gradient_at(self._weights, batch.inputs, batch.key, self._gradient)
        self._state.add_(1.0)
        if batch.key == self._poison:
            self._gradient[-1] = math.nan
        loss: float = self._gradient.tolist()[0]  # not a real loss: it only distinguishes pushes
        return loss
