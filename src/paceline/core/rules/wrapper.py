"""Base class for rules that wrap another rule: forwards every call that the subclass does not override."""

from __future__ import annotations

from torch import Tensor

from paceline.interfaces import Rule, State


class RuleWrapper:
    """Forwards to the wrapped rule."""

    suffix = ""  # added to the name of the wrapped rule

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    @property
    def name(self) -> str:
        return f"{self.rule.name} ({self.suffix})"

    def join(self, state: State, worker: int) -> None:
        self.rule.join(state, worker)

    def leave(self, state: State, worker: int) -> None:
        self.rule.leave(state, worker)

    def recompute_sums(self, state: State) -> None:
        self.rule.recompute_sums(state)

    def expire(self, state: State, worker: int) -> None:
        self.rule.expire(state, worker)

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        self.rule.reply_weights(weights, state, worker, out)

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        return self.rule.evaluated(weights, state)
