"""A model that takes time and computes nothing: for simulations that ask how fast, not how well."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.worker import Stretch
from paceline.interfaces import Batch, Layout, Parameter, State


def one_vector(num_parameters: int) -> Layout:
    """A layout of so many floats and no matrices."""
    return Layout((Parameter("all", (num_parameters,), 0),), num_parameters)


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
