"""Which samples of the train set are scored at the end: all of a small one, else a draw by the seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.assembly.work import scored_train
from paceline.config import UPKEEP, RunConfig
from paceline.errors import UserError
from paceline.runs.arrival_log import fingerprint
from paceline.settings.resolve import resolve

TRAIN = np.arange(5, 60_005)


def test_the_sample_is_a_function_of_the_seed() -> None:
    first, again = (scored_train(TRAIN, RunConfig(seed=3)) for _ in range(2))
    other = scored_train(TRAIN, RunConfig(seed=4))
    assert len(first) == 10_000 == len(np.unique(first)) and set(first) <= set(TRAIN)
    assert (first == again).all() and (np.diff(first) > 0).all() and set(first) != set(other)


@pytest.mark.parametrize(("asked", "number"), [("all", 60_000), ("70000", 60_000), ("500", 500), ("none", 0)])
def test_as_many_as_asked(asked: str, number: int) -> None:
    assert len(scored_train(TRAIN, RunConfig(train_score=asked))) == number


def test_a_log_does_not_depend_on_what_is_scored() -> None:
    """So a run of a version without this setting can be resumed, and scores all of its train data again."""
    assert "train_score" in UPKEEP
    assert fingerprint(RunConfig()) == fingerprint(RunConfig(train_score="all"))


@pytest.mark.parametrize("wrong", ["half", "0", "-3", "1.5"])
def test_a_wrong_number_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match=r"--train-score .*give a number of samples, all or none"):
        resolve(RunConfig(train_score=wrong))


def test_a_number_is_refused_if_the_train_data_is_not_scored() -> None:
    with pytest.raises(UserError, match="--train-score 500: --score test leaves the train data out"):
        resolve(RunConfig(train_score="500", score="test"))
    assert resolve(replace(RunConfig(), score="test")).train_score == "10000"
