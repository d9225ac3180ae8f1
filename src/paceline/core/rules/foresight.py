"""Rule `foresight`: every worker's latest gradient kept, momentum by the round, and weights of the time a push counts.

Paceline's own: the memory of DuDe-ASGD (arXiv 2405.16966) with a look ahead after DANA (arXiv 1907.11612).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Prepared
from paceline.core.rules.cached import forget, remember
from paceline.core.rules.per_worker import Live, keep_row, place_in, pushers_place, read, table
from paceline.core.rules.scalars import Scalar, add_scaled, at_least, keep, load, scale
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
        self.momentum, self.places = momentum, places
        self.prepared = prepared or Prepared()
        self.horizon, self.smoothing = horizon, smoothing

    def start(self, weights: Tensor) -> State:
        self.prepared.move_to(weights.device)
        if isinstance(self.momentum, Tensor):
            self.momentum = self.momentum.to(weights.device, torch.float64)
        number = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {
            "cache": table(weights, self.places),
            "total": torch.zeros_like(weights),
            "velocity": torch.zeros_like(weights),
            "interval": table(number, self.places),
            "decay": number.clone(),
            "step": number.clone(),
            "share": number,
        }

    def leave(self, state: State, worker: int) -> None:
        forget(state, worker)
        read(state["interval"], worker).zero_()

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        place = pushers_place(state["cache"], arrival)
        decay, step, share = self._measure(state, place, arrival)
        gradient = self.prepared.prepare(weights, update)
        remember(state, place, gradient)
        self.accelerate(state, place, gradient, decay, share)
        add_scaled(weights, state["velocity"], -step)

    def accelerate(self, state: State, place: int | Tensor, gradient: Tensor, decay: Scalar, share: Scalar) -> None:
        """Let the velocity decay, and add what this update goes along."""
        scale(state["velocity"], decay)
        add_scaled(state["velocity"], state["total"], share)

    def _measure(self, state: State, place: int | Tensor, arrival: Arrival) -> tuple[Scalar, Scalar, Scalar]:
        """How far apart the worker's arrivals are, and what the longest such interval makes of momentum and step."""
        interval = load(read(state["interval"], place))
        interval = interval + (interval == 0) * arrival.num_live
        interval = interval + self.smoothing * (arrival.staleness + 1 - interval)
        keep_row(state["interval"], place, interval)
        longest = load(state["interval"].amax(-2))
        decay: Scalar = self.momentum ** (1.0 / longest)
        step = load(arrival.lr) * (1.0 - decay) / (1.0 - self.momentum)
        share = 1.0 / arrival.num_live
        for name, value in (("decay", decay), ("step", step), ("share", share)):
            keep(state[name], value)
        return decay, step, share

    def weights_for(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        decay, step, share = load(state["decay"]), load(state["step"]), load(state["share"])
        interval = load(read(state["interval"], place_in(state["interval"], worker)))
        ahead = self.horizon * at_least(interval - 1.0, 0.0)
        kept = 1.0 - decay
        of_velocity = decay * (1.0 - decay**ahead) / kept
        of_mean = (ahead - of_velocity) / kept
        add_scaled(weights, state["velocity"], -step * of_velocity, out=out)
        add_scaled(out, state["total"], -step * of_mean * share)
