"""Scores of live and of averaged weights: each is shown as what it is, and never compared with the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.listing import choose, runs_in
from paceline.analysis.scored_weights import by_weights, comparable, kind_of
from paceline.analysis.status import read_status
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.reports.report_data import RunReader
from paceline.reports.run_tables import compare, run_list
from paceline.reports.sentences import closing_lines
from paceline.reports.watch.terminal import sentences
from paceline.runs.folder import RunFolder
from tests.support.made_up_runs import make_folder, result_of

BOTH = {"weights": "averaged", "average": "on", "live_test_accuracy": 86.5, "live_test_loss": 0.45}


def scored(path: Path, name: str, accuracy: float, **more: Any) -> RunFolder:
    strategy = "classic" if more.get("average") == "none" else "async"
    folder = make_folder(path, name, strategy=strategy, workers=1 if strategy == "classic" else 2)
    folder.write_result(result_of(folder, test_accuracy=accuracy, train_accuracy=90.0, **more))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The averaged run has the highest figure of all, but its live weights are behind those of the live run."""
    scored(tmp_path, "averaged", 89.1, **BOTH)
    scored(tmp_path, "live", 86.9, average="none")
    return tmp_path


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ({"weights": "averaged", "average": "none"}, "averaged"),
        ({"weights": "live", "average": "on"}, "live"),
        ({"average": "on"}, "averaged"),
        ({"average": "250"}, "averaged"),
        ({"average": "none"}, "live"),
        ({}, "live"),
    ],
)
def test_the_kind_of_weights_is_read_from_old_and_new_results(result: dict[str, Any], kind: str) -> None:
    assert kind_of(result) == kind


def test_a_run_without_a_result_is_judged_by_its_settings(tmp_path: Path) -> None:
    assert read_status(make_folder(tmp_path, "a", strategy="async", workers=2).path).weights == "averaged"
    assert read_status(make_folder(tmp_path, "b", strategy="sync", workers=2).path).weights == "live"
    rows = choose(runs_in(tmp_path), [], "run")
    assert [(row["weights"], row["average"]) for row in rows] == [("averaged", "on"), ("live", "none")]


def test_scores_are_comparable_only_if_they_belong_to_the_same_kind_of_weights() -> None:
    def row(**result: Any) -> dict[str, Any]:
        return result | by_weights(result)

    live, old = row(average="none", test_loss=1.0), row(average="on", test_loss=2.0)
    both = row(weights="averaged", test_loss=2.0, live_test_loss=3.0)
    nothing = row(average="on")
    assert comparable([live, live, nothing], "test_loss") == "live_test_loss"
    assert comparable([old, both], "test_loss") == "averaged_test_loss"
    assert comparable([live, both], "test_loss") == "live_test_loss"
    assert comparable([live, old], "test_loss") is None


@pytest.mark.parametrize("width", [80, 200])
def test_compare_and_list_have_a_column_for_each_kind_of_weights(runs: Path, width: int) -> None:
    rows = choose(runs_in(runs), [], "run")
    for text in (compare(rows, width), run_list(rows, width)):
        assert max(map(len, text.splitlines())) <= width
        head, first, second, *rest = text.splitlines()
        live, averaged = head.index("test % live"), head.index("test % avg")
        assert first[live:].split()[:2] == ["86.50", "89.10"]
        assert second[live:averaged].split() == ["86.90"] and second[averaged:].split()[0] == "-"
        assert rest[-1] == "live: the weights that are trained; avg: their running average (--average)"
    assert "highest test accuracy, live weights: live (86.90)" in compare(rows, width), "not the 89.1 of an average"


def test_a_table_of_one_kind_has_one_column_that_says_which(tmp_path: Path) -> None:
    scored(tmp_path, "a", 86.9, average="none")
    scored(tmp_path, "b", 85.0, average="none")
    text = compare(runs_in(tmp_path), 120)
    assert "test % live" in text and "avg" not in text


def test_sorting_compares_like_with_like_and_says_so(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--sort", "test_accuracy", "--json"]) == 0
    out, error = capsys.readouterr()
    assert [row["run"] for row in json.loads(out)] == ["live", "averaged"], "86.9 and 86.5 on live weights"
    assert error == "paceline: sorted by live_test_accuracy, which all of these runs have\n"
    assert main(["list", str(runs), "--sort", "averaged_test_accuracy"]) == 0
    assert not capsys.readouterr().err


def test_sorting_scores_that_cannot_be_compared_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored(runs, "old", 89.0, average="on")
    with pytest.raises(UserError, match="sort by averaged_test_accuracy or live_test_accuracy"):
        choose(runs_in(runs), [], "test-accuracy")
    assert main(["compare", str(runs), "--sort", "test_accuracy"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["compare", str(runs), "--where", "run!=live", "--sort", "test_accuracy"]) == 0, "all averaged"


def test_the_closing_lines_and_the_report_name_the_weights(runs: Path) -> None:
    averaged, live = RunFolder.open(runs / "averaged"), RunFolder.open(runs / "live")
    lines = closing_lines(averaged.result() or {}, None, "here")
    assert "scored and saved: the averaged weights (live weights: test accuracy 86.50 %, test loss 0.4500)" in lines
    assert "scored and saved: the live weights" in closing_lines(live.result() or {}, None, "here")
    verdicts = {}
    for folder in (averaged, live):
        reader = RunReader(folder.path)
        reader.refresh()
        digest = reader.digest()
        verdicts[folder.path.name] = digest["verdict"]
        figures = digest["figures"]
        assert figures["live_test_accuracy"] == (86.5 if folder is averaged else 86.9)
        assert figures["averaged_test_accuracy"] == (89.1 if folder is averaged else None)
    assert "89.10 % test accuracy (averaged weights; live weights: 86.50 %)" in verdicts["averaged"]
    assert "86.90 % test accuracy (live weights)" in verdicts["live"]


def test_an_own_loop_without_scores_says_nothing_of_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    nothing = {"test_accuracy": None, "test_loss": None}
    assert not [line for line in closing_lines(result_of(folder, **nothing), None, "here") if "weights" in line]


def test_an_evaluation_in_the_terminal_names_the_weights() -> None:
    row = {"kind": "evaluation", "now": 1.0, "test_accuracy": 61.5}
    assert sentences([row], "averaged") == [(1.0, "Test accuracy 61.50 % (averaged weights)")]
