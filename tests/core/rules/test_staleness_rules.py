"""Rules that look at how stale a push is: `damped`, `gap`, `compensated`; `buffered` and `delayed` average it away."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.optimizers import Sgd
from paceline.core.rules.buffered import Buffered, Delayed, OuterMomentum
from paceline.core.rules.plain import Plain
from paceline.core.rules.staleness_aware import Compensated, Damped, Gap
from paceline.interfaces import Arrival
from paceline.settings.strategies import STRATEGIES
from tests.support.courses import SIZE, START, Course, courses, require_the_oracles_way
from tests.support.slow_optimizers import BOTH, SlowOptimizer, SlowSgd


class SlowDamped:
    def __init__(self, optimizer: SlowOptimizer) -> None:
        self.weights = list(START)
        self.optimizer = optimizer

    def leave(self, worker: int) -> None:
        pass

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        self.weights = self.optimizer.step(self.weights, gradient, lr / max(1, staleness))

    def sent(self, worker: int) -> list[float]:
        return list(self.weights)


class SlowGap(SlowDamped):
    """Every step that was ever made is kept, and averaged anew: courses are shorter than a thousand."""

    def __init__(self, optimizer: SlowOptimizer) -> None:
        super().__init__(optimizer)
        self.steps: list[list[float]] = []
        self.had: dict[int, list[float]] = {}

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        scaled = []
        for place in range(SIZE):
            moved = abs(self.weights[place] - self.had[worker][place])
            usual = sum(step[place] for step in self.steps) / len(self.steps) if self.steps else 0.0
            scaled.append(gradient[place] / ((moved / usual if moved else 0.0) + 1))
        before = self.weights
        self.weights = self.optimizer.step(before, scaled, lr)
        self.steps.append([abs(new - old) for new, old in zip(self.weights, before, strict=True)])

    def sent(self, worker: int) -> list[float]:
        self.had[worker] = list(self.weights)
        return list(self.weights)


class SlowCompensated(SlowDamped):
    def __init__(self, optimizer: SlowOptimizer) -> None:
        super().__init__(optimizer)
        self.square = [0.0] * SIZE
        self.had: dict[int, list[float]] = {}

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        self.square = [0.95 * s + 0.05 * g * g for s, g in zip(self.square, gradient, strict=True)]
        carried = []
        for place, g in enumerate(gradient):
            strength = 2.0 / math.sqrt(self.square[place] + 1e-7)
            carried.append(g + strength * g * g * (self.weights[place] - self.had[worker][place]))
        self.weights = self.optimizer.step(self.weights, carried, lr)

    def sent(self, worker: int) -> list[float]:
        self.had[worker] = list(self.weights)
        return list(self.weights)


class SlowBuffered(SlowDamped):
    def __init__(self, size: int, momentum: float) -> None:
        super().__init__(SlowSgd(momentum))
        self.size, self.waiting = size, list[list[float]]()

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        self.waiting.append(gradient)
        if len(self.waiting) == self.size:
            mean = [sum(column) / self.size for column in zip(*self.waiting, strict=True)]
            self.weights = self.optimizer.step(self.weights, mean, lr)
            self.waiting = []


@pytest.mark.parametrize("optimizer", BOTH)
@given(along=courses)
@settings(max_examples=8)
def test_damped(optimizer: str, along: Course) -> None:
    fast, slow = BOTH[optimizer]
    require_the_oracles_way(Damped(fast()), SlowDamped(slow()), along)


@pytest.mark.parametrize("optimizer", BOTH)
@given(along=courses)
@settings(max_examples=10)
def test_gap(optimizer: str, along: Course) -> None:
    fast, slow = BOTH[optimizer]
    require_the_oracles_way(Gap(fast(), along.max_workers), SlowGap(slow()), along)


@pytest.mark.parametrize("optimizer", BOTH)
@given(along=courses)
@settings(max_examples=10)
def test_compensated(optimizer: str, along: Course) -> None:
    fast, slow = BOTH[optimizer]
    require_the_oracles_way(Compensated(fast(), along.max_workers), SlowCompensated(slow()), along)


@pytest.mark.parametrize(("size", "momentum"), [(1, 0.9), (3, 0.0), (4, 0.9)])
@given(along=courses)
@settings(max_examples=8)
def test_buffered(size: int, momentum: float, along: Course) -> None:
    require_the_oracles_way(Buffered(size, momentum), SlowBuffered(size, momentum), along)


class SlowDelayed(SlowDamped):
    """Algorithm 3 of arXiv 2401.09135 with N the workers here and c = 0, every drift of a round kept.

    Over the first `warmup` rounds its lr goes from 1 to that of the push, and beta from 0 to the momentum.
    """

    def __init__(self, momentum: float, warmup: int = 0) -> None:
        super().__init__(SlowSgd(momentum))
        self.momentum, self.velocity, self.waiting = momentum, [0.0] * SIZE, list[list[float]]()
        self.warmup, self.rounds = warmup, 0

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        self.waiting.append(gradient)
        step, beta = [part / num_live for part in gradient], self.momentum
        if self.rounds < self.warmup:
            missing = (self.warmup - self.rounds) / self.warmup
            lr, beta = missing * 1.0 + (1.0 - missing) * lr, (1.0 - missing) * beta
        if len(self.waiting) >= num_live:
            mean = [sum(column) / len(self.waiting) for column in zip(*self.waiting, strict=True)]
            self.velocity = [beta * v + m for v, m in zip(self.velocity, mean, strict=True)]
            step = [s + beta * v for s, v in zip(step, self.velocity, strict=True)]
            self.waiting, self.rounds = [], self.rounds + 1
        self.weights = [w - lr * s for w, s in zip(self.weights, step, strict=True)]


@pytest.mark.parametrize(("momentum", "warmup"), [(0.0, 0), (0.9, 0), (0.9, 4)])
@given(along=courses)
@settings(max_examples=15)
def test_delayed(momentum: float, warmup: int, along: Course) -> None:
    require_the_oracles_way(Delayed(momentum, warmup), SlowDelayed(momentum, warmup), along)


class SlowOuterMomentum(SlowDelayed):
    """The same of one worker, whose drift is the mean of a round."""

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        super().push(worker, gradient, staleness, lr, 1)


@given(along=courses)
@settings(max_examples=15)
def test_outer_momentum(along: Course) -> None:
    require_the_oracles_way(OuterMomentum(0.9, 4), SlowOuterMomentum(0.9, 4), along)


def test_outer_momentum_begins_as_a_plain_mean_and_ends_as_nesterov() -> None:
    rule, nesterov, lr = OuterMomentum(0.8, 3), Plain(Sgd(0.8, nesterov=True)), torch.tensor(0.6)
    ours, theirs = torch.ones(1), torch.ones(1)
    state, other = rule.start(ours), nesterov.start(theirs)
    rule.apply(ours, state, torch.tensor([0.25]), Arrival(None, 0, lr, 2))
    assert ours.item() == 0.75, "all the way, once"
    for _ in range(2):
        rule.apply(ours, state, torch.tensor([0.25]), Arrival(None, 0, lr, 2))
    theirs.copy_(ours)
    other["velocity"].copy_(state["velocity"])
    for drift in (1.0, -2.0):
        rule.apply(ours, state, torch.tensor([drift]), Arrival(None, 0, lr, 2))
        nesterov.apply(theirs, other, torch.tensor([drift]), Arrival(None, 0, lr, 2))
        torch.testing.assert_close(ours, theirs)


@given(drifts=st.lists(st.lists(st.floats(-2.0, 2.0), min_size=3, max_size=3), min_size=1, max_size=6))
def test_delayed_moves_in_n_pushes_as_nesterov_on_their_mean(drifts: list[list[float]]) -> None:
    """Where nobody is stale, it is diloco."""
    delayed, nesterov, lr = Delayed(0.9), Plain(Sgd(0.9, nesterov=True)), torch.tensor(0.7)
    ours, theirs = torch.ones(3), torch.ones(3)
    state, other = delayed.start(ours), nesterov.start(theirs)
    for round_ in range(3):
        for worker, drift in enumerate(drifts):
            update = torch.tensor(drift) * (round_ + 1)
            delayed.apply(ours, state, update, Arrival(worker, worker, lr, len(drifts)))
        mean = torch.tensor(drifts).mean(0) * (round_ + 1)
        nesterov.apply(theirs, other, mean, Arrival(None, 0, lr, len(drifts)))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def outer(name: str, workers: int) -> tuple[float, float]:
    """The default outer learning rate and momentum of a strategy."""
    found = STRATEGIES[name].outer
    assert found is not None
    return found(workers)


def distance_after(rounds: int, workers: int, lr: float, momentum: float) -> float:
    """Of one weight from 0, its optimum, when each drift goes all the way there from where its worker was sent."""
    rule, weights = Delayed(momentum), torch.ones(1)
    state, sent = rule.start(weights), [torch.ones(1) for _ in range(workers)]
    for _ in range(rounds):
        for worker in range(workers):
            arrival = Arrival(worker, workers - 1, torch.tensor(lr), workers)
            rule.apply(weights, state, sent[worker].clone(), arrival)
            sent[worker].copy_(weights)
    return abs(weights.item())


def test_the_default_outer_steps_are_stable_where_drifts_are_a_round_old_and_those_of_diloco_are_not() -> None:
    assert all(distance_after(150, workers, *outer("async-local", workers)) < 0.02 for workers in range(1, 11))
    assert distance_after(150, 10, *outer("diloco", 10)) > 100.0


def test_the_default_outer_steps_go_as_far_as_there_are_few_workers_and_are_the_published_ones_of_many() -> None:
    found = [lr / (1.0 - momentum) for lr, momentum in (outer("diloco", workers) for workers in range(1, 9))]
    assert found == pytest.approx([1.0, 2.0, 3.0, 4.0, 7.0, 7.0, 7.0, 7.0], rel=0.01)
    assert [outer(name, 5) for name in ("diloco", "async-local")] == [(0.7, 0.9), (0.4, 0.8)]
