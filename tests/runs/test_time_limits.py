"""`--max-seconds`: training ends when its own clock says so, as an input in the log, so that it can be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.runs.arrival_log import read_arrivals
from paceline.runs.events import read_events
from paceline.simulation.lab.run import check_rows
from tests.support.recorded_runs import Record, RecordedRun, assert_same


class Ticking:
    """A clock that moves when it is told to."""

    def __init__(self, run: RecordedRun) -> None:
        self.now = 0.0
        run.host.clock.source = lambda: self.now

    def push(self, run: RecordedRun, times: int) -> None:
        """A push a second, by whoever is ready; the clock is looked at in between, as a runtime does."""
        for _ in range(times):
            run.push_at_random(1)
            self.now += 1.0
            run.host.check_time_limit()


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_run_whose_time_is_up_is_finished_and_its_stop_is_replayed(record: Record, strategy: str) -> None:
    run = record(strategy=strategy, workers=2, epochs=40.0, max_seconds=5.0)
    clock = Ticking(run)
    run.join_all()
    clock.push(run, 30)
    result = run.host.finish()
    assert (result["status"], result["reason"], result["train_seconds"]) == ("finished", "time is up", 5.0)
    stops = [record for record in read_arrivals(run.folder.arrivals_file, run.config)[0] if record.kind == "stop"]
    assert [stop.now for stop in stops] == [5.0]
    rows = [row for row in read_events(run.folder.events_file) if row["kind"] == "stopped"]
    assert [row["reason"] for row in rows] == ["time is up"]
    replay = run.replay()
    replay.feed(read_arrivals(run.folder.arrivals_file, run.config)[0])
    assert_same(replay.server, run.server)


def test_seconds_before_a_crash_count(record: Record) -> None:
    run = record(strategy="async", workers=2, epochs=40.0, max_seconds=5.0)
    clock = Ticking(run)
    run.join_all()
    clock.push(run, 3)
    run.push_at_random(1)  # logged at second 3; what ran after it nobody knows
    run.resume()
    clock = Ticking(run)
    run.join_all()
    clock.push(run, 30)
    assert run.host.finish()["train_seconds"] == 5.0 and run.server.version == 6


def test_what_comes_first_ends_the_run(record: Record) -> None:
    run = record(strategy="async", workers=2, steps=4, max_seconds=50.0)
    clock = Ticking(run)
    run.join_all()
    clock.push(run, 30)
    result = run.host.finish()
    assert (result["updates"], result["reason"]) == (4, None)


def test_evaluations_take_no_time(record: Record) -> None:
    run = record(strategy="async", workers=2, epochs=40.0, max_seconds=20.0, eval_every=0.2)
    clock = Ticking(run)
    score = run.task.evaluate

    def slowly(*arguments: Any) -> Any:
        clock.now += 100.0
        return score(*arguments)

    run.task.evaluate = slowly  # type: ignore[method-assign]
    run.join_all()
    clock.push(run, 60)
    assert run.server.version == 20 and clock.now > 400


def simulated(folder: Path, name: str, *flags: str, code: int = 0) -> dict[str, Any]:
    fixed = ["--dataset", "fashion-mnist-sample", "--threads", "1", "--runs", str(folder), "--name", name]
    assert main(["simulate", *fixed, *flags]) == code
    result: dict[str, Any] = json.loads((folder / name / "result.json").read_text())
    return result


def test_virtual_seconds_count_in_a_simulation(tmp_path: Path) -> None:
    flags = ["--timing-only", "--workers", "2", "--speeds", "1,4", "--strategy", "async", "--epochs", "1000"]
    result = simulated(tmp_path, "a", *flags, "--max-seconds", "10.5")
    assert (result["status"], result["reason"]) == ("finished", "time is up")
    assert (result["virtual_seconds"], result["train_seconds"], result["updates"]) == (10.5, 10.5, 12)


def test_a_simulated_crash_neither_hides_nor_lengthens_the_time(tmp_path: Path) -> None:
    table = tmp_path / "faults.toml"
    flags = ["--timing-only", "--workers", "1", "--speeds", "1s", "--strategy", "async", "--epochs", "1000"]
    flags += ["--max-seconds", "10.5", "--faults", str(table)]
    table.write_text('[[fault]]\nkind = "crash"\nworker = 0\nat = 3.5\nrestart_after = 20.0\n')
    assert simulated(tmp_path, "back", *flags)["virtual_seconds"] == 10.5
    table.write_text('[[fault]]\nkind = "crash"\nworker = 0\nat = 3.5\n')
    assert simulated(tmp_path, "gone", *flags, code=130)["status"] == "stopped"


def test_the_lab_says_that_it_has_no_seconds(record: Record) -> None:
    run = record(strategy="async", workers=2, max_seconds=5.0)
    with pytest.raises(UserError, match="the lab has no --max-seconds"):
        check_rows([run.config])
