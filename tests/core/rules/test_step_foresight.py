"""The look-ahead rules around an optimizer that brings its own steps, against formulas written out in Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from paceline.core.optimizers import Adam, AdamW, RmsProp, RoundOptimizer, Sgd
from paceline.core.rules.step_foresight import StepForesight
from paceline.interfaces import Arrival
from tests.support.courses import SIZE, START, Course, courses, require_the_oracles_way


class SlowRounds:
    """Sums over all gradients of the past, each with the product of the decays since, instead of running means."""

    def __init__(self) -> None:
        self.gradients: list[list[float]] = []
        self.shares: list[float] = []

    def decayed(self, beta: float, place: int, power: int = 1) -> float:
        """The weighted sum of a coordinate's gradients: each counts 1 - beta^share when it comes, and decays by it."""
        total = 0.0
        for number, (gradient, share) in enumerate(zip(self.gradients, self.shares, strict=True)):
            since = sum(self.shares[number + 1 :])
            total += beta**since * (1 - beta**share) * gradient[place] ** power
        return total

    def step(self, weights: list[float], gradient: list[float], lr: float, share: float) -> list[float]:
        self.gradients.append(gradient)
        self.shares.append(share)
        return [w - lr * self.change(w, place) for place, w in enumerate(weights)]

    def change(self, weight: float, place: int) -> float:
        raise NotImplementedError


class SlowRoundAdam(SlowRounds):
    def __init__(self, decay: float = 0.0) -> None:
        super().__init__()
        self.decay = decay

    def change(self, weight: float, place: int) -> float:
        rounds = sum(self.shares)
        mean = self.decayed(0.9, place) / (1 - 0.9**rounds)
        root = math.sqrt(self.decayed(0.999, place, 2) / (1 - 0.999**rounds))
        return mean / (root + 1e-8) + self.decay * weight


class SlowRoundRmsProp(SlowRounds):
    """Its momentum is of quotients, so these are kept as the gradients are."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.quotients: list[list[float]] = []

    def step(self, weights: list[float], gradient: list[float], lr: float, share: float) -> list[float]:
        self.quotients.append([])
        return super().step(weights, gradient, lr, share)

    def change(self, weight: float, place: int) -> float:
        grown = (1 - 0.99 ** len(self.shares)) / (1 - 0.99 ** sum(self.shares))
        root = math.sqrt(self.decayed(0.99, place, 2) * grown)
        self.quotients[-1].append(self.gradients[-1][place] / (root + 1e-8))
        velocity = 0.0
        for number, quotients in enumerate(self.quotients):
            velocity += self.momentum ** sum(self.shares[number + 1 :]) * quotients[place]
        return velocity * (1 - self.momentum ** self.shares[-1]) / (1 - self.momentum)


class SlowRoundNesterov(SlowRounds):
    def change(self, weight: float, place: int) -> float:
        velocity, momentum = 0.0, 0.9 ** self.shares[-1]
        for number, gradient in enumerate(self.gradients):
            velocity += 0.9 ** sum(self.shares[number + 1 :]) * gradient[place]
        ahead = self.gradients[-1][place] + momentum * velocity - velocity
        return (velocity + ahead * self.shares[-1]) * (1 - momentum) / (1 - 0.9)


class SlowStepForesight:
    """Keeps the weights before each update, and every worker's interval."""

    def __init__(self, optimizer: SlowRounds, fair: bool) -> None:
        self.weights, self.before = list(START), list(START)
        self.optimizer, self.fair = optimizer, fair
        self.interval: dict[int, float] = {}

    def leave(self, worker: int) -> None:
        self.interval.pop(worker, None)

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        usual = self.interval.get(worker, num_live)
        self.interval[worker] = 0.9 * usual + 0.1 * min(staleness + 1, 3.0 * usual)
        weight = min(self.interval[worker] / num_live, 3.0) if self.fair else 1.0
        longest = max(self.interval.values())
        self.before = self.weights
        gradient = [weight * g for g in gradient]
        stepped = self.optimizer.step(self.weights, gradient, lr, 1 / longest)
        steps = [s - w for s, w in zip(stepped, self.weights, strict=True)]
        kept = [step / longest if step * g > 0 else step for step, g in zip(steps, gradient, strict=True)]
        self.weights = [w + step for w, step in zip(self.weights, steps if self.fair else kept, strict=True)]

    def sent(self, worker: int) -> list[float]:
        ahead = 1.5 * max(self.interval.get(worker, 1.0) - 1.0, 0.0)
        return [w + ahead * (w - b) for w, b in zip(self.weights, self.before, strict=True)]


BOTH: dict[str, tuple[Callable[[], RoundOptimizer], Callable[[], SlowRounds]]] = {
    "adam": (Adam, SlowRoundAdam),
    "adamw": (lambda: AdamW(weight_decay=0.1), lambda: SlowRoundAdam(0.1)),
    "rmsprop": (lambda: RmsProp(0.7), lambda: SlowRoundRmsProp(0.7)),
    "nesterov": (lambda: Sgd(0.9, nesterov=True), SlowRoundNesterov),
}


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("optimizer", BOTH)
@given(along=courses)
@settings(max_examples=12)
def test_every_step_and_every_reply_is_that_of_the_formula(optimizer: str, fair: bool, along: Course) -> None:
    fast, slow = BOTH[optimizer]
    require_the_oracles_way(StepForesight(fast(), along.max_workers, fair), SlowStepForesight(slow(), fair), along)


def test_classical_momentum_steps_as_under_its_own_rule() -> None:
    """Foresight with SGD has the same velocity; only what it sends looks at the cached gradients, too."""
    from paceline.core.rules.foresight import Foresight

    one, other = torch.zeros(3), torch.zeros(3)
    rule, classical = StepForesight(Sgd(0.9), 3, holds_back=False), Foresight(0.9, 3)
    state, states = rule.start(one), classical.start(other)
    for update in range(30):
        gradient = torch.randn(3, generator=torch.Generator().manual_seed(update))
        arrival = Arrival(update % 3, 2, torch.tensor(0.1), 3)
        rule.apply(one, state, gradient, arrival)
        classical.apply(other, states, gradient, arrival)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_one_worker_is_sent_the_live_weights_bit_for_bit() -> None:
    weights, rule = torch.tensor(START), StepForesight(Adam(), 2)
    state, sent = rule.start(weights), torch.zeros(SIZE)
    for update in range(20):
        rule.apply(weights, state, torch.sin(weights + update), Arrival(0, 0, torch.tensor(0.1), 1))
        rule.reply_weights(weights, state, 0, sent)
        assert torch.equal(sent, weights)
