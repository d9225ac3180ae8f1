"""The metrics that own loops report: one value holds, whoever reported first, and everybody shows that one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.listing import runs_in, runs_of
from paceline.analysis.status import read_status
from paceline.cli.main import main
from paceline.reports.report_data import RunReader
from paceline.reports.run_tables import compare, run_list
from paceline.reports.sentences import closing_lines
from paceline.reports.status_table import format_status
from tests.support.made_up_runs import log_events, make_folder, result_of, started
from tests.support.recorded_runs import Record

SCORES = {0: 90.17, 1: 87.83, 2: 88.5}
ORDERS = list(itertools.permutations(SCORES))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_equal_runs_show_equal_values_whoever_reports_first(record: Record, order: tuple[int, ...]) -> None:
    run = record(strategy="sync", workers=3)
    run.join_all()
    run.push_at_random(10_000)
    for worker in order:
        run.host.note_figures(worker, {"score": SCORES[worker]})
    result = run.host.finish()
    run.close()
    assert result["metrics"] == {"score": 90.17}
    assert list(result["reported"]) == ["0", "1", "2"]
    (row,), _ = runs_of([run.folder.path])
    assert row["metrics"] == {"score": 90.17}
    shown = [
        compare([row], 200),
        run_list(runs_in(run.folder.path.parent), 200),
        format_status(read_status(run.folder.path)),
        "\n".join(closing_lines(result, None, "runs/run")),
    ]
    assert all("90.17" in text for text in shown)
    assert not any("87.83" in text for text in shown[:3])
    assert all(text.endswith("score: as reported by worker 0") for text in shown[:2])
    assert "reported by worker 0: score 90.17 (3 workers: 87.83 to 90.17)" in shown[3]
    reader = RunReader(run.folder.path)
    reader.refresh()
    assert reader.digest()["figures"]["metrics"] == {"score": 90.17}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_target_looks_at_worker_0_whoever_reports_first(record: Record, order: tuple[int, ...]) -> None:
    run = record(strategy="sync", workers=3, target="score>=90", eval_every=1.0)
    run.join_all()
    for score in (10.0, 85.0):  # worker 0 is the last to reach the target
        for worker in order:
            run.host.note_figures(worker, {"score": score if worker == 0 else 95.0})
        assert run.host.stop_reason is None
    run.host.note_figures(order[0], {"other": 99.0})
    assert run.host.stop_reason is None
    run.host.note_figures(0, {"score": 91.0})
    assert run.host.stop_reason == "target score >= 90 reached"


def test_a_target_ends_a_run_of_which_only_another_worker_reports(record: Record) -> None:
    run = record(strategy="sync", workers=3, target="score>=90", eval_every=1.0)
    run.join_all()
    run.host.note_figures(2, {"score": 95.0})
    assert run.host.stop_reason is None, "worker 0's report may be on the way"
    run.host.note_figures(2, {"score": 95.0})
    assert run.host.stop_reason == "target score >= 90 reached"


def test_what_a_lost_worker_reported_long_ago_gives_way_to_the_others(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.host.note_figures(0, {"score": 20.0, "alone": 1.0})
    run.push_at_random(3)
    run.leave(0)
    run.push_at_random(10_000)
    run.host.note_figures(1, {"score": 90.0})
    result = run.host.finish()
    assert result["lost_workers"] == [0]
    assert result["metrics"] == {"alone": 1.0, "score": 90.0}
    assert runs_of([run.folder.path])[0][0]["metrics"] == result["metrics"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_run_under_way_shows_the_same_value(tmp_path: Path, order: tuple[int, ...]) -> None:
    folder = make_folder(tmp_path, workers=2)
    rows = [{"kind": "reported", "now": 1.0, "worker": one, "figures": {"score": 50.0 + one}} for one in order]
    log_events(folder, started(), *rows)
    assert "score 50 (worker 0)" in " ".join(format_status(read_status(folder.path)).split())


def test_the_status_as_json_names_the_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, workers=2)
    log_events(folder, started())
    reported: dict[str, Any] = {"1": {"score": 87.0, "odd": None}, "0": {"score": 90.0}}
    folder.write_result(result_of(folder, reported=reported))
    assert main(["status", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["reported"]
    assert found == {"odd": {"worker": 1, "value": None}, "score": {"worker": 0, "value": 90.0}}


@pytest.mark.parametrize("damage", [[], {"x": {"score": 1.0}}, {"0": 3}, {"0": {"score": "high"}}, None])
def test_a_damaged_report_is_left_out(tmp_path: Path, damage: Any) -> None:
    folder = make_folder(tmp_path)
    folder.write_result(result_of(folder, reported=damage))
    assert runs_of([folder.path])[0][0]["metrics"] is None


def test_the_value_that_holds_and_those_of_the_others_have_as_many_decimals(tmp_path: Path) -> None:
    result = result_of(make_folder(tmp_path), reported={"0": {"val_acc": 91.0}, "1": {"val_acc": 91.33}})
    said = "reported by worker 0: val_acc 91.00 (2 workers: 91.00 to 91.33)"
    assert said in closing_lines(result, None, "runs/run")
