"""Delays on purpose: how they are written, and that each is a function of its address."""

from __future__ import annotations

import statistics
from itertools import permutations

import pytest

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.notation import Delay, delays_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30ms", 0.03),
        ("2s", 2.0),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("250us", 0.00025),
        ("0ms", 0.0),
        ("1h", 3600.0),
        ("2min", 120.0),
        ("1e-3s", 0.001),
    ],
)
def test_times_and_their_units(text: str, seconds: float) -> None:
    assert delays_of(RunConfig(delay=[text], workers=1)) == {0: Delay(pytest.approx(seconds))}  # type: ignore[arg-type]


@pytest.mark.parametrize("texts", list(permutations(["10ms", "20ms@0,2", "30ms@3"])))
def test_a_delay_of_named_workers_wins_over_that_of_all_in_any_order(texts: tuple[str, ...]) -> None:
    assert delays_of(RunConfig(delay=list(texts), workers=4)) == {
        0: Delay(0.02), 1: Delay(0.01), 2: Delay(0.02), 3: Delay(0.03),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "whose"),
    [(["10ms", "20ms"], "all workers"), (["10ms@1,2", "5ms", "20ms@2"], "worker 2"), (["1ms@2,2"], "worker 2")],
)
def test_two_delays_of_the_same_workers_are_refused(texts: list[str], whose: str) -> None:
    with pytest.raises(UserError, match=f"are both for {whose}: leave one out"):
        delays_of(RunConfig(delay=texts, workers=4))


def test_a_delay_is_for_everybody_or_for_those_named() -> None:
    assert delays_of(RunConfig(delay=["20ms@3"], workers=4)) == {3: Delay(0.02)}
    assert delays_of(RunConfig(delay=[], workers=4)) == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "30", "30 m", "-3ms", "1d", "nanms", "infs", "normal", "normal:", "normal:30ms", "normal:30ms,5ms,5ms",
        "normal:30ms,-5ms", "uniform:1ms,2ms", "30ms@", "30ms@4", "30ms@-1", "30ms@one", "30ms@0,", "@1", "1e-3",
    ],
)  # fmt: skip
def test_what_is_no_delay_is_a_user_error_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--delay") as error:
        delays_of(RunConfig(delay=[text], workers=4))
    assert f"'{text}'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_constant_delay_is_constant() -> None:
    assert {Delay(0.03).seconds(seed, 1, seq) for seed in range(3) for seq in range(3)} == {0.03}


def test_a_normal_delay_is_a_function_of_its_address() -> None:
    delay = Delay(0.06, 0.005)
    first = [delay.seconds(7, 1, seq) for seq in range(10)]
    assert [delay.seconds(7, 1, seq) for seq in reversed(range(10))] == first[::-1]
    assert len({*first, delay.seconds(8, 1, 0), delay.seconds(7, 2, 0)}) == 12


def test_a_normal_delay_has_the_mean_and_deviation_asked_for_and_is_never_negative() -> None:
    waits = [Delay(0.06, 0.005).seconds(0, 0, seq) for seq in range(2000)]
    assert statistics.mean(waits) == pytest.approx(0.06, abs=5 * 0.005 / 2000**0.5)
    assert statistics.stdev(waits) == pytest.approx(0.005, rel=0.1)
    assert min(Delay(0.001, 0.005).seconds(0, 0, seq) for seq in range(500)) == 0.0
