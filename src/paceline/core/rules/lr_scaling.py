"""Any rule with a learning rate that falls while many pushes are in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.rules.worker_rows import keep, load
from paceline.core.rules.wrapper import RuleWrapper
from paceline.interfaces import Arrival, Rule, State

SMOOTHING = 0.01


class LrScaling(RuleWrapper):
    """lr min(1, most/pushes),  pushes = max(number live, the running mean of staleness + 1)

    The largest stable step is inversely proportional to the pushes in flight (n lr times the curvature is bounded). A
    join or leave counts at once, a change of staleness within some hundred updates. Touches no tensor of its own.

    >>> from paceline.core.optimizers import Sgd
    >>> from paceline.core.rules.plain import Plain
    >>> weights, rule = torch.zeros(1), LrScaling(Plain(Sgd()), most=2)
    >>> state = rule.start(weights)
    >>> rule.apply(weights, state, torch.ones(1), Arrival(0, 0, torch.tensor(1.0), 4))
    >>> weights.item()
    -0.5
    """

    suffix = "lr scaled"

    def __init__(self, rule: Rule, most: int) -> None:
        super().__init__(rule)
        self.most = most

    def start(self, weights: Tensor) -> State:
        mean = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {**self.rule.start(weights), "mean_staleness": mean}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        mean = load(state["mean_staleness"])
        mean = mean + SMOOTHING * (arrival.staleness - mean)
        keep(state["mean_staleness"], mean)
        pushes, live = mean + 1.0, arrival.num_live
        if isinstance(pushes, Tensor):
            shorter = (self.most / torch.maximum(pushes, torch.as_tensor(live).to(pushes.dtype))).clamp(max=1.0)
            arrival = arrival._replace(lr=arrival.lr * shorter.to(arrival.lr.dtype))
        elif (in_flight := max(pushes, float(live))) > self.most:
            arrival = arrival._replace(lr=arrival.lr * (self.most / in_flight))
        self.rule.apply(weights, state, update, arrival)
