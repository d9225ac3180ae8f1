"""Rules that correct a stale gradient: `damped` (arXiv 1511.05950), `gap` and `compensated`.

Gap-Aware (arXiv 1909.10802); DC-ASGD-a (arXiv 1609.08326), with the weights that each worker was sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.rules.plain import Plain
from paceline.core.rules.worker_rows import RemembersSent, pushers_place, read
from paceline.interfaces import Arrival, State


class Damped(Plain):
    """weights = optimizer(weights, g) with lr / max(1, staleness)

    A stale push makes a smaller step. Any optimizer fits. Touches no tensors but those of the optimizer.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.zeros(1), Damped(Sgd())
    >>> rule.apply(weights, rule.start(weights), torch.ones(1), Arrival(0, 4, torch.tensor(1.0), 5))
    >>> weights.item()
    -0.25
    """

    name = "damped"

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        lr = arrival.lr / torch.as_tensor(arrival.staleness).clamp(min=1)
        self.optimizer.step(weights, state, update, lr)


REMEMBERED = 1000.0  # the running mean of step sizes spans about this many steps
TINY = 1e-30


class Gap(RemembersSent):
    """weights = optimizer(weights, g / (|weights - sent_i|/C + 1))

    Scales each coordinate down by how far it has moved since the worker got its weights.
    sent_i are the weights that worker i was sent last. C is the mean of |step| of each coordinate, over all steps at
    first and about the last thousand later. Any optimizer fits. Touches 6 tensors and the optimizer's: g, sent_i, C,
    the weights, the scaled push, the step.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.zeros(1), Gap(Sgd(), max_workers=2)
    >>> state = rule.start(weights)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, worker, torch.tensor(1.0), 2))
    ...     print(weights.item())
    -1.0
    -1.5
    """

    name = "gap"
    _scaled = _step = _one = torch.empty(0)  # `start` makes them in the shape of the weights

    def start(self, weights: Tensor) -> State:
        self._scaled, self._step = torch.empty_like(weights), torch.empty_like(weights)
        self._one = weights.new_ones(1)
        count = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        sizes = {"step_size": torch.full_like(weights, TINY), "steps": count}
        return {**self.start_sent(weights), **sizes, **self.optimizer.start(weights)}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        place = pushers_place(state["sent"], arrival)
        moved = torch.sub(weights, read(state["sent"], place), out=self._scaled).abs_()
        gap = torch.addcdiv(self._one, moved, state["step_size"], out=self._scaled)
        scaled = torch.div(update, gap, out=self._scaled)
        self._step.copy_(weights)
        self.optimizer.step(weights, state, scaled, arrival.lr)
        step = self._step.sub_(weights).abs_()
        share = state["steps"].add_(1.0).reciprocal().clamp_(min=1.0 / REMEMBERED)
        state["step_size"].lerp_(step, share.to(weights.dtype)).clamp_(min=TINY)


STRENGTH = 2.0
MEMORY = 0.95
EPSILON = 1e-7


class Compensated(RemembersSent):
    """s = .95 s + .05 g^2;  weights = optimizer(weights, g + 2/sqrt(s + 1e-7) g^2 (weights - sent_i))

    Carries a stale gradient to the current weights, to first order.
    sent_i are the weights that worker i was sent last; g^2 approximates the diagonal of the Hessian. The constants are
    the paper's. Any optimizer fits. Touches 6 tensors and the optimizer's: g, s, sent_i, the weights, two for the sum.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.zeros(1), Compensated(Sgd(), max_workers=2)
    >>> state = rule.start(weights)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, worker, torch.tensor(0.1), 2))
    ...     print(round(weights.item(), 4))
    -0.1
    -0.1359
    """

    name = "compensated"
    _drift = _sum = torch.empty(0)  # `start` makes them in the shape of the weights

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
