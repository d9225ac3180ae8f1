"""Rule `compensated`: a stale gradient is carried to where the weights are now, to first order.

DC-ASGD-a (arXiv 1609.08326), with the weights that each worker was sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.core.rules.worker_rows import Sent, pushers_place, read
from paceline.interfaces import Arrival, State

STRENGTH = 2.0
MEMORY = 0.95
EPSILON = 1e-7


class Compensated(Sent):
    """s = .95 s + .05 g^2;  weights = optimizer(weights, g + 2/sqrt(s + 1e-7) g^2 (weights - sent_i))

    sent_i is what worker i was sent last; g^2 stands for the diagonal of the Hessian, the constants are the paper's.
    Any optimizer may be inside. Touches 6 tensors and the optimizer's: g, s, sent_i, the weights, two for the sum.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.zeros(1), Compensated(Sgd(), places=2)
    >>> state = rule.start(weights)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, worker, torch.tensor(0.1), 2))
    ...     print(round(weights.item(), 4))
    -0.1
    -0.1359
    """

    name = "compensated"

    def __init__(self, optimizer: Optimizer, places: int) -> None:
        super().__init__(places)
        self.optimizer = optimizer
        self._drift = self._sum = torch.empty(0)

    def start(self, weights: Tensor) -> State:
        self._drift, self._sum = torch.empty_like(weights), torch.empty_like(weights)
        squares = {"gradient_square": torch.zeros_like(weights)}
        return {**self.start_sent(weights), **squares, **self.optimizer.start(weights)}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        place = pushers_place(state["sent"], arrival)
        square = state["gradient_square"]
        square.mul_(MEMORY).addcmul_(update, update, value=1.0 - MEMORY)
        torch.sub(weights, read(state["sent"], place), out=self._drift)
        curvature = torch.add(square, EPSILON, out=self._sum).rsqrt_().mul_(update).mul_(update)
        compensated = torch.addcmul(update, curvature, self._drift, value=STRENGTH, out=self._sum)
        self.optimizer.step(weights, state, compensated, arrival.lr)
