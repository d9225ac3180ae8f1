"""Scaling: which runs are made, what the table makes of them, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import Interrupted, UserError
from paceline.reports.console import Console
from paceline.studies import batch_runs
from paceline.studies.scaling import configs_for, parse_counts
from paceline.studies.scaling_table import cells, draw, gather, markdown, rows_of, split_of


def folder_of(path: Path, workers: dict[str, Any]) -> Path:
    """A run folder that holds nothing but its timing."""
    path.mkdir()
    row = {"kind": "timing", "now": 1.0, "server_cpu": 0.001, "cores": 2, "workers": workers}
    (path / "events.jsonl").write_text(json.dumps(row) + "\n")
    return path


def result(rate: float, computing: float, status: str = "finished") -> dict[str, Any]:
    shares = [{"computing": computing, "waiting": round(1 - computing, 4)}]
    return {"status": status, "samples_per_second": rate, "utilisation": shares}


def rows(tmp_path: Path) -> list[tuple[int, int, Path, dict[str, Any]]]:
    quick = {"0": {"steps": 50, "wall": 0.01, "waited": 0.001, "waited_least": 0.001}}
    made = [(1, 900.0, 0.9), (1, 1100.0, 0.9), (2, 1600.0, 0.8), (4, 1600.0, 0.4)]
    return [
        (workers, 32, folder_of(tmp_path / str(place), quick), result(rate, computing))
        for place, (workers, rate, computing) in enumerate(made)
    ]


def test_efficiency_is_against_the_first_count_and_the_ideal_stops_at_the_cores(tmp_path: Path) -> None:
    found = gather("weak", "sync", "cnn", {1: 1, 2: 2, 4: 2}, rows(tmp_path))
    assert [count.rate for count in found.counts] == [1000.0, 1600.0, 1600.0]
    assert [count.ideal for count in found.counts] == [1000.0, 2000.0, 2000.0]
    assert [count.speedup for count in found.counts] == [1.0, 1.6, 1.6]
    assert [count.efficiency for count in found.counts] == [1.0, 0.8, 0.8]


def test_where_the_first_count_is_two_the_ideal_is_in_twos(tmp_path: Path) -> None:
    found = gather("weak", "sync", "cnn", {2: 2, 4: 4}, rows(tmp_path))
    assert [(count.ideal, count.efficiency) for count in found.counts] == [(1600.0, 1.0), (3200.0, 0.5)]


def test_time_is_split_and_adds_up(tmp_path: Path) -> None:
    found = gather("weak", "sync", "cnn", {1: 1, 2: 2, 4: 4}, rows(tmp_path))
    for count, compute, exchange in zip(found.counts, (0.9, 0.8, 0.4), (0.09, 0.08, 0.04), strict=True):
        assert count.split is not None
        assert count.split.compute == pytest.approx(compute)
        assert count.split.exchange == pytest.approx(exchange)
        assert count.split.compute + count.split.exchange + count.split.wait == pytest.approx(1.0)


def test_an_exchange_takes_no_more_than_was_waited() -> None:
    timing = {"workers": {"0": {"wall": 0.01, "waited_least": 0.5}}}
    split = split_of(result(1.0, 0.9), timing)
    assert split is not None and split.exchange == pytest.approx(0.1) and split.wait == 0.0
    assert split_of({"status": "finished"}, timing) is None
    assert split_of(result(1.0, 0.9), None) is None


def test_a_run_that_did_not_finish_is_counted_and_not_measured(tmp_path: Path) -> None:
    made = rows(tmp_path)
    made[1] = (1, 32, made[1][2], result(9.0, 0.9, "diverged"))
    found = gather("weak", "sync", "cnn", {1: 1, 2: 2}, made)
    assert found.counts[0].rates == [900.0] and found.counts[0].unfinished == 1
    assert "1 did not finish" in cells(found)[0][-1]


def test_the_table_is_markdown_and_plain_values(tmp_path: Path) -> None:
    found = gather("strong", "async", "lenet5", {1: 1, 2: 2}, rows(tmp_path))
    text = markdown(found)
    assert "| 2 | 32 | 1,600 | 2,000 | 1.60 | 0.80 | 80.0 | 8.0 | 12.0 | 1 |" in text
    assert rows_of(found)[1]["efficiency"] == 0.8
    if importlib.util.find_spec("matplotlib") is not None:
        assert draw(found, tmp_path / "figure.png") is None
        assert (tmp_path / "figure.png").stat().st_size > 1000


def test_strong_divides_the_batch_and_steps_are_each_workers_own() -> None:
    asked = RunConfig(batch_size=64, strategy="async", steps=50)
    strong = configs_for(asked, "strong", [1, 2, 4], 1)
    assert [(c.workers, c.batch_size, c.steps) for c in strong] == [(1, 64, 50), (2, 32, 100), (4, 16, 200)]
    weak = configs_for(RunConfig(batch_size=64, strategy="sync", steps=50), "weak", [1, 2], 2)
    assert [(c.workers, c.batch_size, c.steps) for c in weak] == [(1, 64, 50), (1, 64, 50), (2, 64, 50), (2, 64, 50)]
    assert len({c.name for c in weak}) == 4
    with pytest.raises(UserError, match="3 do not divide it: try --batch-size 63"):
        configs_for(asked, "strong", [1, 3], 1)


@pytest.mark.parametrize("text", ["0,1", "2,1", "1,1", "1,x", "", "1;2"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--workers"):
        parse_counts(text, "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speed"], "unknown benchmark 'speed'"),
        (["scaling", "--kind", "odd"], "unknown --kind 'odd'"),
        (["scaling", "--repeats", "0"], "--repeats 0"),
        (["scaling", "--name", "a/b"], "is not a folder name"),
        (["scaling", "--strategy", "backup:1", "--workers", "1,2"], "would leave no worker to wait for"),
        (["scaling", "--epochs", "3"], "unknown flag '--epochs'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert words in errors[-1] and errors[-1].startswith("paceline: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("reason", "done"), [(None, 1), ("interrupted", 0)])
def test_ctrl_c_ends_the_command_even_when_the_run_under_way_had_only_its_scoring_left(
    reason: str | None, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def train(config: RunConfig, console: Console, rank: None) -> tuple[None, dict[str, Any]]:
        trained.append(config.name)
        console.report({"kind": "stopping", "reason": "interrupted"})
        return None, {"reason": reason}

    monkeypatch.setattr(batch_runs, "train", train)
    configs = [RunConfig(name=name, runs=str(tmp_path)) for name in ("one", "two")]
    with pytest.raises(Interrupted, match=f"interrupted: {done} of 2 runs are done and kept"), Console() as console:
        batch_runs.train_missing(configs, console)
    assert trained == ["one"]
    assert "interrupted: ending the current run" in capsys.readouterr().err
