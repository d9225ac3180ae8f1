"""How a run stands, from its folder alone: running, ended, killed, simulated, cut off; and who is slow in it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.listing import runs_in
from paceline.analysis.status import WorkerStatus, read_status, workers_of
from paceline.analysis.stragglers import SLOW_THRESHOLD, stragglers
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.runs.events import read_tail
from paceline.runs.folder import RunFolder
from tests.support.recorded_runs import Record, small_config

pytestmark = pytest.mark.long  # left to `make test`


def workers_row(now: float, states: list[str], computing: list[float], steps: list[int], **more: Any) -> dict[str, Any]:
    count = len(states)
    row: dict[str, Any] = {"kind": "workers", "now": now, "worker": list(range(count)), "state": states}
    row |= {"computing": computing, "waiting": [0.0] * count, "steps": steps, "pushes": steps}
    return row | {"staleness": [1.0] * count, "ago": [0.1] * count, "paused": {}} | more


def progress_row(now: float, fraction: float) -> dict[str, Any]:
    return {"kind": "progress", "now": now, "fraction": fraction, "updates": int(100 * now), "rate": 640.0}


def folder_with(path: Path, *rows: dict[str, Any], cut: bytes = b"") -> RunFolder:
    folder = RunFolder.create(small_config(path, strategy="async", workers=2))
    lines = [json.dumps(row).encode() + b"\n" for row in ({"kind": "run_started", "now": 0.0}, *rows)]
    folder.events_file.write_bytes(b"".join(lines) + cut)
    return folder


def test_a_run_in_this_process_is_running_then_finished(record: Record) -> None:
    run = record(strategy="async", workers=2)
    assert read_status(run.folder.path).status == "killed"
    with run.folder.locked():
        assert read_status(run.folder.path).status == "starting"
        run.join_all()
        run.push_at_random(5)
        run.host.tell_progress()
        assert read_status(run.folder.path).status == "running"
        run.push_at_random(10_000)
        run.host.finish()
    found = read_status(run.folder.path)
    assert (found.status, found.updates, found.fraction) == ("finished", run.server.version, 1.0)
    assert [worker.state for worker in found.workers] == ["done", "done"]
    assert sum(worker.pushes or 0 for worker in found.workers) == run.server.pushes


def test_what_runs_is_judged_by_its_latest_rows_and_what_ended_by_all(tmp_path: Path) -> None:
    """Worker 1 was slow at first and is no more."""
    rows = [workers_row(0.0, ["live"] * 2, [0.0, 0.0], [0, 0]), workers_row(50.0, ["live"] * 2, [50.0, 50.0], [50, 5])]
    rows += [
        progress_row(50.0, 0.5),
        progress_row(60.0, 0.6) | {"step_factor": 0.5},
        workers_row(60.0, ["live"] * 2, [60.0, 60.0], [60, 15]),
    ]
    folder = folder_with(tmp_path, *rows)
    with folder.locked():
        found = read_status(folder.path)
    assert (found.status, found.span, found.seconds_left, found.step_factor) == ("running", 10.0, 40.0, 0.5)
    assert [worker.step_seconds for worker in found.workers] == [1.0, 1.0]
    assert stragglers(found.workers) == []
    folder.write_result({"status": "finished", "reason": None, "updates": 75, "train_seconds": 60.0})
    ended = read_status(folder.path)
    assert ended.span is None
    assert [(one.worker, one.cause) for one in stragglers(ended.workers)] == [(1, "compute")]


def test_only_rows_of_the_server_that_wrote_last_count(tmp_path: Path) -> None:
    """A server that was restarted counts from zero."""
    rows = [workers_row(9.0, ["live"] * 2, [9.0, 9.0], [9, 3]), {"kind": "run_resumed", "now": 9.0}]
    rows += [workers_row(9.1, ["live"] * 2, [0.0, 0.0], [0, 0]), workers_row(13.1, ["live"] * 2, [4.0, 4.0], [4, 4])]
    found = read_status(folder_with(tmp_path, *rows).path)
    assert [worker.step_seconds for worker in found.workers] == [1.0, 1.0]


def test_a_scoring_server_is_evaluating(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, progress_row(1.0, 0.1), {"kind": "scoring", "now": 1.0, "which": "test"})
    with folder.locked():
        assert read_status(folder.path).status == "evaluating"


def test_how_long_nothing_was_written_is_told_while_it_runs(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, progress_row(1.0, 0.1))
    os.utime(folder.events_file, (0, time.time() - 100))
    with folder.locked():
        quiet = read_status(folder.path).quiet_seconds
    assert quiet is not None and quiet >= 99
    assert read_status(folder.path).quiet_seconds is None


@given(cut=st.integers(0, 100_000))
def test_a_file_cut_off_anywhere_is_read_as_far_as_it_goes(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    rows = [row for n in range(1, 9) for row in (progress_row(n, n / 10), workers_row(n, ["live"] * 2, [n, n], [n, n]))]
    folder = folder_with(tmp_path_factory.mktemp("cut"), *rows)
    whole = folder.events_file.read_bytes()
    kept = whole[: cut % (len(whole) + 1)]
    folder.events_file.write_bytes(kept)
    found = read_status(folder.path)
    assert found.status == "killed"
    last = kept.count(b'"paused": {}}')
    assert [worker.pushes for worker in found.workers] == ([last, last] if last else [])


@given(st.integers(1, 3000))
def test_the_tail_is_the_last_rows_that_are_whole(tmp_path_factory: pytest.TempPathFactory, nbytes: int) -> None:
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    rows = [progress_row(float(number), 0.5) for number in range(20)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    path.write_bytes(b"".join(lines))
    tail = read_tail(path, nbytes)
    assert tail == rows[len(rows) - len(tail) :]
    assert sum(map(len, lines[len(lines) - len(tail) :])) <= max(nbytes, 1)
    assert len(tail) == 20 or sum(map(len, lines[19 - len(tail) :])) >= nbytes


@pytest.mark.parametrize(
    "rubbish",
    [b"12\n", b"null\n", b"[]\n", b"\xff\xfe\n", b'{"kind": "workers", "now": 1.0, "worker": [0, 1]}\n', b'{"kind":'],
)
def test_rows_that_make_no_sense_are_passed_over(tmp_path: Path, rubbish: bytes) -> None:
    folder = folder_with(tmp_path, workers_row(1.0, ["live"] * 2, [1.0, 1.0], [5, 5]), cut=rubbish)
    assert [worker.pushes for worker in read_status(folder.path).workers] == [5, 5]


def test_a_run_without_accounts_has_the_shares_of_its_result(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    shares = [{"computing": 0.75, "waiting": 0.25}, {"computing": 1.0, "waiting": 0.0}]
    result = {"status": "stopped", "reason": "interrupted", "updates": 3, "train_seconds": 1.0, "utilisation": shares}
    folder.write_result(result)
    found = read_status(folder.path)
    assert [worker.shares for worker in found.workers] == shares
    assert found.reason == "interrupted"


def test_the_loss_of_an_ended_run_is_that_of_its_end_or_says_of_which_update_it_is(tmp_path: Path) -> None:
    """The last row of its progress may be long before its end."""
    folder = folder_with(tmp_path, progress_row(0.34, 0.2) | {"loss": 2.1})
    assert (read_status(folder.path).loss, read_status(folder.path).loss_at) == (2.1, 34)
    result = {"status": "finished", "reason": None, "updates": 188, "train_seconds": 1.0}
    folder.write_result({**result, "train_loss": 1.5})
    assert (read_status(folder.path).loss, read_status(folder.path).loss_at) == (1.5, 188)
    folder.write_result(result)
    assert (read_status(folder.path).loss, read_status(folder.path).loss_at) == (2.1, 34)


def test_a_simulated_run_names_its_slow_worker_and_its_paused_one(tmp_path: Path, small_sample: None) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "pause"\nat = 50.0\nworker = 0\nlasts = 1000.0\n')
    base = ["--timing-only", "--strategy", "async", "--workers", "4", "--runs", str(tmp_path), "--steps", "300"]
    assert main(["simulate", *base, "--speeds", "1,1,1,4", "--name", "slow"]) == 0
    assert main(["simulate", *base, "--speeds", "1", "--faults", str(faults), "--name", "paused"]) == 0
    found = read_status(tmp_path / "slow")
    assert found.simulated and found.status == "finished"
    assert [(one.worker, one.cause) for one in stragglers(found.workers)] == [(3, "compute")]
    rows = [row for row in read_tail(tmp_path / "paused/events.jsonl", 1 << 20) if row["kind"] == "workers"]
    during = [workers_of(row) for row in rows if row["state"][0] == "paused"]
    assert during
    assert {(one.worker, one.cause) for one in stragglers(during[-1])} == {(0, "paused")}


def worker(number: int, step: float, send: float | None = None, state: str = "live") -> WorkerStatus:
    whole = step + (send or 0.0)
    shares = {"computing": step / whole, "sending": (send or 0.0) / whole}
    return WorkerStatus(number, state, shares, step, send, steps=1000)


@given(st.lists(st.floats(0.01, 0.0149), min_size=1, max_size=20), st.floats(1.0, 10.0))
def test_a_step_is_slow_from_one_and_a_half_times_the_median_of_the_others_on(
    others: list[float], times: float
) -> None:
    ranked = sorted(others)
    usual = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    crew = [worker(number, step) for number, step in enumerate(others, start=1)]
    found = stragglers([worker(0, usual * times), *crew])
    assert [one.worker for one in found] == ([0] if usual * times >= SLOW_THRESHOLD * usual else [])


def columns(steps: list[int], computing: list[float], server: list[float], **more: Any) -> dict[str, Any]:
    """A `workers` row with the totals that a real run wrote."""
    return workers_row(8.4, ["done"] * len(steps), computing, steps, server=server, **more)


def test_a_worker_that_was_slow_in_most_of_an_ended_run_is_named_with_the_step_of_the_whole_run() -> None:
    """A real run: worker 1 was six times slower for the first 5 s of 8.6."""
    row = columns([576, 334, 592], [7.919, 7.845, 7.921], [0.719, 0.798, 0.727], step=[0.0154, 0.0134, 0.0148])
    found = workers_of(row)
    assert [round(one.step_seconds or 0.0, 4) for one in found] == [0.0137, 0.0235, 0.0134]
    assert [(one.worker, one.cause) for one in stragglers(found)] == [(1, "compute")]


@pytest.mark.parametrize(
    "row",
    [
        columns([125] * 3, [0.724, 0.812, 0.682], [1.98, 1.908, 2.069], step=[0.0033, 0.0059, 0.0035]),
        columns([753, 753, 750, 753], [12.13, 12.59, 13.31, 11.6], [6, 6, 5, 7], step=[0.013, 0.01, 0.024, 0.019]),
        columns(
            [334, 278, 291, 228], [1.52, 1.55, 1.51, 1.34], [2.2, 2.2, 2.3, 2.4], step=[0.003, 0.005, 0.003, 0.003]
        ),
        columns([60, 60], [0.685, 0.374], [0.166, 0.323], step=[0.0041, 0.0034]),
        columns([1250] * 2, [3.0, 5.0], [97.0, 95.0]),
        columns([50] * 2, [1.0, 21.0], [1.0, 1.0], longest=[0.03, 20.02]),
    ],
    ids=["sync", "bounded:3", "async", "a short run", "a small part of the time", "one pause"],
)
def test_equal_workers_are_not_accused(row: dict[str, Any]) -> None:
    """The first four are real runs of equal workers on a busy machine."""
    assert stragglers(workers_of(row)) == []


def test_a_pause_before_the_period_leaves_the_step_of_the_period_alone() -> None:
    early = columns([10, 10], [0.1, 20.1], [0.0, 0.0], longest=[0.01, 20.0])
    late = columns([110, 110], [1.1, 21.1], [0.0, 0.0], longest=[0.02, 20.0])
    assert [one.step_seconds for one in workers_of(late, early)] == pytest.approx([0.0099, 0.01], rel=0.01)


def test_few_steps_are_enough_if_they_are_long() -> None:
    row = columns([4, 4, 4], [12.0, 24.0, 12.0], [14.0, 2.0, 14.0])
    assert [(one.worker, one.cause) for one in stragglers(workers_of(row))] == [(1, "compute")]


def test_a_slow_link_is_told_from_slow_compute() -> None:
    found = stragglers([worker(0, 1.0, 0.1), worker(1, 1.0, 0.4), worker(2, 1.1, 0.1), worker(3, 2.0, 0.1)])
    assert [(one.worker, one.cause) for one in found] == [(1, "link"), (3, "compute")]


def test_a_link_that_takes_little_of_the_time_is_not_named() -> None:
    assert stragglers([worker(0, 1.0, 0.01), worker(1, 1.0, 0.1)]) == []
    assert [one.cause for one in stragglers([worker(0, 1.0, 0.01), worker(1, 1.0, 0.2)])] == ["link"]


def test_paused_and_lost_come_first() -> None:
    paused = WorkerStatus(2, "paused", steps=10, silent=9.0, normal=1.0)
    found = stragglers([worker(0, 1.0), worker(1, 3.0), paused, worker(3, 9.0, state="lost")])
    assert [(one.worker, one.cause) for one in found] == [(2, "paused"), (3, "lost"), (1, "compute")]
    assert found[0].times == 9.0


def test_alone_or_without_steps_nobody_is_slow() -> None:
    assert stragglers([worker(0, 5.0)]) == []
    assert stragglers([WorkerStatus(0, "live", {}, 5.0, steps=1), WorkerStatus(1, "live", {}, 1.0, steps=1)]) == []


def test_the_runs_of_a_folder_newest_first_with_damaged_ones(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "sweep/one"]):
        at = tmp_path / Path(name).parent
        folder = RunFolder.create(small_config(at, strategy="async", workers=2, name=Path(name).name))
        os.utime(folder.config_file, (0, 1_000_000 - age))
    RunFolder(tmp_path / "new").write_result({"status": "finished", "test_accuracy": 81.5})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.toml").write_text("= nonsense")
    os.utime(tmp_path / "bad/config.toml", (0, 0))
    (tmp_path / "no run").mkdir()
    with RunFolder(tmp_path / "old").locked():
        rows = runs_in(tmp_path)
    assert [row["run"] for row in rows] == ["new", "old", "sweep/one", "bad"]
    assert [row["status"] for row in rows] == ["finished", "running", "killed", "damaged"]
    assert rows[0]["test_accuracy"] == 81.5
    with pytest.raises(UserError, match="is not a folder"):
        runs_in(tmp_path / "nowhere")


def test_the_verbs_print_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, workers_row(1.0, ["live", "paused"], [1.0, 1.0], [5, 5], paused={"1": [4.0, 1.0]}))
    assert main(["status", str(folder.path)]) == 0
    assert "worker 1 is paused: silent for 4 s on its turn, up to 1 s is normal" in capsys.readouterr().out
    assert main(["status", str(folder.path), "--json", "--watch", "60"]) == 0  # it is killed: one look
    row = json.loads(capsys.readouterr().out)
    assert row["status"] == "killed" and row["stragglers"][0]["cause"] == "paused"
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["run", "async"]
    assert main(["list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["workers"] == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["status", "nowhere"], "nowhere is not a run folder: it does not exist"),
        (["status", "x", "--watch", "0"], "--watch 0: give the seconds between two looks"),
        (["status", "x", "--watch", "nan"], "--watch nan: give the seconds"),
        (["list", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_a_glance_at_the_lock_does_not_keep_others_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert not folder.is_locked()
    with folder.locked():
        assert folder.is_locked()
        with pytest.raises(UserError, match="still being trained"), folder.locked():
            pass
    assert not folder.is_locked()
