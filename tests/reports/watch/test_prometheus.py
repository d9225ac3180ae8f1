"""`/metrics`: text that Prometheus takes, whatever a run is called and however little is known of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.status import RunStatus, WorkerStatus
from paceline.reports.watch.prometheus import MAX_WORKERS, exposition
from tests.support.prometheus_text import parse
from tests.support.statuses import RUNS

pytestmark = pytest.mark.long  # left to `make test`


@given(st.lists(RUNS, max_size=3, unique_by=id))
def test_whatever_is_known_can_be_read_back(runs: list[RunStatus]) -> None:
    named = [RunStatus(**{**vars(run), "run": f"runs/{number}", "workers": ()}) for number, run in enumerate(runs)]
    found = parse(exposition(named))
    assert all(math.isfinite(value) for _, _, value in found)
    updates = {labels["run"]: value for name, labels, value in found if name == "paceline_updates_total"}
    assert updates == {run.run: run.updates for run in named}
    states = [labels for name, labels, value in found if name == "paceline_run_status" and value == 1.0]
    assert [labels["status"] for labels in states] == [run.status for run in named]


def test_a_name_with_anything_in_it_is_escaped() -> None:
    name = 'runs/"a"\\b\nc}'
    (found,) = [
        one for one in parse(exposition([RunStatus(name, "async", "lenet5", 2, "running")])) if "info" in one[0]
    ]
    assert found[1] == {"run": name, "strategy": "async", "model": "lenet5", "weights": "live"}


def test_what_is_not_known_has_no_sample() -> None:
    names = {name for name, _, _ in parse(exposition([RunStatus("runs/a", "sync", "cnn", 2, "starting")]))}
    assert "paceline_loss" not in names and "paceline_progress_ratio" not in names
    assert exposition([]) == ""


def test_workers_are_told_one_by_one_unless_there_are_many() -> None:
    def workers(number: int) -> tuple[WorkerStatus, ...]:
        slow = WorkerStatus(0, "live", {"computing": 1.0}, 9.0, 0.0, 10, 5)
        return (slow, *(WorkerStatus(n, "live", {"computing": 1.0}, 1.0, 0.0, 10, 5) for n in range(1, number)))

    few = parse(exposition([RunStatus("runs/a", "async", "cnn", 3, "running", workers=workers(3))]))
    many = parse(exposition([RunStatus("runs/a", "async", "cnn", 10_000, "running", workers=workers(10_000))]))
    assert ("paceline_worker_share_ratio", {"run": "runs/a", "worker": "1", "part": "computing"}, 1.0) in few
    for found in (few, many):
        assert ("paceline_straggler", {"run": "runs/a", "worker": "0", "cause": "compute"}, 1.0) in found
    assert ("paceline_workers", {"run": "runs/a", "state": "live"}, 10_000.0) in many
    assert len(many) < 2 * MAX_WORKERS
