"""Rule `damped`: a stale push makes a smaller step (arXiv 1511.05950)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.core.rules.worker_rows import Live
from paceline.interfaces import Arrival, State


class Damped(Live):
    """weights = optimizer(weights, g) with lr / max(1, staleness)

    Any optimizer may be inside. Touches the tensors of that optimizer and no other.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.zeros(1), Damped(Sgd())
    >>> rule.apply(weights, rule.start(weights), torch.ones(1), Arrival(0, 4, torch.tensor(1.0), 5))
    >>> weights.item()
    -0.25
    """

    name = "damped"

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def start(self, weights: Tensor) -> State:
        return self.optimizer.start(weights)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        lr = arrival.lr / torch.as_tensor(arrival.staleness).clamp(min=1)
        self.optimizer.step(weights, state, update, lr)
