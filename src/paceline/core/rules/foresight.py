"""Rule `foresight`: every worker's latest gradient kept, momentum by the round, and weights of the time a push counts.

Paceline's own: the memory of DuDe-ASGD (arXiv 2405.16966) with a look ahead after DANA (arXiv 1907.11612).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Prepared
from paceline.core.rules.cached import forget, remember
from paceline.core.rules.per_worker import Live, pusher, put_back, read, table
from paceline.interfaces import Arrival, State

HORIZON = 1.5
"""Intervals looked ahead: a push comes one after its weights were sent, then counts for half of one on average."""
SMOOTHING = 0.1


class Foresight(Live):
    """Step along the mean u of every worker's latest gradient; send worker i the weights expected m_i updates on.

    total += g - c_i;  c_i = g;  u = total / n;  v = gamma_u v + u;  weights -= lr_u v
    gamma_u = gamma^(1/max_j tau_j);  lr_u = lr (1 - gamma_u)/(1 - gamma)
    worker i is sent  weights - lr_u (K v + (m_i - K)/(1 - gamma_u) u),  m_i = 1.5 (tau_i - 1),
    K = gamma_u (1 - gamma_u^m_i)/(1 - gamma_u):  the next m_i steps, were u to stay as it is.
    tau_i, the updates from one arrival of worker i to its next, is a running mean of staleness + 1 that begins at n.

    The momentum is the method, so no other optimizer can be inside: Adam's steps have no such sum. A newcomer, whose
    interval nobody knows, is sent the live weights. Touches 5 tensors: g, c_i, total, v, the weights.

    >>> weights, rule = torch.zeros(1), Foresight(0.0, places=2)
    >>> state, sent = rule.start(weights), torch.zeros(1)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, 1, torch.tensor(1.0), 2))
    >>> rule.weights_for(weights, state, 1, sent)
    >>> weights.item(), sent.item()
    (-1.5, -3.0)
    """

    name = "foresight"

    def __init__(
        self,
        momentum: float | Tensor,
        places: int,
        prepared: Prepared | None = None,
        horizon: float = HORIZON,
        smoothing: float = SMOOTHING,
    ) -> None:
        self.momentum, self.places = torch.as_tensor(momentum, dtype=torch.float64), places
        self.prepared = prepared or Prepared()
        self.horizon, self.smoothing = horizon, smoothing

    def start(self, weights: Tensor) -> State:
        self.momentum = self.momentum.to(weights.device)
        numbers = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {
            "cache": table(weights, self.places),
            "total": torch.zeros_like(weights),
            "velocity": torch.zeros_like(weights),
            "interval": table(numbers, self.places),
            "decay": numbers.clone(),
            "step": numbers.clone(),
            "share": numbers,
        }

    def leave(self, state: State, worker: int) -> None:
        forget(state, worker)
        read(state["interval"], worker).zero_()

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        worker = pusher(arrival)
        self._measure(state, worker, arrival)
        remember(state, worker, self.prepared.prepare(weights, update))
        decay, step, share = (state[name].to(weights.dtype) for name in ("decay", "step", "share"))
        velocity = state["velocity"]
        velocity.mul_(decay).addcmul_(state["total"], share)
        weights.addcmul_(velocity, step, value=-1.0)

    def _measure(self, state: State, worker: int | Tensor, arrival: Arrival) -> None:
        """How far apart the worker's arrivals are, and what the longest such interval makes of momentum and step."""
        interval = read(state["interval"], worker)
        interval.add_((interval == 0) * arrival.num_live)
        interval.mul_(1.0 - self.smoothing).add_(arrival.staleness + 1, alpha=self.smoothing)
        put_back(state["interval"], worker, interval)
        longest = state["interval"].amax(-2)
        torch.pow(self.momentum, longest.reciprocal_(), out=state["decay"])
        torch.mul((1.0 - state["decay"]) / (1.0 - self.momentum), arrival.lr, out=state["step"])
        state["share"].copy_(torch.as_tensor(arrival.num_live, dtype=torch.float64)).reciprocal_()

    def weights_for(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        decay, step = state["decay"], state["step"]
        ahead = (read(state["interval"], worker) - 1.0).clamp_(min=0.0).mul_(self.horizon)
        kept = 1.0 - decay
        of_velocity = decay * (1.0 - decay**ahead) / kept
        of_mean = (ahead - of_velocity) / kept * state["share"]
        torch.addcmul(weights, state["velocity"], (of_velocity * step).to(weights.dtype), value=-1.0, out=out)
        out.addcmul_(state["total"], (of_mean * step).to(weights.dtype), value=-1.0)
