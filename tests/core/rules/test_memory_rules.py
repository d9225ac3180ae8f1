"""Rules that remember gradients: `cached`, `foresight-cached`, `ringleader`, `ahead`."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings

from paceline.core.rules.cached import Cached
from paceline.core.rules.foresight import Ahead, Foresight, ForesightCached, ForesightFair
from paceline.core.rules.ringleader import Ringleader
from paceline.interfaces import Arrival
from tests.support.courses import SIZE, START, Course, courses, require_the_oracles_way
from tests.support.slow_optimizers import BOTH, SlowOptimizer, SlowSgd


class SlowCached:
    """The mean over the live workers of each one's latest gradient, computed anew from all of them every time."""

    def __init__(self, optimizer: SlowOptimizer) -> None:
        self.weights = list(START)
        self.optimizer = optimizer
        self.latest: dict[int, list[float]] = {}

    def leave(self, worker: int) -> None:
        self.latest.pop(worker, None)

    def mean(self, num_live: int) -> list[float]:
        return [sum(gradient[place] for gradient in self.latest.values()) / num_live for place in range(SIZE)]

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        self.latest[worker] = gradient
        self.weights = self.optimizer.step(self.weights, self.mean(num_live), lr)

    def sent(self, worker: int) -> list[float]:
        return list(self.weights)


class SlowForesight(SlowCached):
    """The look ahead as the sum of the next steps, one after another, were the mean gradient to stay as it is."""

    def __init__(self, momentum: float) -> None:
        super().__init__(SlowSgd())
        self.momentum = momentum
        self.velocity = [0.0] * SIZE
        self.u = [0.0] * SIZE
        self.interval: dict[int, float] = {}
        self.gamma = self.lr = 0.0

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self.interval.pop(worker, None)

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        self.latest[worker] = gradient
        self.num_live = num_live
        before = self.interval.get(worker, num_live)
        self.interval[worker] = 0.9 * before + 0.1 * min(staleness + 1, 3.0 * before)
        self.gamma = self.momentum ** (1 / max(self.interval.values()))
        self.lr = lr / (1 - self.momentum)
        self.u = self.mean(num_live)
        self.velocity = [self.gamma * v + (1 - self.gamma) * u for v, u in zip(self.velocity, self.u, strict=True)]
        self.weights = [w - self.lr * v for w, v in zip(self.weights, self.velocity, strict=True)]

    def sent(self, worker: int) -> list[float]:
        ahead = 1.5 * max(self.interval.get(worker, 1.0) - 1, 0.0)
        u = self.mean(self.num_live) if self.latest else [0.0] * SIZE
        kept = self.gamma * (1 - self.gamma**ahead) / (1 - self.gamma)
        return [
            w - self.lr * (kept * v + (ahead - kept) * g)
            for w, v, g in zip(self.weights, self.velocity, u, strict=True)
        ]


class SlowFarsight(SlowForesight):
    """The step along the gradient that came; the look ahead as before."""

    def weight(self, worker: int, num_live: int) -> float:
        return 1.0

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        weights, velocity = self.weights, self.velocity
        super().push(worker, gradient, staleness, lr, num_live)
        weight = self.weight(worker, num_live)
        fresh = 1 - self.gamma
        self.velocity = [self.gamma * v + fresh * weight * g for v, g in zip(velocity, gradient, strict=True)]
        self.weights = [w - self.lr * v for w, v in zip(weights, self.velocity, strict=True)]


class SlowFairFarsight(SlowFarsight):
    def weight(self, worker: int, num_live: int) -> float:
        return min(self.interval[worker] / num_live, 3.0)


def test_the_look_ahead_is_the_sum_of_the_next_steps() -> None:
    """For a whole number of steps, the closed form is what the recursion gives."""
    slow = SlowForesight(0.5)
    for worker in (0, 1, 2):
        slow.push(worker, [1.0, -2.0, 3.0, 0.5, 0.0], 2, 0.1, 3)
    velocity, weights = list(slow.velocity), list(slow.weights)
    for _ in range(3):  # 1.5 (3 - 1)
        velocity = [slow.gamma * v + (1 - slow.gamma) * u for v, u in zip(velocity, slow.u, strict=True)]
        weights = [w - slow.lr * v for w, v in zip(weights, velocity, strict=True)]
    assert slow.sent(0) == pytest.approx(weights)


class SlowAhead:
    """A list of all pushes; each step that is only tried is made by a copy of the optimizer."""

    def __init__(self, optimizer: SlowOptimizer) -> None:
        self.weights, self.optimizer = list(START), optimizer
        self.pushes: list[list[float]] = []
        self.interval: dict[int, float] = {}
        self.lr = 0.0

    def leave(self, worker: int) -> None:
        self.interval.pop(worker, None)

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        before = self.interval.get(worker, num_live)
        self.interval[worker] = 0.9 * before + 0.1 * min(staleness + 1, 3.0 * before)
        last = self.pushes[-1] if self.pushes else [0.0] * SIZE
        mean = [(a + b) / 2 for a, b in zip(gradient, last, strict=True)] if staleness else gradient
        self.weights, self.lr = self.optimizer.step(self.weights, mean, lr), lr
        self.pushes.append(gradient)

    def sent(self, worker: int) -> list[float]:
        if not self.pushes:
            return list(self.weights)
        tried = copy.deepcopy(self.optimizer).step(self.weights, self.pushes[-1], self.lr)
        ahead = min(2.0 * max(self.interval.get(worker, 1.0) - 1.0, 0.0), 5.0)
        return [w + ahead * (t - w) for w, t in zip(self.weights, tried, strict=True)]


class SlowRingleader:
    """Lists of gradients, averaged anew every time."""

    def __init__(self, momentum: float) -> None:
        self.weights = list(START)
        self.optimizer = SlowSgd(momentum)
        self.table: dict[int, list[list[float]]] = {}
        self.coming: dict[int, list[list[float]]] = {}
        self.gone: list[list[list[float]]] = []  # of this round, by who has left since its step
        self.stepped: set[int] = set()

    def leave(self, worker: int) -> None:
        pushes = self.table.pop(worker, None)
        if worker in self.stepped and pushes:
            self.gone.append(pushes)
        self.stepped.discard(worker)
        self.coming.pop(worker, None)

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        if worker in self.stepped:
            self.coming.setdefault(worker, []).append(gradient)
        else:
            self.table.setdefault(worker, []).append(gradient)
            if len(self.table) >= num_live:
                rows = [*self.table.values(), *self.gone]
                means = [[sum(column) / len(row) for column in zip(*row, strict=True)] for row in rows]
                mean = [sum(column) / len(means) for column in zip(*means, strict=True)]
                self.weights = self.optimizer.step(self.weights, mean, lr)
                self.stepped.add(worker)
        if len(self.stepped) >= num_live:
            self.table, self.coming, self.gone = self.coming, {}, []
            self.stepped = set()

    def sent(self, worker: int) -> list[float]:
        return list(self.weights)


@pytest.mark.parametrize("optimizer", BOTH)
@given(along=courses)
@settings(max_examples=12)
def test_cached(optimizer: str, along: Course) -> None:
    fast, slow = BOTH[optimizer]
    require_the_oracles_way(Cached(fast(), along.max_workers), SlowCached(slow()), along)


@pytest.mark.parametrize("optimizer", BOTH)
@given(along=courses)
@settings(max_examples=12)
def test_ahead(optimizer: str, along: Course) -> None:
    fast, slow = BOTH[optimizer]
    require_the_oracles_way(Ahead(fast(), fast(), along.max_workers), SlowAhead(slow()), along)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(along=courses)
@settings(max_examples=20)
def test_foresight(momentum: float, along: Course) -> None:
    require_the_oracles_way(ForesightCached(momentum, along.max_workers), SlowForesight(momentum), along)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(along=courses)
@settings(max_examples=20)
def test_farsight(momentum: float, along: Course) -> None:
    require_the_oracles_way(Foresight(momentum, along.max_workers), SlowFarsight(momentum), along)
    require_the_oracles_way(ForesightFair(momentum, along.max_workers), SlowFairFarsight(momentum), along)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(along=courses)
@settings(max_examples=25)
def test_ringleader(momentum: float, along: Course) -> None:
    require_the_oracles_way(Ringleader(momentum, along.max_workers), SlowRingleader(momentum), along)


def test_a_push_of_a_worker_ten_times_slower_counts_at_most_three_times() -> None:
    """One run, and many at once: worker 0 pushes once in 40 updates of 4 workers."""
    rule, batched = ForesightFair(0.0, 4), ForesightFair(0.0, 4)
    weights, both = torch.zeros(1), torch.zeros(2, 1)
    state, states = rule.start(weights), batched.start(both)
    for _ in range(60):
        moved = weights.clone()
        rule.apply(weights, state, torch.ones(1), Arrival(0, 39, torch.tensor(1.0), 4))
        staleness, live = torch.tensor([[39], [3]]), torch.full((2, 1), 4)
        arrival = Arrival(torch.zeros(2, dtype=torch.int64), staleness, torch.ones(2, 1), live)
        batched.apply(both, states, torch.ones(2, 1), arrival)
        moved -= weights
    assert state["numbers"][0] > 35.0, "its interval is known"
    assert moved.item() == pytest.approx(3.0)
    torch.testing.assert_close(both[0], weights)
    assert both[1].item() == pytest.approx(-60.0), "a worker of the usual speed counts once"
