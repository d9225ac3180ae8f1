"""Averaging on the server: the mean of the weights of all updates, beside live weights that know nothing of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from paceline.core.optimizers import Sgd
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.foresight import ForesightCached
from paceline.core.rules.plain import Plain
from paceline.interfaces import Arrival
from tests.support.courses import GAP, START, Course, Walk, course, courses


def slow_average(path: list[list[float]], live: list[int], horizon: float | None) -> list[float]:
    """Every share worked back from the last: what is left of the whole after those that came later."""
    shares, most = [], 0.0
    for t, number in enumerate(live, 1):
        most = max(number, most - 0.001 * (most - number))
        share = 9 / (t + 8) if horizon is None else max(2 / (t + 1), 1 / horizon)
        if t >= 64:
            share = 1 - (1 - share) ** 8 if t % 8 == 0 else 0.0
        shares.append(share * (number / most) ** 4)
    left, average = 1.0, [0.0] * len(path[0])
    for share, weights in zip(reversed(shares), reversed(path), strict=True):
        average = [a + left * share * w for a, w in zip(average, weights, strict=True)]
        left *= 1 - share
    return [a + left * w for a, w in zip(average, START, strict=True)]


def num_live(along: Course) -> list[int]:
    """At every push."""
    here, found = set(range(along.max_workers)), []
    for turn in along.turns:
        here = (here - {turn.leave}) | ({turn.join} if turn.join is not None else set())
        found.append(len(here))
    return found


@pytest.mark.parametrize("horizon", [None, 1.0, 7.0, 500.0])
@given(along=courses)
@settings(max_examples=10)
def test_the_average_is_the_weighted_mean_of_all_weights_so_far(horizon: float | None, along: Course) -> None:
    walk = Walk(Averaged(ForesightCached(0.9, along.max_workers), horizon), along)
    path = walk.to_the_end()
    found = walk.rule.evaluated(walk.weights, walk.state)
    torch.testing.assert_close(found, torch.tensor(slow_average(path, num_live(along), horizon)), rtol=1e-4, atol=1e-5)
    assert found[GAP] == 0


@pytest.mark.parametrize("horizon", [None, 30.0])
def test_later_only_every_eighth_update_is_averaged(horizon: float | None) -> None:
    """Alone, and side by side with another run."""
    along = course(3, max_workers=3, length=150)
    walk = Walk(Averaged(ForesightCached(0.9, along.max_workers), horizon), along)
    path = walk.to_the_end()
    found = walk.rule.evaluated(walk.weights, walk.state)
    torch.testing.assert_close(found, torch.tensor(slow_average(path, num_live(along), horizon)), rtol=1e-4, atol=1e-5)
    rule, batched = Averaged(Plain(Sgd()), horizon), torch.zeros(2, 3)
    alone, state = torch.zeros(3), rule.start(batched)
    other = Averaged(Plain(Sgd()), horizon)
    beside = other.start(alone)
    for update in range(150):
        gradient = torch.full((3,), float(update % 7) - 2.5)
        rule.apply(batched, state, gradient.repeat(2, 1), Arrival(None, 0, torch.full((2, 1), 0.1), 1))
        other.apply(alone, beside, gradient, Arrival(None, 0, torch.tensor(0.1), 1))
    torch.testing.assert_close(rule.evaluated(batched, state)[1], other.evaluated(alone, beside))


@given(along=courses)
@settings(max_examples=10)
def test_the_live_weights_do_not_know_that_they_are_averaged(along: Course) -> None:
    averaged = Walk(Averaged(ForesightCached(0.9, along.max_workers)), along)
    assert averaged.to_the_end() == Walk(ForesightCached(0.9, along.max_workers), along).to_the_end()


def test_before_the_first_update_the_average_is_where_training_starts() -> None:
    weights = torch.tensor([1.0, 2.0])
    rule = Averaged(Plain(Sgd()))
    state = rule.start(weights)
    assert torch.equal(rule.evaluated(weights, state), weights)
    assert rule.evaluated(weights, state) is not weights
    plain = Plain(Sgd())
    assert plain.evaluated(weights, plain.start(weights)) is weights
