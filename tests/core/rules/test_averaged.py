"""Averaging on the server: the mean of the weights of all updates, beside live weights that know nothing of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from paceline.core.optimizers import Sgd
from paceline.core.rules.averaged import POWER, Averaged
from paceline.core.rules.foresight import ForesightCached
from paceline.core.rules.plain import Plain
from paceline.interfaces import Arrival
from tests.support.courses import GAP, START, Course, Walk, course, courses


def slow_average(path: list[list[float]], horizon: float | None, present: list[float] | None = None) -> list[float]:
    """Every share worked back from the last: what is left of the whole after those that came later."""
    shares = []
    for t, fraction in enumerate(present or [1.0] * len(path), 1):
        share = 9 / (t + 8) if horizon is None else max(2 / (t + 1), 1 / horizon)
        if t >= 64:
            share = 1 - (1 - share) ** 8 if t % 8 == 0 else 0.0
        shares.append(share * fraction**POWER)
    left, average = 1.0, [0.0] * len(path[0])
    for share, weights in zip(reversed(shares), reversed(path), strict=True):
        average = [a + left * share * w for a, w in zip(average, weights, strict=True)]
        left *= 1 - share
    return [a + left * w for a, w in zip(average, START[: len(average)], strict=True)]


@pytest.mark.parametrize("horizon", [None, 1.0, 7.0, 500.0])
@given(along=courses)
@settings(max_examples=10)
def test_the_average_is_the_weighted_mean_of_all_weights_so_far(horizon: float | None, along: Course) -> None:
    walk = Walk(Averaged(ForesightCached(0.9, along.max_workers), horizon), along)
    path = walk.to_the_end()
    found = walk.rule.evaluated(walk.weights, walk.state)
    torch.testing.assert_close(found, torch.tensor(slow_average(path, horizon)), rtol=1e-4, atol=1e-5)
    assert found[GAP] == 0


@pytest.mark.parametrize("horizon", [None, 30.0])
def test_later_only_every_eighth_update_is_averaged(horizon: float | None) -> None:
    """Alone, and side by side with another run."""
    along = course(3, max_workers=3, length=150)
    walk = Walk(Averaged(ForesightCached(0.9, along.max_workers), horizon), along)
    path = walk.to_the_end()
    found = walk.rule.evaluated(walk.weights, walk.state)
    torch.testing.assert_close(found, torch.tensor(slow_average(path, horizon)), rtol=1e-4, atol=1e-5)
    rule, batched = Averaged(Plain(Sgd()), horizon), torch.zeros(2, 3)
    alone, state = torch.zeros(3), rule.start(batched)
    other = Averaged(Plain(Sgd()), horizon)
    beside = other.start(alone)
    for update in range(150):
        gradient = torch.full((3,), float(update % 7) - 2.5)
        rule.apply(batched, state, gradient.repeat(2, 1), Arrival(None, 0, torch.full((2, 1), 0.1), 1))
        other.apply(alone, beside, gradient, Arrival(None, 0, torch.tensor(0.1), 1))
    torch.testing.assert_close(rule.evaluated(batched, state)[1], other.evaluated(alone, beside))


def test_updates_count_less_while_finished_workers_are_missing() -> None:
    """Alone, and side by side with a run in which nobody finishes."""
    present = [(1.0, 0.75, 0.5, 0.25)[update // 40] for update in range(150)]
    rule, batched = Averaged(Plain(Sgd())), torch.full((2, 1), START[0])
    alone, state = torch.full((1,), START[0]), rule.start(batched)
    other, path = Averaged(Plain(Sgd())), []
    beside = other.start(alone)
    for update, share in enumerate(present):
        gradient = torch.full((1,), float(update % 7) - 2.5)
        shares = torch.tensor([[share], [1.0]])
        rule.apply(batched, state, gradient.repeat(2, 1), Arrival(None, 0, torch.full((2, 1), 0.1), 4, shares))
        other.apply(alone, beside, gradient, Arrival(None, 0, torch.tensor(0.1), 4, share))
        path.append(alone.tolist())
    expected = torch.tensor(slow_average(path, None, present))
    torch.testing.assert_close(other.evaluated(alone, beside), expected)
    torch.testing.assert_close(rule.evaluated(batched, state)[0], expected)
    torch.testing.assert_close(rule.evaluated(batched, state)[1], torch.tensor(slow_average(path, None)))


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
