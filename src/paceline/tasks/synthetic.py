"""A model that takes time and computes nothing: for simulations that ask how fast, not how well."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.messages import Deal
from paceline.core.worker import Stretch
from paceline.interfaces import Batch, Layout, Parameter, State


class TimingModel:
    """`num_parameters` parameters that nobody holds; pushes and weights are empty."""

    def __init__(self, num_parameters: int, batch_size: int) -> None:
        self.num_parameters = num_parameters
        self.layout = Layout((), 0)
        self.state_size = 0
        self.own: State = {}
        self._batch = Batch(None, None, batch_size, 0)

    def initial(self) -> Tensor:
        return torch.empty(0)

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        pass

    def gradient(self, batch: Batch) -> float:
        if isinstance(batch, Stretch):
            batch.samples = self._batch.samples * batch.steps
        return math.nan  # there is no loss to show

    def batch(self, number: int) -> Batch:
        """Every batch is as good as any other."""
        return self._batch

    def mixture(self, states: list[Tensor]) -> Tensor | None:
        return None

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        return {}


ANSWER = (1.0, -0.5, 0.25, 2.0)


ANSWER_TENSOR = torch.tensor(ANSWER)


def part_of(worker: int, deal: Deal | None) -> int:
    """Which part of the data a worker has: its own number, or its place in a deal, moved with every deal."""
    return worker if deal is None else deal.members.index(worker) + 3 * deal.generation


def curvature(part: int, batch: int) -> float:
    """How steep the quadratic of a batch is: from 0.75 to 1.1875, exact in binary."""
    return 0.75 + ((5 * part + 3 * batch) % 8) / 16


def gradient_at(weights: Tensor, part: int, batch: int, out: Tensor) -> Tensor:
    """The gradient of curvature / 2 |weights - answer|^2."""
    return torch.sub(weights, ANSWER_TENSOR, out=out).mul_(curvature(part, batch))


class Quadratic:
    """A worker's task and its data; its state counts the batches it computed. Batches count alike, or 1 to 3.

    The gradient of batch `poison` holds a NaN.
    """

    layout = Layout((Parameter("point", (len(ANSWER),), 0),), len(ANSWER))
    state_size = 1

    def __init__(self, part: int, even: bool, poison: int | None = None) -> None:
        self.own: State = {}
        self._part, self._even, self._poison = part, even, poison

    def initial(self) -> Tensor:
        return torch.zeros(len(ANSWER))

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient, self._state = weights, gradient, state

    def batch(self, number: int) -> Batch:
        return Batch(self._part, None, 2 if self._even else 1 + (self._part + number) % 3, number)

    def gradient(self, batch: Batch) -> float:
        gradient_at(self._weights, batch.inputs, batch.key, self._gradient)
        self._state.add_(1.0)
        if batch.key == self._poison:
            self._gradient[-1] = math.nan
        loss: float = self._gradient.tolist()[0]  # nobody minimises it: it only has to tell pushes apart
        return loss
