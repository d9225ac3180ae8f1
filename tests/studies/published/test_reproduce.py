"""Published tables: their rows, ours beside them, and what is kept between two calls."""

from __future__ import annotations

import csv
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.scored_weights import kind_of
from paceline.analysis.statistics import RunStatistics
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.reports import charts
from paceline.runs.folder import RunFolder
from paceline.settings.resolve import resolve
from paceline.simulation.lab.run import LabResult, run_rows
from paceline.studies import batch_runs as many_runs
from paceline.studies.published.optml import automatic, choose_rows, published_rows
from paceline.studies.published.reproduce import ReproducedRow, markdown, summary

pytestmark = pytest.mark.long


def test_the_table_has_all_its_rows() -> None:
    rows = published_rows()
    assert len(rows) == 55
    assert sum(row.test_accuracy is None for row in rows) == 1
    assert len({row.name for row in rows}) == 55
    assert {row.mode for row in rows} == {"classic", "sync", "async"}
    for row in rows:
        resolve(row.config(seed=0, epochs=6.0, data_dir=None, runs="runs"))


def test_rows_of_the_same_data_and_model_share_what_we_would_choose() -> None:
    made = {automatic(row, 0, 6.0, None, "runs").name: automatic(row, 0, 6.0, None, "runs") for row in published_rows()}
    assert len(made) == 37
    for config in made.values():
        assert resolve(config).lr == 0.005 and config.momentum == 0.9 and config.optimizer == "sgd"


def test_rows_are_chosen_by_number_and_by_words() -> None:
    assert [row.number for row in choose_rows("2,5-7")] == [2, 5, 6, 7]
    chosen = choose_rows("async cnn labels")
    assert chosen and all(row.mode == "async" and row.split == "labels" and row.model == "cnn" for row in chosen)
    assert [row.number for row in choose_rows("3,1-3")] == [3, 1, 2]
    assert len(choose_rows(None)) == 55


@pytest.mark.parametrize(
    ("text", "words"),
    [("56", "rows 1 to 55"), ("asink", "did you mean"), ("classic cnn", "no row.s name has all")],
)
def test_rows_that_do_not_exist_are_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_rows(text)


def flags(runs: Path, *more: str) -> list[str]:
    return ["reproduce", "optml", "--rows", "1,2,20", "--epochs", "0.5", "--runs", str(runs), *more]


@pytest.mark.usefixtures("small_sample")
def test_rows_run_once_and_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "optml"
    assert main(flags(runs)) == 0
    first = capsys.readouterr()
    assert "01-classic-1-full-lenet5-sgd" in first.out and "89.20" in first.out
    assert "\x1b" not in first.err and "0 of 3 runs done" in first.err
    (row, *_) = csv.DictReader((runs / "table.csv").read_text().splitlines())
    assert row["published_test_accuracy"] == "89.2" and float(row["test_accuracy_mean"]) > 0
    assert row["test_accuracy_spread"] == "" and row["automatic_averaged_test_accuracy_mean"] == ""
    assert (runs / "runs.csv").read_text().count("finished") == 3
    assert main(flags(runs)) == 0
    assert capsys.readouterr().out == first.out
    assert main([*flags(runs), "--epochs", "0.25"]) == 2
    assert "was made with epochs = 0.5, not 0.25: use another --runs" in capsys.readouterr().err


@pytest.mark.usefixtures("small_sample")
def test_what_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str | None] = []

    def one_only(configs: list[RunConfig], *rest: Any) -> Iterator[LabResult]:
        if made:
            raise KeyboardInterrupt
        made.extend(config.name for config in configs)
        yield from run_rows(configs, *rest)

    monkeypatch.setattr(many_runs, "run_rows", one_only)
    runs = tmp_path / "optml"
    assert main(flags(runs)) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"paceline: interrupted: 1 of 3 runs are done and kept in {runs}; run the same command to continue"
    half_made = runs / "02-sync-2-full-lenet5-sgd-seed0"
    half_made.mkdir()
    shutil.copy(runs / str(made[0]) / "config.toml", half_made)
    text = (half_made / "config.toml").read_text().partition("\n")[2]  # without its checksum
    text = text.replace(str(made[0]), half_made.name).replace("classic", "sync")
    (half_made / "config.toml").write_text(text.replace("workers = 1", "workers = 2"))
    (runs / "20-async-2-full-lenet5-sgd-seed0").mkdir()
    monkeypatch.setattr(many_runs, "run_rows", run_rows)
    kept = (runs / str(made[0]) / "result.json").stat().st_mtime_ns
    assert main(flags(runs)) == 0
    assert "1 of 3 runs are there already" in capsys.readouterr().err
    assert (half_made / "result.json").exists()
    assert (runs / str(made[0]) / "result.json").stat().st_mtime_ns == kept


@pytest.mark.usefixtures("small_sample")
def test_seeds_give_mean_and_spread_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "optml"
    assert main([*flags(runs), "--rows", "1", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ± ") == 4
    if importlib.util.find_spec("matplotlib") is not None:
        assert (runs / "figure.png").stat().st_size > 5000


@pytest.mark.usefixtures("small_sample")
def test_the_third_column_is_what_we_would_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "optml"
    assert main([*flags(runs), "--rows", "2,22", "--rule", "auto"]) == 0
    assert "automatic: " in capsys.readouterr().out
    by_itself = RunFolder(runs / "auto-async-2-labels-lenet5-seed0").result()
    as_published = RunFolder(runs / "22-async-2-labels-lenet5-sgd-seed0").result()
    assert by_itself is not None and as_published is not None
    assert (
        by_itself["rule_applied"] == "foresight-fair (step limited) (averaged)"
        and as_published["rule_applied"] == "plain"
    )
    rows = list(csv.DictReader((runs / "table.csv").read_text().splitlines()))
    assert all(float(row["automatic_averaged_test_accuracy_mean"]) > 0 for row in rows)


@pytest.mark.usefixtures("small_sample")
def test_without_matplotlib_the_table_is_made_and_the_extra_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    assert main([*flags(tmp_path / "optml"), "--rows", "1"]) == 0
    assert "pip install 'paceline[report]'" in capsys.readouterr().err
    assert (tmp_path / "optml" / "table.md").exists() and not (tmp_path / "optml" / "figure.png").exists()


def test_a_folder_that_is_no_run_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = tmp_path / "01-classic-1-full-lenet5-sgd-seed0"
    strange.mkdir()
    (strange / "notes").write_text("keep me")
    assert main([*flags(tmp_path), "--rows", "1"]) == 2
    assert "exists and is not a run folder" in capsys.readouterr().err
    assert (strange / "notes").read_text() == "keep me"


def result(accuracy: float | None, status: str = "finished", **more: Any) -> dict[str, Any]:
    figures = {"train_accuracy": accuracy, "test_accuracy": accuracy, "train_loss": 0.5, "test_loss": 0.5}
    return {"status": status, "lab_seconds": 12.0, "average": "none", **figures, **more}


def test_a_diverged_run_is_counted_and_left_out_of_the_mean() -> None:
    row = choose_rows("20")[0]
    mixed = RunStatistics([result(80.0), result(None, "diverged"), result(82.0)])
    one = ReproducedRow(row, mixed, automatic=RunStatistics([result(91.0, average="on", live_test_accuracy=88.0)]))
    line = markdown([one]).splitlines()[-1]
    assert "81.00 ± 1.41 (1 of 3 NaN)" in line and "| 88.00 | 91.00 |" in line
    assert one.difference == pytest.approx(81.0 - 89.71)
    lost = ReproducedRow(row, RunStatistics([result(None, "diverged")]))
    cells = [cell.strip() for cell in markdown([lost]).splitlines()[-1].split("|")]
    assert cells[5:9] == ["NaN", "", "-", "-"]


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (85.0, "automatic: 0 of 1 async rows at or above the published sync row of their data, on live weights"),
        (89.6, "automatic: 1 of 1 async rows at or above the published sync row of their data, on live weights"),
        (None, "automatic: averaged weights only, the published rows are of live ones"),
    ],
)
def test_automatic_runs_are_compared_with_published_ones_on_live_weights(live: float | None, said: str) -> None:
    """The published sync row of this data has 89.47; the averaged weights are above it in any case."""
    row = choose_rows("20")[0]
    assert (row.mode, row.workers, row.split, row.model) == ("async", 2, "full", "lenet5")
    ours = RunStatistics([result(91.0, average="on", live_test_accuracy=live)])
    lines = summary([ReproducedRow(row, RunStatistics([result(89.0)]), ours)])
    assert lines[-1].startswith(said)


def test_rows_are_scored_like_the_published_ones_and_automatic_runs_all_average() -> None:
    where = (1.0, None, "runs")
    for row in choose_rows(None):
        assert kind_of({}, resolve(row.config(0, *where))) == "live"
        assert kind_of({}, resolve(automatic(row, 0, *where))) == "averaged"
