"""Rule `plain`: one shared optimizer stepped on each arrival, as the published parameter servers do."""

from __future__ import annotations

from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.interfaces import Arrival, State


class Plain:
    """weights = optimizer(weights, update); every worker is sent a plain copy.

    >>> import torch
    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.ones(2), Plain(Sgd())
    >>> rule.apply(weights, rule.start(weights), torch.ones(2), Arrival(0, 0, torch.tensor(0.5), 1))
    >>> weights.tolist()
    [0.5, 0.5]
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def start(self, weights: Tensor) -> State:
        return self.optimizer.start(weights)

    def join(self, state: State, worker: int) -> None:
        pass

    def leave(self, state: State, worker: int) -> None:
        pass

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        self.optimizer.step(weights, state, update, arrival.lr)

    def weights_for(self, weights: Tensor, state: State, worker: int, out: Tensor) -> None:
        out.copy_(weights)
