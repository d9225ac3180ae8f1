"""Rule `plain`: one shared optimizer stepped on each arrival, as the published parameter servers do."""

from __future__ import annotations

from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.core.rules.per_worker import Live
from paceline.interfaces import Arrival, State


class Plain(Live):
    """weights = optimizer(weights, update); every worker is sent a plain copy.

    >>> import torch
    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.ones(2), Plain(Sgd())
    >>> rule.apply(weights, rule.start(weights), torch.ones(2), Arrival(0, 0, torch.tensor(0.5), 1))
    >>> weights.tolist()
    [0.5, 0.5]
    """

    name = "plain"

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def start(self, weights: Tensor) -> State:
        return self.optimizer.start(weights)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        self.optimizer.step(weights, state, update, arrival.lr)
