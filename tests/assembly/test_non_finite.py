"""A run that met a NaN in its data is told so, and not to lower its learning rate; one that made it has diverged."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from paceline.core.server import Divergence
from paceline.reports.sentences import closing_lines
from paceline.tasks.supervised import SupervisedTask
from tests.support import recorded_runs
from tests.support.recorded_runs import Record, small_task

KINDS: list[dict[str, Any]] = [
    {"strategy": "async", "workers": 2},
    {"strategy": "sync", "workers": 2},
    {"strategy": "local:3", "workers": 2, "path": "star"},
    {"strategy": "async", "workers": 2, "max_workers": 3},
]


def give(monkeypatch: pytest.MonkeyPatch, *rows: int, part: int = 0) -> None:
    """Let every task have a NaN in these rows of its inputs or targets."""

    def build() -> SupervisedTask:
        task = small_task()
        data = task.train[0].clone(), F.one_hot(task.train[1]).float()
        data[part][list(rows)] = float("nan")
        return SupervisedTask(task.model, F.mse_loss, data)

    monkeypatch.setattr(recorded_runs, "small_task", build)


def reason_of(record: Record, **settings: Any) -> str:
    run = record(**settings)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert result["status"] == "diverged"
    return str(result["reason"])


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_the_sample_is_named(record: Record, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    give(monkeypatch, 17)
    reason = reason_of(record, split="iid", **settings)
    assert "the inputs of 1 sample of its batch of " in reason and "(train sample 17) hold a NaN or infinity" in reason
    assert "lr" not in reason and "stale" not in reason.lower()


def test_targets_are_looked_at_too(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 17, part=1)
    assert "the targets of 1 sample of its batch of 4 (train sample 17) hold" in reason_of(record, strategy="sync")


def test_a_model_that_copes_with_a_nan_is_not_ended_by_it(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch holds one, and was trained on."""
    give(monkeypatch, *range(54))
    run = record(strategy="async")
    run.join_all()
    run.push_at_random(1)
    run.server.divergence = Divergence(worker=0, version=9, loss=1.0, batch=4)
    assert "remove or replace" not in run.host.finish()["reason"]


def ended(record: Record, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The result of a short run, and its notes."""
    run = record(strategy="sync", epochs=1.0, **settings)
    run.join_all()
    run.push_at_random(10_000)
    return run.host.finish(), [row["text"] for row in run.rows if row["kind"] == "note"]


def test_weights_that_make_the_loss_infinite_are_those_of_a_diverged_run(record: Record) -> None:
    result, _ = ended(record, workers=1, lr=1e30, steps=1)
    assert result["status"] == "diverged" and result["test_loss"] is None
    assert "the weights have a loss on the train data that is not finite" in result["reason"]
    assert "--lr 0.005 (the default, now 1e+30)" in result["reason"]
    assert all(line.endswith("loss not finite") for line in closed(result)[1:3])


def test_a_nan_in_the_test_data_is_blamed_on_them(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> SupervisedTask:
        task = small_task()
        assert task.test is not None
        task.test[0][7] = float("nan")
        return task

    monkeypatch.setattr(recorded_runs, "small_task", build)
    result, notes = ended(record, workers=2)
    assert result["status"] == "finished" and result["test_loss"] is None
    said = "the inputs of 1 of 12 test samples (sample 7) hold a NaN or infinity: remove or replace those"
    assert notes[-1] == f"the test loss is not finite: {said}"
    assert "loss not finite" in closed(result)[1]


def test_a_run_whose_pushes_were_all_zero_learned_nothing(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> SupervisedTask:
        task = small_task()
        return SupervisedTask(task.model, lambda outputs, y: (0.0 * outputs).sum() + 1.0, task.train, task.test)

    monkeypatch.setattr(recorded_runs, "small_task", build)
    result, _ = ended(record, workers=2, rule="plain", steps=24)
    assert result["status"] == "collapsed"
    assert f"every push in {result['updates']} updates was 0, so nothing was trained" in result["reason"]


def closed(result: dict[str, Any]) -> list[str]:
    return closing_lines(result, None, "here")
