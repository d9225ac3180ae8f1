"""Processes that join and are drained in the middle of a run: nothing is lost, and the run replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.runs.events import read_events
from tests.support.commands import Command, replays, result_of, run, wait_for_records
from tests.support.waiting import until

pytestmark = pytest.mark.real


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_events(folder / "events.jsonl") if row["kind"] == kind]


def test_a_worker_joins_and_another_is_drained_and_the_run_replays(tmp_path: Path) -> None:
    (tmp_path / "join.toml").write_text('[[fault]]\nkind = "join"\nat = 0.2\nworker = 2\n')
    folder = tmp_path / "runs/it"
    settings = ("--dataset", "fashion-mnist-sample", "--threads", "1", "--score", "none", "--name", "it")
    step = ("--batch-size", "4", "--delay", "8ms", "--steps", "900", "--codec", "int8")
    elastic = ("--workers", "2", "--max-workers", "3", "--faults", "join.toml")
    with Command("train", *settings, *step, *elastic, cwd=tmp_path) as command:
        wait_for_records(folder, 30)
        until(lambda: rows_of(folder, "deal"), "a join")
        drained = run("drain", "runs/it", "0", cwd=tmp_path)
        assert drained.process.returncode == 0, drained.err
        assert command.finish() == 0, command.err
        assert not command.family()
    result = result_of(folder)
    assert (result["status"], result["updates"], result["lost_workers"]) == ("finished", 900, [])
    assert [row["members"] for row in rows_of(folder, "deal")] == [[0, 1, 2], [1, 2]]
    assert [row["worker"] for row in rows_of(folder, "worker_left")] == [0]
    assert replays(tmp_path / "runs/it")
