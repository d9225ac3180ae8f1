"""Rule `plain`: one shared optimizer makes a step on each arrival; and the defaults that most rules share."""

from __future__ import annotations

from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.interfaces import Arrival, State


class StatelessHooks:
    """Defaults of a rule: joins and leaves change nothing, workers get a copy of the weights, which are evaluated."""

    def join(self, state: State, worker: int) -> None:
        pass

    def leave(self, state: State, worker: int) -> None:
        pass

    def recompute_sums(self, state: State) -> None:
        pass

    def expire(self, state: State, worker: int) -> None:
        pass

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        return weights


class Plain(StatelessHooks):
    """weights = optimizer(weights, update), like the published parameter servers; every worker is sent a plain copy.

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


class ReplyBeforeApply(Plain):
    """`plain`, but the reply holds the weights before the push is applied, so a worker never sees its own last push.

    A worker of the published system gets the same: it pulls without waiting for its push. Touches one more tensor,
    for the weights before the update.

    >>> import torch
    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule, sent = torch.ones(1), ReplyBeforeApply(Sgd()), torch.zeros(1)
    >>> state = rule.start(weights)
    >>> rule.apply(weights, state, torch.ones(1), Arrival(0, 0, torch.tensor(0.5), 1))
    >>> rule.reply_weights(weights, state, 0, sent)
    >>> weights.item(), sent.item()
    (0.5, 1.0)
    """

    name = "plain-early"

    def start(self, weights: Tensor) -> State:
        return {**super().start(weights), "before": weights.clone()}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        state["before"].copy_(weights)
        super().apply(weights, state, update, arrival)

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        out.copy_(state["before"])
