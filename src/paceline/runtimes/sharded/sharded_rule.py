"""A rule restricted to one range of the weights, for the first server of several, which has memory for all."""

from __future__ import annotations

from torch import Tensor

from paceline.core.rules.wrapper import RuleWrapper
from paceline.interfaces import Arrival, Rule, State


class ShardedRule(RuleWrapper):
    """Applies the rule `part`, made for `span` alone, to views of the whole weights and of the state of `whole`.

    Rules are elementwise over the last axis, so a range gets the same bits as under `whole`.

    >>> import torch
    >>> from paceline.core.optimizers import Sgd
    >>> from paceline.core.rules.plain import Plain
    >>> weights, whole = torch.zeros(4), Plain(Sgd(0.9))
    >>> state = whole.start(weights)
    >>> rule = ShardedRule(whole, Plain(Sgd(0.9)), slice(2, 4), weights, state)
    >>> rule.apply(weights, state, torch.ones(2), Arrival(0, 0, torch.tensor(1.0), 1))
    >>> weights.tolist(), state["velocity"].tolist()
    ([0.0, 0.0, -1.0, -1.0], [0.0, 0.0, 1.0, 1.0])
    """

    def __init__(self, whole: Rule, part: Rule, span: slice, weights: Tensor, state: State) -> None:
        super().__init__(whole)
        self.part, self.span = part, span
        started = part.start(weights[span])
        self.cut = frozenset(name for name, tensor in started.items() if tensor.shape != state[name].shape)
        """The names of the state tensors that are as long as the weights."""

    @property
    def name(self) -> str:
        return self.rule.name

    def start(self, weights: Tensor) -> State:
        return self.rule.start(weights)

    def of_span(self, state: State, span: slice | None = None) -> State:
        """Views of the state of a range (by default this rule's)."""
        span = span or self.span
        return {name: tensor[..., span] if name in self.cut else tensor for name, tensor in state.items()}

    def join(self, state: State, worker: int) -> None:
        self.part.join(self.of_span(state), worker)

    def leave(self, state: State, worker: int) -> None:
        self.part.leave(self.of_span(state), worker)

    def recompute_sums(self, state: State) -> None:
        self.part.recompute_sums(self.of_span(state))

    def expire(self, state: State, worker: int) -> None:
        self.part.expire(self.of_span(state), worker)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        self.part.apply(weights[self.span], self.of_span(state), update, arrival)

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        self.part.reply_weights(weights[self.span], self.of_span(state), worker, out[self.span])
