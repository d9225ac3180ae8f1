"""Deadlines: what is normal is learned from each worker's own pace, and nobody is due while the server has the turn."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.failure_detector import MIN_SILENCES, MIN_SPREAD, WINDOW, FailureDetector, StallDetector

SECONDS = st.floats(0.0, 1000.0, allow_nan=False)


def fresh() -> FailureDetector:
    return FailureDetector(start=10.0, floor=1.0, ceiling=100.0, k=8.0)


def live(failure_detector: FailureDetector, silences: list[float], worker: int = 0, now: float = 0.0) -> float:
    """Answer and hear a worker that takes so long each time; the time after it."""
    for silence in silences:
        failure_detector.start_wait(worker, now)
        now += silence
        failure_detector.record_message(worker, now)
    return now


def test_before_anything_was_seen_the_start_value_holds() -> None:
    failure_detector = fresh()
    failure_detector.start_wait(3, 5.0)
    assert failure_detector.limit(3) == 10.0
    assert failure_detector.next_due() == 15.0
    assert failure_detector.due(15.0) == []
    assert failure_detector.due(15.001) == [3]


@given(st.lists(SECONDS, max_size=2 * WINDOW))
def test_the_limit_is_the_formula_between_floor_and_ceiling(silences: list[float]) -> None:
    failure_detector = FailureDetector(start=10.0, floor=1.0, ceiling=100.0, k=3.0)
    for silence in silences:
        failure_detector.start_wait(0, 0.0)
        failure_detector.record_message(0, silence)
    kept = silences[-WINDOW:]
    least = 1.0 if len(kept) >= MIN_SILENCES else 10.0
    middle = median(kept) if kept else 0.0
    spread = median(abs(silence - middle) for silence in kept) if kept else 0.0
    wanted = min(100.0, max(least, middle + 3.0 * max(spread, MIN_SPREAD * middle)))
    assert failure_detector.limit(0) == pytest.approx(wanted)


@given(st.lists(st.floats(2.0, 4.0), min_size=WINDOW, max_size=WINDOW), st.floats(0.0, 1e6))
def test_one_outlier_moves_the_limit_no_further_than_the_others_reach(silences: list[float], outlier: float) -> None:
    failure_detector = fresh()
    live(failure_detector, [*silences[1:], outlier])
    least, most = min(silences), max(silences)
    spread = max(most - least, MIN_SPREAD * most)
    assert least <= failure_detector.limit(0) <= most + 8.0 * spread


@given(st.floats(2.0, 40.0), st.floats(2.0, 40.0))
def test_a_change_of_pace_is_followed_within_a_window(before: float, after: float) -> None:
    failure_detector, at_once = fresh(), fresh()
    now = live(failure_detector, [before] * WINDOW)
    live(failure_detector, [after] * WINDOW, now=now)
    live(at_once, [after] * WINDOW)
    assert failure_detector.limit(0) == pytest.approx(at_once.limit(0))


def test_after_half_a_window_the_new_pace_is_normal() -> None:
    failure_detector = fresh()
    now = live(failure_detector, [2.0] * WINDOW)
    live(failure_detector, [20.0] * (WINDOW // 2 + 1), now=now)
    assert failure_detector.limit(0) >= 20.0


@given(st.lists(st.floats(0.5, 5.0), max_size=WINDOW), st.floats(0.0, 1e9))
def test_whom_the_server_holds_back_is_never_silent(silences: list[float], later: float) -> None:
    failure_detector = fresh()
    now = live(failure_detector, silences)
    failure_detector.record_message(0, now)
    assert failure_detector.due(now + later) == []
    assert failure_detector.next_due() is None
    assert failure_detector.silence(0, now + later) == 0.0


@given(st.lists(st.floats(0.5, 5.0), min_size=MIN_SILENCES, max_size=WINDOW), st.floats(0.0, 1e6))
def test_how_long_the_server_held_it_back_teaches_nothing(silences: list[float], held: float) -> None:
    held_back, answered = fresh(), fresh()
    live(answered, silences)
    now = 0.0
    for silence in silences:
        now = live(held_back, [silence], now=now) + held
    assert held_back.limit(0) == pytest.approx(answered.limit(0), rel=1e-6, abs=1e-6)


@given(st.dictionaries(st.integers(0, 9), SECONDS, min_size=1), SECONDS)
def test_nobody_is_due_before_the_next_moment_and_somebody_is_after_it(turns: dict[int, float], pace: float) -> None:
    failure_detector = fresh()
    for worker, now in turns.items():
        live(failure_detector, [pace * (worker + 1)] * MIN_SILENCES, worker, now - 5000.0)
        failure_detector.start_wait(worker, now)
    moment = failure_detector.next_due()
    assert moment is not None
    assert failure_detector.due(moment) == []
    late = failure_detector.due(moment + 1e-6)
    assert late == sorted(late) and late
    assert failure_detector.due(1e9) == sorted(turns)


def test_a_beat_is_a_sign_of_life_and_no_end_of_the_turn() -> None:
    failure_detector = fresh()
    failure_detector.start_wait(0, 0.0)
    for second in range(1, 60):
        assert failure_detector.due(float(second)) == []
        failure_detector.heartbeat(0, float(second))
    assert failure_detector.limit(0) == pytest.approx(2.0)
    assert failure_detector.due(61.5) == [0]
    failure_detector.record_message(0, 62.0)
    failure_detector.heartbeat(0, 70.0)
    assert failure_detector.next_due() is None


def test_who_is_due_stays_due_until_heard_or_forgotten() -> None:
    failure_detector = fresh()
    failure_detector.start_wait(0, 0.0)
    failure_detector.start_wait(1, 0.0)
    assert failure_detector.due(20.0) == failure_detector.due(21.0) == [0, 1]
    failure_detector.forget(0)
    failure_detector.record_message(1, 22.0)
    assert failure_detector.due(1e9) == []


def test_whoever_returns_is_new() -> None:
    failure_detector = fresh()
    live(failure_detector, [2.0] * WINDOW)
    assert failure_detector.limit(0) == pytest.approx(4.0)
    failure_detector.forget(0)
    assert failure_detector.limit(0) == 10.0


def test_while_the_server_did_not_listen_nobody_was_silent() -> None:
    failure_detector = fresh()
    failure_detector.start_wait(0, 0.0)
    failure_detector.record_message(1, 0.0)
    failure_detector.extend(100.0)
    assert failure_detector.due(105.0) == []
    assert failure_detector.silence(0, 105.0) == 5.0
    assert failure_detector.next_due() == 110.0


def test_a_clock_that_goes_back_does_no_harm() -> None:
    failure_detector = fresh()
    failure_detector.start_wait(0, 100.0)
    failure_detector.record_message(0, 90.0)
    failure_detector.start_wait(0, 90.0)
    assert failure_detector.silence(0, 80.0) == 0.0
    assert failure_detector.due(80.0) == []


def working(stalls: StallDetector, turns: list[float], worker: int = 0, now: float = 0.0) -> float:
    """Answer a worker that pushes after so many seconds each time; the time after it."""
    for seconds in turns:
        stalls.start_turn(worker, now)
        now += seconds
        stalls.end_turn(worker, now)
    return now


def test_a_worker_that_computes_without_end_stalls_and_one_that_waits_does_not() -> None:
    stalls = StallDetector()
    for worker in (0, 1):
        working(stalls, [0.02] * 8, worker)
    stalls.start_turn(1, 1.0)  # worker 0 has pushed, and its reply is held back until the round closes
    assert stalls.due(20.9) == [] and stalls.due(21.1) == [1] and stalls.due(1e6) == [1]
    assert stalls.without_progress(0, 1e6) == 0.0 and stalls.without_progress(1, 35.0) == 34.0
    assert stalls.usual(1) == pytest.approx(0.02)
    stalls.end_turn(1, 40.0)
    assert stalls.due(1e6) == []


def test_slow_steps_and_first_steps_take_longer_to_stall() -> None:
    stalls = StallDetector()
    now = working(stalls, [30.0] * 8)
    stalls.start_turn(0, now)
    assert stalls.limit(0) == 300.0
    stalls.start_turn(1, now)  # nothing is known of it: it may compile its model
    assert stalls.due(now + 59.0) == [] and stalls.due(now + 61.0) == [1]


def test_a_pause_that_a_worker_came_back_from_is_normal_afterwards() -> None:
    stalls = StallDetector()
    now = working(stalls, [0.02] * 100 + [50.0] + [0.02] * 100)
    stalls.start_turn(0, now)
    assert stalls.limit(0) == 75.0  # its loop evaluates now and then
    now = working(stalls, [5000.0], now=now)
    stalls.start_turn(0, now)
    assert stalls.limit(0) == 300.0


def test_seconds_in_which_the_server_did_not_listen_do_not_count() -> None:
    stalls = StallDetector()
    now = working(stalls, [0.02] * 8)
    stalls.start_turn(0, now)
    stalls.extend(100.0)
    assert stalls.due(now + 119.0) == [] and stalls.due(now + 121.0) == [0]
    stalls.end_turn(0, now + 101.0)
    stalls.start_turn(0, now + 101.0)
    assert stalls.limit(0) == 20.0


def test_a_turn_has_no_more_steps_than_were_asked_for() -> None:
    """Heartbeats that count on for ever keep no worker from being named."""
    stalls = StallDetector()
    now = working(stalls, [0.02] * 8)
    stalls.start_turn(0, now, steps=3)
    for heartbeat in range(1, 100):
        stalls.record_progress(0, now + heartbeat, is_step=True)
    assert stalls.without_progress(0, now + 99.0) == 96.0
    stalls.record_progress(0, now + 99.0)  # a part of its push has arrived
    assert stalls.due(now + 100.0) == []


@pytest.mark.parametrize(("drop_after", "named", "dropped"), [(None, 20.0, None), (2.0, 2.0, 2.0), (50.0, 20.0, 50.0)])
def test_a_worker_is_dropped_only_if_asked_for(drop_after: float | None, named: float, dropped: float | None) -> None:
    stalls = StallDetector(drop_after=drop_after)
    now = working(stalls, [0.02] * 8)
    stalls.start_turn(0, now)
    assert stalls.due(now + named - 0.1) == [] and stalls.due(now + named + 0.1) == [0]
    assert stalls.to_drop(now + (dropped or 1e6) - 0.1) == []
    assert stalls.to_drop(now + (dropped or 1e6) + 0.1) == ([0] if dropped is not None else [])


def test_a_usual_step_that_is_longer_than_the_limit_drops_nobody() -> None:
    stalls = StallDetector(drop_after=2.0)
    now = working(stalls, [5.0] * 8)
    stalls.start_turn(0, now)
    assert stalls.to_drop(now + 49.0) == [] and stalls.to_drop(now + 51.0) == [0]
