"""A grid of settings: every run once, one table, the best named; mistakes found before anything runs."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.settings.resolve import resolve
from paceline.simulation.lab.run import LabResult, run_rows
from paceline.studies import batch_runs as many_runs
from paceline.studies.sweep_file import SweepGrid, read_grid, run_name
from paceline.studies.sweep_table import cells, disposition, draw, gather, plain, rows_of

pytestmark = pytest.mark.long  # left to `make test`

SETTINGS = """
[run]
dataset = "fashion-mnist-sample"
workers = 2
steps = 4
batch-size = 4
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_sample: None) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str) -> None:
    Path("try.toml").write_text(text)


def results() -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(Path("runs/try").glob("*/result.json"))}


def table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path("runs/try", name).read_text().splitlines()))


def test_a_grid_runs_once_may_grow_and_names_its_best(capsys: pytest.CaptureFixture[str]) -> None:
    write(SETTINGS + "[grid]\nlr = [1e20, 0.01]\nseed = [0, 1]\n")
    assert main(["sweep", "try.toml"]) == 0
    out = capsys.readouterr().out.splitlines()
    ending = " % test accuracy, averaged weights; chosen on the test set"
    assert out[-1].startswith("best: lr = 0.01: ") and out[-1].endswith(ending)
    assert out[1].startswith("0.01") and out[2].endswith("2 diverged")
    best, worst = table("table.csv")
    assert (best["lr"], best["runs"], best["diverged"]) == ("0.01", "2", "0") and float(
        best["averaged_test_accuracy_spread"]
    ) >= 0
    assert (worst["lr"], worst["diverged"], worst["averaged_test_accuracy_mean"]) == ("1e+20", "2", "")
    assert [row["status"] for row in table("runs.csv")] == ["diverged", "diverged", "finished", "finished"]
    made = {path: path.stat().st_mtime_ns for path in Path("runs/try").glob("*/result.json")}
    assert len(made) == 4
    write(SETTINGS + "[grid]\nlr = [1e20, 0.01, 0.02]\nseed = [0, 1]\n")
    assert main(["sweep", "try.toml", "--json"]) == 0
    said = capsys.readouterr()
    assert "4 of 6 runs are there already" in said.err
    shown = json.loads(said.out)
    assert shown["score"] == "averaged_test_accuracy" and len(shown["settings"]) == 3 and shown["best"]["diverged"] == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_folds_train_on_the_rest_and_leave_the_test_set_alone(capsys: pytest.CaptureFixture[str]) -> None:
    write("folds = 3\n" + SETTINGS + 'average = "on"\n[grid]\nstrategy = ["async", "local:2"]\n')
    assert main(["sweep", "try.toml"]) == 0
    assert "% validation accuracy" in capsys.readouterr().out
    found = results()
    assert len(found) == 6 and "strategy=local2_fold=3of3" in found
    for name, result in found.items():
        assert bool(result.get("lab")) == ("async" in name) and bool(result.get("simulated")) == ("local" in name)
        assert result["test_accuracy"] is None and result["test_loss"] is None
        assert (result["train_total"], result["validation_total"]) == (160, 80)
    assert {row["strategy"]: row["runs"] for row in table("table.csv")} == {"async": "3", "local:2": "3"}


def test_what_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def never_the_second(configs: list[RunConfig], *rest: Any) -> Iterator[LabResult]:
        if configs[0].seed == 1:
            raise KeyboardInterrupt
        yield from run_rows(configs, *rest)

    write(SETTINGS + "[grid]\nseed = [0, 1]\n")
    monkeypatch.setattr(many_runs, "run_rows", never_the_second)
    assert main(["sweep", "try.toml"]) == 130
    said = "interrupted: 1 of 2 runs are done and kept in runs/try; run the same command to continue"
    assert capsys.readouterr().err.splitlines()[-1] == f"paceline: {said}"
    monkeypatch.setattr(many_runs, "run_rows", run_rows)
    assert main(["sweep", "try.toml"]) == 0
    assert len(results()) == 2 and "best: the only setting: " in capsys.readouterr().out


def test_a_dry_run_says_where_each_would_run_and_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    write(SETTINGS + '[grid]\nstrategy = ["async", "local:2"]\n')
    assert main(["sweep", "try.toml", "--dry-run"]) == 0
    lines = ["runs/try/strategy=async  in the lab", "runs/try/strategy=local2  simulated", "2 runs"]
    assert capsys.readouterr().out.splitlines() == lines
    assert not Path("runs").exists()


GRID = "[grid]\nlr = [0.1]\n"
CASES = {
    "no grid": (SETTINGS, "[grid] is empty"),
    "an empty list": (SETTINGS + "[grid]\nlr = []\n", "under [grid] is empty"),
    "an unknown setting": (SETTINGS + "[grid]\nlearning_rte = [1]\n", "unknown setting 'learning_rte'"),
    "a misspelt setting": ('[run]\nstratgy = "sync"\n' + GRID, "did you mean 'strategy'"),
    "an unknown table": ("[runs]\nlr = 1\n" + GRID, "unknown entry 'runs': did you mean 'run'"),
    "a setting at the top": ("lr = 0.1\n" + GRID, "'lr' is a setting: write it under [run]"),
    "a list under run": ("[run]\nlr = [0.1, 0.2]\n", "[grid] is empty"),
    "a list under run and a grid": ("[run]\nworkers = [2, 4]\n" + GRID, "lists to try belong under [grid]"),
    "one value under grid": ("[grid]\nlr = 0.1\n", "lr = 0.1 under [grid] is not a list"),
    "a value twice": ("[grid]\nlr = [1, 0.5, 1.0]\n", "lr under [grid] has 1.0 twice"),
    "a word for a number": ('[grid]\nlr = ["fast"]\n', 'one of lr: lr = "fast": write a number without quotes'),
    "flat betas": ("[grid]\nbetas = [0.9, 0.99]\n", "one of betas: betas = 0.9: write a list of numbers"),
    "both run and grid": ("[run]\nlr = 0.1\n" + GRID, "lr is under [run] and under [grid]"),
    "one fold": ("folds = 1\n" + GRID, "folds = 1: give a whole number of at least 2"),
    "folds below run": ("[run]\nfolds = 5\n" + GRID, "write it above [run]"),
    "fold as a setting": ('[run]\nfold = "1/5"\n' + GRID, "write folds = K above [run]"),
    "a name with a slash": ('name = "a/b"\n' + GRID, "is not a folder name"),
    "its own name": ('[run]\nname = "x"\n' + GRID, "the runs are named after their settings"),
    "a device": ('[run]\ndevice = "cuda"\n' + GRID, "give --device on the command line"),
    "times only": ("[run]\ntiming_only = true\n" + GRID, "'paceline plan' compares times"),
    "a value out of range": (SETTINGS + "[grid]\nlr = [0.1, -1]\n", "lr=-1.0: --lr must be a positive number"),
    "what cannot be combined": (
        SETTINGS + '[grid]\nstrategy = ["sync", "classic"]\n',
        "strategy=classic: --workers 2: strategy classic is one worker",
    ),
    "more workers than batches": (SETTINGS.replace("workers = 2", "workers = 61") + GRID, "make only 60 batches"),
    "more folds than samples": ("folds = 241\n" + SETTINGS + GRID, "use fewer folds"),
    "bad speeds": (SETTINGS + '[grid]\nspeeds = ["1s", "fast"]\n', "speeds=fast"),
    "too many runs": (SETTINGS + f"[grid]\nseed = {list(range(1001))}\n", "asks for 1,001 runs: add --yes"),
    "a task that is not there": ('[run]\ntask = "nowhere:build"\n' + GRID, "no module 'nowhere'"),
    "no TOML": ("grid = [", "cannot be read as TOML"),
    "a grid that is no table": ("grid = 3\n", "write [grid] on a separate line"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_nothing_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = CASES[name]
    write(text)
    assert main(["sweep", "try.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: try.toml") and expected in line
    assert not Path("runs").exists()


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "nothing.toml"]) == 2
    assert "no file nothing.toml: give a TOML file with [run] and [grid]" in capsys.readouterr().err


def test_a_folder_of_something_else_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    write(SETTINGS + "[grid]\nlr = [0.1]\n")
    Path("runs/try").mkdir(parents=True)
    Path("runs/try/notes").write_text("keep me")
    assert main(["sweep", "try.toml"]) == 2
    assert "runs/try exists and is not a sweep" in capsys.readouterr().err
    Path("runs/try/notes").unlink()
    assert main(["sweep", "try.toml"]) == 0
    write(SETTINGS.replace("steps = 4", "steps = 5") + "[grid]\nlr = [0.1]\n")
    capsys.readouterr()
    assert main(["sweep", "try.toml"]) == 2
    assert "runs/try holds another sweep, with run {" in capsys.readouterr().err
    write(SETTINGS + "[grid]\nmomentum = [0.1]\n")
    assert main(["sweep", "try.toml"]) == 2
    assert "with grid over ['lr'], not ['momentum']" in capsys.readouterr().err


def test_two_commands_do_not_fill_one_folder(capsys: pytest.CaptureFixture[str]) -> None:
    write(SETTINGS + "[grid]\nlr = [0.1]\n")
    Path("runs/try").mkdir(parents=True)
    other = os.open("runs/try", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        assert main(["sweep", "try.toml"]) == 2
        assert "runs/try is in use by another command" in capsys.readouterr().err
    finally:
        os.close(other)
    assert main(["sweep", "try.toml"]) == 0


def test_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    write(SETTINGS + "[grid]\nlr = [0.1]\n")
    Path("file").write_text("")
    assert main(["sweep", "try.toml", "--runs", "file"]) == 2
    assert "sweep folder file/try cannot be written: Not a directory" in capsys.readouterr().err


def test_names_keep_apart_what_differs() -> None:
    values = ["1,1,4", "114", "lognormal:30ms,.3", "lognormal:30ms, .3", "a/b", "a b", "ab", "x" * 300, "x" * 301]
    names = [run_name({"speeds": value}, None) for value in values]
    assert len(set(names)) == len(values)
    assert all("/" not in name and " " not in name and len(name) < 200 for name in names)


def grid_of(**axes: list[Any]) -> SweepGrid:
    return SweepGrid(Path("try.toml"), "try", {}, axes, None)


def result(accuracy: float | None, loss: float | None, status: str = "finished", **more: Any) -> dict[str, Any]:
    none = {"validation_loss": None, "validation_accuracy": None}
    return {"status": status, "test_accuracy": accuracy, "test_loss": loss, "average": "none", **none, **more}


def test_the_best_is_one_of_which_no_run_diverged() -> None:
    found = [result(90.0, 0.1), result(None, None, "diverged"), result(70.0, 0.5), result(74.0, 0.4)]
    swept = gather(grid_of(lr=[0.1, 0.2], seed=[0, 1]), found)
    assert [setting.values["lr"] for setting in swept.settings] == [0.2, 0.1]
    assert disposition(swept) == "best: lr = 0.2: 72.00 ± 2.83 % test accuracy, live weights; chosen on the test set"
    lost = gather(grid_of(lr=[0.1]), [result(None, None, "diverged")])
    assert disposition(lost).startswith("no best setting")


def test_a_collapsed_run_is_never_best_and_counts_as_failed() -> None:
    found = [result(90.0, 0.1), result(99.0, 0.01, "collapsed"), result(70.0, 0.5), result(74.0, 0.4)]
    swept = gather(grid_of(lr=[0.1, 0.2], seed=[0, 1]), found)
    assert [setting.values["lr"] for setting in swept.settings] == [0.2, 0.1]
    assert swept.settings[1].runs.values("test_accuracy") == [90.0]
    (_, rows), (_, worst) = cells(swept), rows_of(swept)
    assert rows[1][-1] == "1 collapsed" and (worst["diverged"], worst["collapsed"]) == (0, 1)


def test_the_lab_marks_a_run_that_collapsed() -> None:
    epoch = SETTINGS.replace("steps = 4\n", 'epochs = 1\nthreads = 1\nstrategy = "async"\nrule = "plain"\n')
    write(epoch + "[grid]\nlr = [0.2, 0.01]\n")
    assert main(["sweep", "try.toml"]) == 0
    found = results()
    assert all(result["lab"] for result in found.values())
    high, usual = found["lr=0.2"], found["lr=0.01"]
    assert (high["status"], usual["status"], usual["reason"]) == ("collapsed", "finished", None)
    assert "training collapsed" in high["reason"] and "(now 0.2)" in high["reason"]


def test_without_accuracies_the_lowest_loss_is_best_and_a_near_second_is_named() -> None:
    found = [result(None, 0.5), result(None, 0.7), result(None, 0.55), result(None, 0.75)]
    swept = gather(grid_of(lr=[0.1, 0.2], seed=[0, 1]), found)
    said = "best: lr = 0.1: 0.6000 ± 0.1414 test loss, live weights; the next, lr = 0.2, is within the spread"
    assert disposition(swept) == f"{said}; chosen on the test set"


def test_settings_are_compared_on_weights_that_all_runs_scored() -> None:
    """The highest figure of all is that of averaged weights, but live weights are all that both runs have."""
    averaged = result(90.0, 0.1, weights="averaged", live_test_accuracy=80.0, live_test_loss=0.3)
    grid = grid_of(strategy=["async", "sync"])
    swept = gather(grid, [averaged, result(85.0, 0.2)])
    assert disposition(swept) == "best: strategy = sync: 85.00 % test accuracy, live weights; chosen on the test set"
    lines = plain(swept).splitlines()
    assert lines[0].startswith("strategy  test % live  test % avg")
    assert [line.split()[:3] for line in lines[1:]] == [["sync", "85.00", "-"], ["async", "80.00", "90.00"]]
    narrow = plain(swept, 30).splitlines()[0]
    assert "test % live" in narrow and len(narrow) <= 30
    both = gather(grid, [averaged, {**averaged, "test_accuracy": 91.0, "live_test_accuracy": 70.0}])
    assert disposition(both) == "best: strategy = sync: 91.00 % test accuracy, averaged weights; chosen on the test set"


def test_settings_scored_on_different_weights_have_no_best() -> None:
    swept = gather(grid_of(strategy=["async", "sync"]), [result(90.0, 0.1, average="on"), result(85.0, 0.2)])
    assert swept.best is None and swept.score is None
    assert disposition(swept).endswith('write average = "on" under [run]')
    assert plain(swept).splitlines()[0].startswith("strategy  test % live  test % avg")
    assert draw(grid_of(strategy=["async", "sync"]), swept, Path("figure.png")) is not None


def test_held_out_data_ranks_the_settings_of_a_sweep() -> None:
    found = [result(90.0, 0.1), result(70.0, 0.5)]
    for row, accuracy in zip(found, (60.0, 65.0), strict=True):
        row |= {"validation_accuracy": accuracy, "validation_loss": None, "validation_total": 10}
    swept = gather(grid_of(lr=[0.1, 0.2]), found)
    assert disposition(swept) == "best: lr = 0.2: 65.00 % validation accuracy, live weights"


def test_the_page_about_studies_shows_the_example() -> None:
    root = Path(__file__).parents[2]
    shown = re.search(r"```toml\n(\[run\].*?)```", (root / "docs/studies.md").read_text(), re.DOTALL)
    assert shown is not None
    assert tomllib.loads(shown[1]) == tomllib.loads((root / "examples" / "sweep.toml").read_text())


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()  # the whole sample
    example = Path(__file__).parents[2] / "examples" / "sweep.toml"
    assert read_grid(example).num_runs == 12
    part, runs = tmp_path / "sweep.toml", tmp_path / "tried"
    part.write_text(example.read_text().replace("[0.003, 0.01, 0.03]", "[0.01]").replace("0.2", "0.05"))
    assert read_grid(part).num_runs == 4
    assert main(["sweep", str(part), "--runs", str(runs)]) == 0
    assert "best: strategy = " in capsys.readouterr().out
    assert len(list(runs.glob("sweep/*/result.json"))) == 4


@pytest.mark.parametrize("setting", ["codec", "pull_codec"])
def test_runs_with_codecs_are_simulated_as_the_lab_has_none(setting: str) -> None:
    plain = RunConfig(dataset="fashion-mnist-sample", workers=2)
    assert many_runs.why_not_in_lab(resolve(plain)) is None
    reason = many_runs.why_not_in_lab(resolve(replace(plain, **{setting: "int8"})))
    assert reason is not None and "the lab has no codecs" in reason
