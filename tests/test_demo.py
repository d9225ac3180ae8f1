"""The verdict of `make demo`: what it says follows from the figures."""

from __future__ import annotations

from typing import Any

import pytest

from examples.demo import difference, noise_points, verdict


def result(accuracy: float, updates: int, stale: float = 0.0, seconds: float = 2.0, **others: Any) -> dict[str, Any]:
    made = {
        "workers": 2,
        "test_accuracy": accuracy,
        "test_total": 2000,
        "updates": updates,
        "samples": 36000,
        "lr": 0.005,
        "utilisation": [{"computing": 0.4}, {"computing": 0.6}],
    }
    return {**made, "train_seconds": seconds, "staleness": {"mean": stale}, "rule_applied": "plain", **others}


ALONE = result(85.0, 1125)


def said_of(run: dict[str, Any]) -> str:
    return "\n".join(verdict({"classic": ALONE, "it": run}))


def test_fewer_updates_are_the_cause_of_a_loss_beyond_noise() -> None:
    said = said_of(result(80.5, 564, seconds=1.0))
    assert "it is 4.50 points below classic" in said
    assert "because it made 50% of its updates from as many samples at the same lr (--scale-lr auto would" in said


def test_fewer_updates_without_a_loss_are_no_cause() -> None:
    assert "level with classic (-0.50 points" in said_of(result(84.5, 564))
    assert "although it made 50% of its updates" in said_of(result(84.5, 564))
    assert "although" in said_of(result(90.0, 564)) and "5.00 points above classic" in said_of(result(90.0, 564))


def test_other_samples_or_another_lr_are_not_called_the_same() -> None:
    assert "same lr" not in said_of(result(80.5, 564, lr=0.01))
    assert "as many samples" not in said_of(result(80.5, 564, samples=18000))


def test_staleness_is_named_where_there_is_some() -> None:
    stale = said_of(result(85.1, 1128, 0.99, rule_applied="foresight (step limited) (averaged)"))
    assert "with as many updates, from gradients 1.0 updates old on average, for which rule foresight corrects" in stale
    assert "no stale gradient" in said_of(result(85.1, 1128))


def test_the_verdict_is_one_sentence_with_a_clause_for_each_run() -> None:
    said = verdict({"classic": ALONE, "sync": result(80.0, 564), "async": result(84.0, 1128, 1.0)})
    assert [clause.split()[0] for clause in said] == ["sync", "async", "they"]
    assert [clause[-1] for clause in said] == [";", ";", "."] and ". " not in " ".join(said)


def test_noise_shrinks_with_the_test_images() -> None:
    assert noise_points(ALONE, ALONE) == pytest.approx(2.21, abs=0.01)
    many = result(85.0, 1125, test_total=200_000)
    assert noise_points(many, many) == pytest.approx(0.221, abs=0.001)


def test_times_that_workers_cannot_explain_are_not_reported() -> None:
    assert said_of(result(85.0, 1128, seconds=1.2)).endswith(
        "they took 60% of the training time of classic, measured once."
    )
    slower = said_of(result(85.0, 1128, seconds=2.4))
    assert (
        "took 120% of the training time of classic, measured once, because their workers computed 50% of it" in slower
    )
    busy = said_of(result(85.0, 1128, seconds=0.3))
    assert "15%" not in busy and busy.endswith("the machine was busy.")


def test_a_difference_agrees_with_the_shown_figures() -> None:
    """84.85 and 80.45 were rounded to one decimal each, to 84.8 and 80.5."""
    said = difference("async", {**ALONE, "test_accuracy": 80.45}, {**ALONE, "test_accuracy": 84.85})
    assert "is 4.40 points below classic" in said
