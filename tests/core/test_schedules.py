"""Budgets and learning-rate schedules: functions of samples applied and versions, nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.core.schedules import Budget, Schedule
from paceline.errors import UserError
from paceline.settings.resolve import resolve

fractions = st.floats(0.0, 1.0)
KINDS = ["constant", "exponential", "cosine"]


def test_a_shared_budget_is_spent_by_samples() -> None:
    budget = Budget(samples=100, epoch_samples=50)
    assert [budget.exhausted(samples, version=10**6) for samples in (0, 99, 100, 132)] == [False, False, True, True]
    assert [budget.fraction(samples, version=7) for samples in (0, 25, 100, 132)] == [0.0, 0.25, 1.0, 1.0]


def test_steps_are_spent_by_versions() -> None:
    budget = Budget(samples=100, epoch_samples=50, steps=8)
    assert [budget.exhausted(10**6, version) for version in (0, 7, 8)] == [False, False, True]
    assert [budget.fraction(10**6, version) for version in (0, 2, 8, 9)] == [0.0, 0.25, 1.0, 1.0]


def test_an_own_budget_is_never_spent_by_samples_but_still_scales_the_schedule() -> None:
    budget = Budget(samples=100, epoch_samples=50, per_worker=True)
    assert not budget.exhausted(10**6, 10**6)
    assert budget.fraction(50, 3) == 0.5


@given(fraction=fractions, epochs=st.floats(0.0, 100.0))
def test_constant_is_constant(fraction: float, epochs: float) -> None:
    assert Schedule(0.3).lr(fraction, epochs) == 0.3


@pytest.mark.parametrize(("epochs", "expected"), [(0.0, 1.0), (0.999, 1.0), (1.0, 0.5), (2.7, 0.25), (4.0, 0.0625)])
def test_exponential_decays_once_an_epoch(epochs: float, expected: float) -> None:
    assert Schedule(1.0, "exponential", 0.5).lr(0.5, epochs) == expected


@given(fraction=fractions)
def test_cosine_falls_from_base_to_zero(fraction: float) -> None:
    schedule = Schedule(0.2, "cosine")
    assert schedule.lr(fraction, 0.0) == pytest.approx(0.1 * (1 + math.cos(math.pi * fraction)))
    assert schedule.lr(0.0, 0.0) == 0.2
    assert schedule.lr(1.0, 9.0) == pytest.approx(0.0, abs=1e-12)


@given(first=fractions, second=fractions)
def test_cosine_never_rises(first: float, second: float) -> None:
    early, late = sorted((first, second))
    assert Schedule(0.2, "cosine").lr(early, 0.0) >= Schedule(0.2, "cosine").lr(late, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_grows_in_a_straight_line_and_is_never_zero(kind: str) -> None:
    schedule = Schedule(0.4, kind, 0.9, warmup=0.2)
    assert schedule.lr(0.05, 0.0) == pytest.approx(0.1)
    assert schedule.lr(0.1, 0.0) == pytest.approx(0.2)
    assert schedule.lr(0.0, 0.0) > 0.0
    assert schedule.lr(0.2, 0.0) == 0.4


@given(warmup=st.floats(0.01, 0.9), epochs=st.floats(0.0, 20.0), kind=st.sampled_from(KINDS))
def test_the_rate_does_not_jump_where_warm_up_ends(warmup: float, epochs: float, kind: str) -> None:
    schedule = Schedule(0.4, kind, 0.5, warmup)
    before, after = schedule.lr(warmup * (1.0 - 1e-9), epochs), schedule.lr(warmup, epochs)
    assert before == pytest.approx(after, rel=1e-6)


@given(fraction=fractions, warmup=st.floats(0.0, 0.9))
def test_cosine_falls_to_zero_over_what_warm_up_leaves(fraction: float, warmup: float) -> None:
    found = Schedule(0.2, "cosine", warmup=warmup).lr(warmup + fraction * (1.0 - warmup), 0.0)
    assert found == pytest.approx(Schedule(0.2, "cosine").lr(fraction, 0.0), abs=1e-9)


@pytest.mark.parametrize("kind", ["constant", "exponential"])
def test_after_warm_up_a_schedule_is_where_it_would_be_without(kind: str) -> None:
    assert Schedule(0.4, kind, 0.9, 0.2).lr(0.9, 3.0) == Schedule(0.4, kind, 0.9).lr(0.9, 3.0)


@given(fraction=fractions, warmup=st.floats(0.01, 0.99), kind=st.sampled_from(KINDS))
def test_the_rate_stays_between_zero_and_base(fraction: float, warmup: float, kind: str) -> None:
    assert 0.0 <= Schedule(0.4, kind, 0.9, warmup).lr(fraction, 10 * fraction) <= 0.4


def test_steps_of_lr_follow_a_warm_up_as_in_published_runs() -> None:
    schedule = Schedule(0.1, "steps", 0.1, warmup=5 / 160, milestones=(80.0, 120.0))
    found = [schedule.lr(epochs / 160, epochs) for epochs in (0.0, 2.5, 5.0, 79.99, 80.0, 119.99, 120.0, 160.0)]
    assert found == pytest.approx([0.001, 0.05, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(
    "text", ["steps", "steps:", "steps:80,a", "steps:120,80", "steps:80,80", "steps:0", "steps:nan"]
)
def test_milestones_that_do_not_grow_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"schedule '{text}': give the epochs .* growing, as in steps:80,120"):
        resolve(RunConfig(schedule=text))
