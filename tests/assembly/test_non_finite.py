"""A diverged run whose batch held a NaN is told so, and not to lower its learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from paceline.core.server import Divergence
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
