"""Any rule with a running mean of its weights: workers compute on the live weights, and the mean is evaluated."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.rules.worker_rows import Scalar, at_least, keep, load, move_towards
from paceline.core.rules.wrapper import RuleWrapper
from paceline.interfaces import Arrival, Rule, State

GROWTH = 9.0
EVERY_ONE_BEFORE = 64
EVERY = 8
POWER = 4


class Averaged(RuleWrapper):
    """average += a_t (weights - average) after update t = 1, 2, ...

    Stale and skewed gradients mostly make the live weights wander around a good centre.
    a_t = 9/(t + 8): no constant to set; about the last ninth of all updates counts (arXiv 1212.1824).
    With a horizon H: a_t = max(2/(t + 1), 1/H). From update 64 on, only every eighth is averaged, with the share of
    eight, 1 - (1 - a_t)^8: the weights between differ little. Costs one more pass over 2 tensors then, and P floats.

    Once workers have reached their quota and nobody else computes on their data, the live weights lean towards the
    data of the others: a_t is multiplied by present^4, where `present` is the share of the data that is still computed
    on. Workers that are lost or drained change nothing (docs/rules-evidence.md has the ablation).

    >>> from paceline.core.optimizers import Sgd
    >>> from paceline.core.rules.plain import Plain
    >>> weights, rule = torch.zeros(1), Averaged(Plain(Sgd()))
    >>> state = rule.start(weights)
    >>> for _ in range(2):
    ...     rule.apply(weights, state, -torch.ones(1), Arrival(0, 0, torch.tensor(1.0), 1))
    >>> weights.item(), round(rule.evaluated(weights, state).item(), 6)
    (2.0, 1.9)
    """

    suffix = "averaged"

    def __init__(self, rule: Rule, horizon: float | None = None, power: int = POWER) -> None:
        super().__init__(rule)
        self.horizon, self.power = horizon, power

    def start(self, weights: Tensor) -> State:
        count = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {**self.rule.start(weights), "average": weights.clone(), "num_updates": count}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        self.rule.apply(weights, state, update, arrival)
        count = load(state["num_updates"]) + 1.0
        keep(state["num_updates"], count)
        often, due = (count < EVERY_ONE_BEFORE) * 1.0, (count % EVERY == 0) * 1.0
        if not isinstance(count, Tensor) and not (often or due):
            return  # many runs at once make this pass with a share of zero
        one = self._share(count)
        share = often * one + (1.0 - often) * due * (1.0 - (1.0 - one) ** EVERY)
        move_towards(state["average"], weights, share * arrival.present**self.power)

    def _share(self, count: Scalar) -> Scalar:
        """The share of update `count`, counted from 1, in the average after it."""
        if self.horizon is None:
            return GROWTH / (count + (GROWTH - 1.0))
        return at_least(2.0 / (count + 1.0), 1.0 / self.horizon)

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        return state["average"]
