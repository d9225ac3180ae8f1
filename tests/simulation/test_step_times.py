"""Step times: distributions of a worker's steps, and of the workers' own means."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import UserError
from paceline.simulation.step_times import StepTimes, parse_speeds


def times_of(text: str, workers: int, steps: int, seed: int = 0) -> np.ndarray:
    times = StepTimes(parse_speeds(text, workers), seed)
    return np.array([[times.seconds(worker, step) for step in range(steps)] for worker in range(workers)])


def test_gamma_times_have_the_mean_and_the_spread_that_are_asked_for() -> None:
    times = times_of("gamma:20ms,.1", 8, 2560)
    assert times.mean() == pytest.approx(0.02, rel=0.01) and times.std() == pytest.approx(0.002, rel=0.05)
    assert np.std(times.mean(1)) < 2e-4, "all workers have the same mean"


def test_the_means_of_gamma_workers_are_drawn_once_per_run() -> None:
    times = times_of("gamma:1s,.1,.6", 400, 256)
    means = times.mean(1)
    assert means.mean() == pytest.approx(1.0, rel=0.1) and means.std() == pytest.approx(0.6, rel=0.15)
    assert np.all(np.abs(times.std(1) / means - 0.1) < 0.03)
    assert np.array_equal(times[:2], times_of("gamma:1s,.1,.6", 2, 256)), "a function of seed, worker and step"
    assert not np.array_equal(times[:2], times_of("gamma:1s,.1,.6", 2, 256, seed=1))


def test_no_spread_is_a_constant_and_factors_multiply() -> None:
    assert times_of("gamma:2s,0*1,3", 2, 2).tolist() == [[2.0, 2.0], [6.0, 6.0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gamma:1s", "gamma takes 2 or 3 numbers, got 1"),
        ("gamma:1s,.1,.1,.1", "gamma takes 2 or 3 numbers, got 4"),
        ("gamma:1s,-1", "a spread of -1 times the mean is not between 0 and 5"),
        ("gamma:1s,.1,6", "a spread of 6 times the mean is not between 0 and 5"),
        ("lognormal:1s,9", "a spread of 9 times the mean is not between 0 and 5"),
    ],
)
def test_other_spreads_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_speeds(text, 2)
