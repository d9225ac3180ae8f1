"""A rule with momentum of its own under the parameter groups of a user's SGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.own_loop.settings import LoopLayout
from paceline.core.rules.wrapper import RuleWrapper
from paceline.interfaces import ALIGNMENT, Arrival, Layout, Rule, State


class Grouped(RuleWrapper):
    """g_k = r_k (g_k + decay_k weights_k) for each group k, r_k = lr_k / max lr; the rule steps along g at the max lr.

    The momentum is that of the first group. A parameter without a gradient keeps its weights, here and in what workers
    are sent.
    """

    def __init__(self, rule: Rule, layout: Layout, loop: LoopLayout) -> None:
        super().__init__(rule)
        self._numbers, self.layout = loop.numbers, layout
        places = [slice(p.offset, p.offset + p.size) for p in layout.parameters]
        self._spans = [_joined([places[number] for number in group]) for group in loop.groups]
        self._places = places
        self._lrs, self._decays = [1.0] * len(self._spans), [0.0] * len(self._spans)
        self._absent: list[slice] = []
        self._scratch = torch.empty(0)

    @property
    def name(self) -> str:
        return self.rule.name

    def start(self, weights: Tensor) -> State:
        self._scratch = torch.empty_like(weights)
        return self.rule.start(weights)

    def follow(self, settings: Sequence[float], has_gradient: Sequence[float]) -> None:
        """Use the settings of a worker's loop for the next update."""
        self._absent = [place for place, flag in zip(self._places, has_gradient, strict=True) if not flag]
        for (group, setting, _), value in zip(self._numbers, settings, strict=True):
            if setting == "lr":
                self._lrs[group] = value
            elif setting == "weight_decay":
                self._decays[group] = value
            elif setting == "momentum" and group == 0:
                before = getattr(self.rule, "momentum", 0.0)
                vars(self.rule)["momentum"] = torch.full_like(before, value) if isinstance(before, Tensor) else value

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        largest = max(self._lrs)
        arrival = arrival._replace(lr=arrival.lr * largest)
        if self._absent or any(self._decays) or any(lr != largest for lr in self._lrs):
            update = self._prepared(weights, update, largest)
        kept = [weights[place].clone() for place in self._absent]
        self.rule.apply(weights, state, update, arrival)
        for place, before in zip(self._absent, kept, strict=True):
            weights[place].copy_(before)

    def _prepared(self, weights: Tensor, update: Tensor, largest: float) -> Tensor:
        gradient = self._scratch.copy_(update)
        for spans, lr, decay in zip(self._spans, self._lrs, self._decays, strict=True):
            for span in spans:
                if decay:
                    gradient[span].add_(weights[span], alpha=decay)
                if lr != largest:
                    gradient[span].mul_(lr / largest)
        for place in self._absent:
            gradient[place].zero_()
        return gradient

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        self.rule.reply_weights(weights, state, worker, out)
        for place in self._absent:
            out[place].copy_(weights[place])


def _joined(places: list[slice]) -> list[slice]:
    """Join neighbouring spans, the gaps between them included: these are zero."""
    joined: list[slice] = []
    for place in sorted(places, key=lambda place: place.start):
        if joined and place.start - joined[-1].stop < ALIGNMENT:
            joined[-1] = slice(joined[-1].start, place.stop)
        else:
            joined.append(place)
    return joined
