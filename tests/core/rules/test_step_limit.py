"""Steps that are limited by the curvature they meet and by how gradients grow, against lists and loops."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.core.rules.foresight import Foresight
from paceline.core.rules.step_limit import CRITICAL, MAX_GROWTH, StepLimit
from paceline.interfaces import Arrival

SIZE, WORKERS = 6, 3


class SlowLimit:
    """Every worker's latest pair as lists, and sums that are written out."""

    def __init__(self, start: list[float]) -> None:
        self.sent = {worker: start for worker in range(WORKERS)}
        self.pairs: dict[int, tuple[list[float], list[float]]] = {}
        self.usual: dict[int, float] = {}
        self.covariance = self.spread = 0.0

    def measure(self, worker: int, gradient: list[float], lr: float) -> tuple[list[float], float]:
        norm, limit = math.sqrt(sum(g * g for g in gradient)), MAX_GROWTH * self.usual.get(worker, math.inf)
        gradient = [g * min(1.0, limit / norm) for g in gradient]
        seen = min(norm, limit)
        self.usual[worker] = 0.75 * self.usual.get(worker, seen) + 0.25 * seen
        others = [pair for other, pair in self.pairs.items() if other != worker]
        kept = math.exp(-1 / (2 * WORKERS))
        self.covariance, self.spread = kept * self.covariance, kept * self.spread
        if others:
            means = [
                [sum(each) / len(others) for each in zip(*half, strict=True)] for half in zip(*others, strict=True)
            ]
            dg = [g - mean for g, mean in zip(gradient, means[0], strict=True)]
            dw = [w - mean for w, mean in zip(self.sent[worker], means[1], strict=True)]
            self.covariance += sum(g * w for g, w in zip(dg, dw, strict=True))
            self.spread += sum(w * w for w in dw)
        self.pairs[worker] = gradient, self.sent[worker]
        curvature = max(0.0, self.covariance) / self.spread if self.spread else 0.0
        return gradient, math.sqrt(min(10.0, max(1.0, WORKERS * lr * curvature / CRITICAL)))


def turns(number: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Workers in turn, their gradients of a bowl with noise, and the weights that each is sent then."""
    generator = torch.Generator().manual_seed(number)
    found, held = [], {worker: torch.zeros(SIZE) for worker in range(WORKERS)}
    for turn in range(30):
        worker = turn % WORKERS
        noise = 0.1 * torch.randn(SIZE, generator=generator)
        gradient = (2.0 + (turn > 20) * 20.0) * held[worker] + noise
        held[worker] = torch.randn(SIZE, generator=generator)
        found.append((worker, gradient, held[worker]))
    return found


@pytest.mark.parametrize("lr", [0.01, 3.0])
def test_it_measures_what_lists_and_loops_do(lr: float) -> None:
    limit, slow, rate = StepLimit(WORKERS), SlowLimit([0.0] * SIZE), torch.tensor(lr)
    state, clipped, factors = limit.start(torch.zeros(SIZE)), 0, set()
    for worker, gradient, sent in turns(3):
        found, shorter = limit.measure(state, gradient, Arrival(worker, WORKERS - 1, rate, WORKERS), float(WORKERS))
        expected, by = slow.measure(worker, gradient.tolist(), lr)
        assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert shorter == pytest.approx(by, rel=1e-3)
        limit.sent(state, worker, sent)
        slow.sent[worker] = sent.tolist()
        clipped += not torch.equal(found, gradient)
        factors.add(round(by, 3))
    assert clipped > 0
    assert (factors == {1.0}) == (lr == 0.01)


def test_the_curvature_of_a_bowl_is_found_through_noise() -> None:
    """The noise of the gradients is as large as they are, and does not bias the estimate."""
    limit, generator, rate = StepLimit(WORKERS), torch.Generator().manual_seed(0), torch.tensor(0.1)
    weights = torch.randn(20_000, generator=generator)
    state = limit.start(weights)
    held = {worker: weights for worker in range(WORKERS)}
    for turn in range(60):
        worker = turn % WORKERS
        gradient = 4.0 * held[worker] + 4.0 * torch.randn(20_000, generator=generator)
        limit.measure(state, gradient, Arrival(worker, WORKERS - 1, rate, WORKERS), float(WORKERS))
        held[worker] = weights + 0.5 * torch.randn(20_000, generator=generator)
        limit.sent(state, worker, held[worker])
    covariance, spread, shorter = state["limit"][-3:].tolist()
    assert covariance / spread == pytest.approx(4.0, rel=0.1)
    assert shorter == pytest.approx(math.sqrt(WORKERS * 0.1 * 4.0 / CRITICAL), rel=0.05)


def test_a_delayed_step_that_grows_without_it_is_held_with_it() -> None:
    """A bowl so steep that the look-ahead alone is unstable: n lr curvature is 1.6."""
    ends = []
    for limit in (None, StepLimit(8)):
        weights, rule, rate = torch.ones(SIZE), Foresight(0.9, 8, horizon=1.25, limit=limit), torch.tensor(0.02)
        state = rule.start(weights)
        held = [torch.ones(SIZE) for _ in range(8)]
        for turn in range(800):
            worker = turn % 8
            rule.apply(weights, state, 10.0 * held[worker], Arrival(worker, min(turn, 7), rate, 8))
            rule.reply_weights(weights, state, worker, held[worker])
        ends.append(float(weights.norm()))
    assert not ends[0] < 1e3
    assert ends[1] < 1.0


def test_a_silent_worker_is_no_longer_compared_with() -> None:
    limit, rate = StepLimit(WORKERS), torch.tensor(0.1)
    state = limit.start(torch.zeros(SIZE))
    for worker in range(WORKERS):
        limit.measure(state, torch.ones(SIZE), Arrival(worker, 2, rate, WORKERS), 3.0)
    before = state["limit"].clone()
    limit.expire(state, 1)
    assert not state["pairs"][1].any()
    assert (before - state["limit"]).tolist() == [0.0] * (WORKERS + 1) + [1.0] + [0.0] * 4
    torch.testing.assert_close(state["pair_sum"], state["pairs"][0] + state["pairs"][2])
