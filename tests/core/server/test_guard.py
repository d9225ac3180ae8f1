"""The guard's arithmetic: norms that overflow float32, a bound that liars do not move, and what it costs nobody."""

from __future__ import annotations

import json
import math

import pytest
import torch

from paceline.core.server.guard import BOUND, MIN_HISTORY, NormHistory, norm_of


@pytest.mark.parametrize(("value", "norm"), [(3.0, 6.0), (1e30, 2e30), (-2e38, 4e38), (0.0, 0.0)])
def test_a_norm_is_right_also_where_its_square_overflows(value: float, norm: float) -> None:
    assert math.isclose(norm_of(torch.full((4,), value)), norm, rel_tol=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_norm_is_finite_if_and_only_if_the_update_is(broken: float) -> None:
    update = torch.full((1000,), 3e38)
    assert math.isfinite(norm_of(update))
    update[500] = broken
    assert not math.isfinite(norm_of(update))


def test_the_first_pushes_are_not_judged() -> None:
    history = NormHistory()
    for _ in range(MIN_HISTORY - 1):
        assert not history.exceeds(1e30)
        history.add(0, 1.0)
    assert not history.exceeds(1e30)
    history.add(0, 1.0)
    assert history.exceeds(1e30)


@pytest.mark.parametrize(("workers", "liars"), [(2, 1), (3, 1), (5, 2), (7, 3)])
def test_a_minority_does_not_move_the_bound(workers: int, liars: int) -> None:
    history = NormHistory()
    for step in range(200):
        for worker in range(workers):
            history.add(worker, 1e30 if worker < liars else 1.0 + step % 3)
    assert not history.exceeds(2.9 * BOUND)
    assert history.exceeds(3.1 * BOUND)


def test_a_slow_growth_is_followed_and_zeros_are_no_measure() -> None:
    history, norm = NormHistory(), 1e-9
    for _ in range(400):
        assert not history.exceeds(norm)
        history.add(0, norm)
        norm *= 1.2
    silent = NormHistory()
    for _ in range(100):
        silent.add(0, 0.0)
    assert not silent.exceeds(1e9)


def test_a_quiet_end_of_training_does_not_make_an_old_norm_suspicious() -> None:
    """A batch that is learned gives no gradient, and the next one may give that of the beginning again."""
    history = NormHistory()
    for _ in range(1000):
        history.add(0, 5.0)
    for _ in range(2000):
        history.add(0, 1e-4)
    assert not history.exceeds(5.0)


def test_a_history_goes_on_from_its_facts() -> None:
    history, restored = NormHistory(), NormHistory()
    for number in range(70):
        history.add(number % 3, 1.0 + number % 7)
    restored.restore(json.loads(json.dumps(history.facts())))
    assert restored.facts() == history.facts()
    for norm in (1.0, 6.9 * BOUND, 7.1 * BOUND):
        assert restored.exceeds(norm) == history.exceeds(norm)
