"""Deadlines: what is normal is learned from each worker's own pace, and nobody is due while the server has the turn."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.failure_detector import FEWEST, LEAST_SPREAD, WINDOW, FailureDetector

SECONDS = st.floats(0.0, 1000.0, allow_nan=False)


def fresh() -> FailureDetector:
    return FailureDetector(start=10.0, floor=1.0, ceiling=100.0, k=8.0)


def live(deadlines: FailureDetector, silences: list[float], worker: int = 0, now: float = 0.0) -> float:
    """Answer and hear a worker that takes so long each time; the time after it."""
    for silence in silences:
        deadlines.asked(worker, now)
        now += silence
        deadlines.heard(worker, now)
    return now


def test_before_anything_was_seen_the_start_value_holds() -> None:
    deadlines = fresh()
    deadlines.asked(3, 5.0)
    assert deadlines.limit(3) == 10.0
    assert deadlines.next_due() == 15.0
    assert deadlines.due(15.0) == []
    assert deadlines.due(15.001) == [3]


@given(st.lists(SECONDS, max_size=2 * WINDOW))
def test_the_limit_is_the_formula_between_floor_and_ceiling(silences: list[float]) -> None:
    deadlines = FailureDetector(start=10.0, floor=1.0, ceiling=100.0, k=3.0)
    for silence in silences:
        deadlines.asked(0, 0.0)
        deadlines.heard(0, silence)
    kept = silences[-WINDOW:]
    least = 1.0 if len(kept) >= FEWEST else 10.0
    middle = median(kept) if kept else 0.0
    spread = median(abs(silence - middle) for silence in kept) if kept else 0.0
    wanted = min(100.0, max(least, middle + 3.0 * max(spread, LEAST_SPREAD * middle)))
    assert deadlines.limit(0) == pytest.approx(wanted)


@given(st.lists(st.floats(2.0, 4.0), min_size=WINDOW, max_size=WINDOW), st.floats(0.0, 1e6))
def test_one_outlier_moves_the_limit_no_further_than_the_others_reach(silences: list[float], outlier: float) -> None:
    deadlines = fresh()
    live(deadlines, [*silences[1:], outlier])
    least, most = min(silences), max(silences)
    spread = max(most - least, LEAST_SPREAD * most)
    assert least <= deadlines.limit(0) <= most + 8.0 * spread


@given(st.floats(2.0, 40.0), st.floats(2.0, 40.0))
def test_a_change_of_pace_is_followed_within_a_window(before: float, after: float) -> None:
    deadlines, at_once = fresh(), fresh()
    now = live(deadlines, [before] * WINDOW)
    live(deadlines, [after] * WINDOW, now=now)
    live(at_once, [after] * WINDOW)
    assert deadlines.limit(0) == pytest.approx(at_once.limit(0))


def test_after_half_a_window_the_new_pace_is_normal() -> None:
    deadlines = fresh()
    now = live(deadlines, [2.0] * WINDOW)
    live(deadlines, [20.0] * (WINDOW // 2 + 1), now=now)
    assert deadlines.limit(0) >= 20.0


@given(st.lists(st.floats(0.5, 5.0), max_size=WINDOW), st.floats(0.0, 1e9))
def test_whom_the_server_holds_back_is_never_silent(silences: list[float], later: float) -> None:
    deadlines = fresh()
    now = live(deadlines, silences)
    deadlines.heard(0, now)
    assert deadlines.due(now + later) == []
    assert deadlines.next_due() is None
    assert deadlines.silence(0, now + later) == 0.0


@given(st.lists(st.floats(0.5, 5.0), min_size=FEWEST, max_size=WINDOW), st.floats(0.0, 1e6))
def test_how_long_the_server_held_it_back_teaches_nothing(silences: list[float], held: float) -> None:
    held_back, answered = fresh(), fresh()
    live(answered, silences)
    now = 0.0
    for silence in silences:
        now = live(held_back, [silence], now=now) + held
    assert held_back.limit(0) == pytest.approx(answered.limit(0), rel=1e-6, abs=1e-6)


@given(st.dictionaries(st.integers(0, 9), SECONDS, min_size=1), SECONDS)
def test_nobody_is_due_before_the_next_moment_and_somebody_is_after_it(turns: dict[int, float], pace: float) -> None:
    deadlines = fresh()
    for worker, now in turns.items():
        live(deadlines, [pace * (worker + 1)] * FEWEST, worker, now - 5000.0)
        deadlines.asked(worker, now)
    moment = deadlines.next_due()
    assert moment is not None
    assert deadlines.due(moment) == []
    late = deadlines.due(moment + 1e-6)
    assert late == sorted(late) and late
    assert deadlines.due(1e9) == sorted(turns)


def test_a_beat_is_a_sign_of_life_and_no_end_of_the_turn() -> None:
    deadlines = fresh()
    deadlines.asked(0, 0.0)
    for second in range(1, 60):
        assert deadlines.due(float(second)) == []
        deadlines.beat(0, float(second))
    assert deadlines.limit(0) == pytest.approx(2.0)
    assert deadlines.due(61.5) == [0]
    deadlines.heard(0, 62.0)
    deadlines.beat(0, 70.0)
    assert deadlines.next_due() is None


def test_who_is_due_stays_due_until_heard_or_forgotten() -> None:
    deadlines = fresh()
    deadlines.asked(0, 0.0)
    deadlines.asked(1, 0.0)
    assert deadlines.due(20.0) == deadlines.due(21.0) == [0, 1]
    deadlines.forget(0)
    deadlines.heard(1, 22.0)
    assert deadlines.due(1e9) == []


def test_whoever_returns_is_new() -> None:
    deadlines = fresh()
    live(deadlines, [2.0] * WINDOW)
    assert deadlines.limit(0) == pytest.approx(4.0)
    deadlines.forget(0)
    assert deadlines.limit(0) == 10.0


def test_while_the_server_did_not_listen_nobody_was_silent() -> None:
    deadlines = fresh()
    deadlines.asked(0, 0.0)
    deadlines.heard(1, 0.0)
    deadlines.excuse(100.0)
    assert deadlines.due(105.0) == []
    assert deadlines.silence(0, 105.0) == 5.0
    assert deadlines.next_due() == 110.0


def test_a_clock_that_goes_back_does_no_harm() -> None:
    deadlines = fresh()
    deadlines.asked(0, 100.0)
    deadlines.heard(0, 90.0)
    deadlines.asked(0, 90.0)
    assert deadlines.silence(0, 80.0) == 0.0
    assert deadlines.due(80.0) == []
