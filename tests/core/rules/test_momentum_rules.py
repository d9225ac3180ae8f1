"""Rules with momentum of each worker's own: `dana` and `dana-slim`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from paceline.core.rules.dana import Dana, DanaSlim
from tests.support.courses import SIZE, START, Course, courses, require_the_oracles_way


class SlowDana:
    """Every velocity in a dict, summed anew for each hand-out."""

    def __init__(self, momentum: float) -> None:
        self.weights = list(START)
        self.momentum, self.lr = momentum, 0.0
        self.velocities: dict[int, list[float]] = {}

    def leave(self, worker: int) -> None:
        self.velocities.pop(worker, None)

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        before = self.velocities.get(worker, [0.0] * SIZE)
        self.velocities[worker] = [self.momentum * v + g for v, g in zip(before, gradient, strict=True)]
        self.weights = [w - lr * v for w, v in zip(self.weights, self.velocities[worker], strict=True)]
        self.lr = lr

    def sent(self, worker: int) -> list[float]:
        totals = [sum(velocity[place] for velocity in self.velocities.values()) for place in range(SIZE)]
        return [w - self.lr * self.momentum * total for w, total in zip(self.weights, totals, strict=True)]


class SlowDanaSlim:
    """As published: each worker keeps its velocity and sends momentum times it plus the gradient; the server steps."""

    def __init__(self, momentum: float) -> None:
        self.weights = list(START)
        self.momentum = momentum
        self.workers: dict[int, list[float]] = {}

    def leave(self, worker: int) -> None:
        self.workers.pop(worker, None)

    def _made_by_the_worker(self, worker: int, gradient: list[float]) -> list[float]:
        before = self.workers.get(worker, [0.0] * SIZE)
        self.workers[worker] = [self.momentum * v + g for v, g in zip(before, gradient, strict=True)]
        return [self.momentum * v + g for v, g in zip(self.workers[worker], gradient, strict=True)]

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None:
        received = self._made_by_the_worker(worker, gradient)
        self.weights = [w - lr * u for w, u in zip(self.weights, received, strict=True)]

    def sent(self, worker: int) -> list[float]:
        return list(self.weights)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(along=courses)
@settings(max_examples=15)
def test_dana(momentum: float, along: Course) -> None:
    require_the_oracles_way(Dana(momentum, along.max_workers), SlowDana(momentum), along)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(along=courses)
@settings(max_examples=15)
def test_dana_slim(momentum: float, along: Course) -> None:
    require_the_oracles_way(DanaSlim(momentum, along.max_workers), SlowDanaSlim(momentum), along)
