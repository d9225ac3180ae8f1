"""Rules that collect pushes, `buffered:K` (FedBuff, arXiv 2106.06639) and `delayed` (arXiv 2401.09135); and the outer
momentum of `diloco` (arXiv 2311.08105).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import GradientTransform
from paceline.core.rules.worker_rows import MomentumRule
from paceline.interfaces import Arrival, State


class CollectingRule(MomentumRule):
    """Base class for rules with a momentum and a buffer of pushes."""

    def start(self, weights: Tensor) -> State:
        self.move_to(weights)
        count = weights.new_zeros((*weights.shape[:-1], 1))
        return {"buffer": torch.zeros_like(weights), "velocity": torch.zeros_like(weights), "buffered": count}


class Buffered(CollectingRule):
    """buffer += g; after every Kth push:  v = gamma v + buffer / K;  weights -= lr v;  buffer = 0

    Each push makes a new version, though only every Kth moves the weights: lr, budget and staleness count pushes, as
    for every other rule. Only plain momentum fits: a factor, not a branch, says whether a push is the Kth, and the
    steps of other optimizers cannot be scaled like that. Touches 4 tensors: g, the buffer, v, the weights.

    >>> weights, rule = torch.zeros(1), Buffered(2, 0.0)
    >>> state = rule.start(weights)
    >>> for gradient in (1.0, 3.0):
    ...     rule.apply(weights, state, torch.tensor([gradient]), Arrival(0, 0, torch.tensor(1.0), 1))
    ...     print(weights.item())
    0.0
    -2.0
    """

    def __init__(self, size: int, momentum: float | Tensor, prepared: GradientTransform | None = None) -> None:
        super().__init__(momentum, prepared)
        self.size = size

    @property
    def name(self) -> str:
        return f"buffered:{self.size}"

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        buffer = state["buffer"].add_(self.prepared.prepare(weights, update))
        full = (state["buffered"].add_(1.0) >= self.size).to(weights.dtype)
        step(weights, state["velocity"], buffer, full / self.size, full, self.momentum, arrival.lr)
        buffer.mul_(1.0 - full)
        state["buffered"].mul_(1.0 - full)


def step(
    weights: Tensor, velocity: Tensor, total: Tensor, share: Tensor, due: Tensor, momentum: Tensor, lr: Tensor
) -> None:
    """v = momentum v + share total;  weights -= lr v, if `due` is 1; no change if `due` and `share` are 0."""
    velocity.mul_(1.0 - due + due * momentum).addcmul_(total, share)
    weights.addcmul_(velocity, lr * due, value=-1.0)


def grown(done: Tensor, warmup: int, lr: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """The outer lr and momentum after `done` rounds: they begin as a plain mean (1 and 0) and grow for `warmup` rounds.

    The first drifts of a run lead away from the random start. They are far larger than later ones and point elsewhere,
    and a momentum that has them would go on there for 1/(1 - momentum) rounds.

    >>> [round(value.item(), 3) for value in grown(torch.tensor(1.0), 2, torch.tensor(0.5), torch.tensor(0.8))]
    [0.75, 0.4]
    """
    share = (done / warmup).clamp(max=1.0)
    return 1.0 + share * (lr - 1.0), share * momentum


class OuterMomentum(MomentumRule):
    """v = b v + d;  weights -= l (d + b v), where d is the mean drift of a round, and l and b grow to lr and momentum.

    Without a warm-up it is `Plain` with Nesterov's momentum. Touches 3 tensors: the drift, v, the weights.

    >>> weights, rule = torch.zeros(1), OuterMomentum(0.5, warmup=1)
    >>> state = rule.start(weights)
    >>> for drift in (2.0, 2.0):
    ...     rule.apply(weights, state, torch.tensor([drift]), Arrival(None, 0, torch.tensor(0.5), 2))
    ...     print(weights.item())
    -2.0
    -3.75
    """

    name = "outer-momentum"

    def __init__(self, momentum: float | Tensor, warmup: int) -> None:
        super().__init__(momentum)
        self.warmup = warmup

    def start(self, weights: Tensor) -> State:
        self.move_to(weights)
        return {"velocity": torch.zeros_like(weights), "rounds": weights.new_zeros((*weights.shape[:-1], 1))}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        lr, momentum = grown(state["rounds"], self.warmup, arrival.lr, self.momentum)
        velocity = state["velocity"].mul_(momentum).add_(update)
        weights.addcmul_(update, lr, value=-1.0)
        weights.addcmul_(velocity, lr * momentum, value=-1.0)
        state["rounds"].add_(1.0)


class Delayed(CollectingRule):
    """weights -= lr d / n;  and after n pushes:  v = beta v + the mean of their drifts;  weights -= lr beta v

    n is the number of live workers, so n pushes move the weights like one step of Nesterov's momentum on their mean
    (the paper's N = n and c = 0). A stale drift counts at once, but enters the momentum only as part of the mean of n
    drifts. With a `warmup`, lr and beta grow over that many rounds. Touches 4 tensors: the drift, the buffer, v, the
    weights.

    >>> weights, rule = torch.zeros(1), Delayed(0.5)
    >>> state = rule.start(weights)
    >>> for drift in (2.0, 4.0):
    ...     rule.apply(weights, state, torch.tensor([drift]), Arrival(0, 1, torch.tensor(1.0), 2))
    ...     print(weights.item())
    -1.0
    -4.5
    """

    name = "delayed"

    def __init__(self, momentum: float | Tensor, warmup: int = 0) -> None:
        super().__init__(momentum)
        self.warmup = warmup

    def start(self, weights: Tensor) -> State:
        rounds = {"rounds": weights.new_zeros((*weights.shape[:-1], 1))} if self.warmup else {}
        return {**super().start(weights), **rounds}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        lr, momentum = arrival.lr, self.momentum
        if self.warmup:
            lr, momentum = grown(state["rounds"], self.warmup, lr, momentum)
        buffer, velocity, count = state["buffer"].add_(update), state["velocity"], state["buffered"].add_(1.0)
        workers = torch.as_tensor(arrival.num_live, device=weights.device).to(weights.dtype).clamp(min=1.0)
        due = (count >= workers).to(weights.dtype)
        velocity.mul_(1.0 - due + due * momentum).addcmul_(buffer, due / count)
        weights.addcmul_(update, lr / workers, value=-1.0)
        weights.addcmul_(velocity, lr * momentum * due, value=-1.0)
        buffer.mul_(1.0 - due)
        count.mul_(1.0 - due)
        if self.warmup:
            state["rounds"].add_(due)
