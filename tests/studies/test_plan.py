"""Forecasts, plans, and clusters taken from real runs."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.step_times import read_step_times
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.core.worker import one_vector
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runtimes.server.timing import TimingCollector
from paceline.settings.resolve import resolve
from paceline.settings.strategies import worth_comparing
from paceline.simulation.cluster import cluster_of
from paceline.simulation.forecast import Forecast, forecast
from paceline.studies import plan
from paceline.studies.plan import LOCAL_STEPS, choose, make_plan, plan_lines, probe, sizes
from paceline.transports.protocol import Timing


def cell(strategy: str, workers: int, useful: float, efficiency: float = 1.0, lr_scale: float = 1.0) -> Forecast:
    staleness = workers - 1.0 if strategy.startswith("async") else 0.0
    rates = useful / efficiency, efficiency, useful
    return Forecast(strategy, lr_scale, workers, *rates, staleness, staleness, 0.5, 1.0)


def test_what_counts_is_the_time_to_an_accuracy_and_not_the_speed() -> None:
    forecasts = [cell("classic", 1, 60.0), cell("async", 4, 100.0, 0.8), cell("diloco:16", 4, 80.0, 0.3)]
    choice, reason = choose(forecasts)
    assert choice is forecasts[1]
    assert "it takes 60 % of one worker's time to an accuracy, as 80 % of its samples count" in reason
    assert reason.endswith("diloco:16 on 4 workers has the most samples/s, 2.13 times as many, but 30 % of them count.")


def test_a_longer_step_must_be_worth_it() -> None:
    forecasts = [cell("sync", 4, 100.0, lr_scale=4.0), cell("async", 4, 95.0)]
    assert choose(forecasts)[0].strategy == "async"
    forecasts[1] = cell("async", 4, 80.0)
    assert choose(forecasts)[0].strategy == "sync"


def test_more_workers_must_be_worth_it() -> None:
    forecasts = [cell("async", 2, 95.0), cell("async", 4, 100.0), cell("async", 8, 101.0)]
    assert choose(forecasts)[0].workers == 2
    assert choose([cell("classic", 1, 95.0), *forecasts])[1].startswith("use one worker: async on 8 workers takes 94 %")


def test_local_steps_must_be_worth_it() -> None:
    forecasts = [cell("sync", 4, 95.0), cell("diloco:16", 4, 100.0)]
    assert choose(forecasts)[0].strategy == "sync"
    forecasts[0] = cell("sync", 4, 80.0)
    assert choose(forecasts)[0].strategy == "diloco:16"


def test_the_command_of_a_plan_trains_what_was_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speeds", "30ms", "--workers", "4", "--model", "cnn", "--lr", "0.01", "--dataset", "cifar10"]
    assert main(["plan", *flags]) == 0
    words = capsys.readouterr().out.rpartition("paceline train")[2]
    found = words.replace("\\\n", " ").split()
    assert found == [
        "--strategy",
        "async",
        "--workers",
        "4",
        "--dataset",
        "cifar10",
        "--model",
        "cnn",
        "--lr",
        "0.01",
    ]
    assert main(["plan", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].split()[2:] == found


@pytest.mark.parametrize(("workers", "scale"), [(4, 4.0), (16, 8.0)])
def test_means_of_many_batches_get_a_longer_step_which_no_run_found_too_long(workers: int, scale: float) -> None:
    cluster = RunConfig(speeds="30ms", workers=workers, dataset="fashion-mnist-sample")
    found = {(one.strategy, one.workers): one for one in make_plan(cluster, Console(quiet=True)).forecasts}
    assert found["sync", workers].lr_scale == found["allreduce", workers].lr_scale == scale
    assert found["async", workers].lr_scale == found["diloco:16", workers].lr_scale == 1.0
    adam = make_plan(dataclasses.replace(cluster, optimizer="adam"), Console(quiet=True)).forecasts
    assert {one.lr_scale for one in adam} == {1.0}


def test_the_only_worker_moves_nothing_over_the_link() -> None:
    cluster = RunConfig(speeds="30ms", workers=2, link="1mbit,10ms", dataset="fashion-mnist-sample")
    alone = make_plan(cluster, Console(quiet=True)).forecasts[0]
    assert (alone.strategy, alone.workers, alone.bytes_per_second) == ("classic", 1, 0.0)
    assert alone.samples_per_second == pytest.approx(32 / 0.03, rel=0.01)


def test_sizes_double_up_to_what_was_asked() -> None:
    assert sizes(RunConfig(workers=12)) == [1, 2, 4, 8, 12]
    assert sizes(RunConfig(cores=4)) == [1, 2, 4, 8]
    assert sizes(RunConfig(link="1gbit"))[-1] == 32
    assert all(worth_comparing(size, LOCAL_STEPS) for size in sizes(RunConfig(workers=12)))


@pytest.mark.parametrize(("strategy", "expected"), [("async", 4.0), ("sync", 1.0), ("backup:1", 3.0)])
def test_a_forecast_is_what_the_speeds_say(strategy: str, expected: float) -> None:
    """Three workers at a step a second and one at a quarter, in steps a second."""
    config = resolve(RunConfig(strategy=strategy, workers=4, speeds="1,1,1,4", batch_size=1))
    found = forecast(config, one_vector(1000))
    assert found.samples_per_second == pytest.approx(expected if strategy != "async" else 3.25, rel=0.02)
    assert found.workers == 4 and 0 < found.computing <= 1.0


def recorded(folder: Path, steps: int, seconds: float = 0.004) -> Path:
    """A run folder with a timing event, as two workers on two cores would leave it."""
    run = RunFolder.create(resolve(RunConfig(workers=2, name="real", runs=str(folder))))
    keeper = TimingCollector()
    for step in range(steps):
        for worker in (0, 1):
            spread = 1.0 + 0.1 * ((step % 11) - 5) / 5
            keeper.add(worker, Timing(seconds * spread, seconds * spread, 0.0004))
    row = keeper.row(2 * steps)
    assert row is not None
    row |= {"server_cpu": 0.0003, "cores": 2, "kind": "timing", "now": 1.0}
    run.events_file.write_text(json.dumps(row) + "\n")
    return run.path


def test_a_cluster_like_a_run_has_its_times(tmp_path: Path) -> None:
    path = recorded(tmp_path, 200)
    found = read_step_times(path)
    assert found.step_seconds == pytest.approx(0.004, rel=0.01)
    assert (found.quantiles[0], found.quantiles[-1]) == (pytest.approx(0.9, rel=0.01), pytest.approx(1.1, rel=0.01))
    assert found.latency == pytest.approx(0.00005, rel=0.01)
    cluster = cluster_of(resolve(RunConfig(workers=3, like=str(path), speeds="1,1,2")), 1000)
    assert (cluster.cores, cluster.server_seconds) == (2, 0.0003)
    assert cluster.step_times.distributions[2].mean == pytest.approx(0.008, rel=0.01)
    stated = cluster_of(resolve(RunConfig(workers=3, speeds=f"measured:{path}*1,1,2")), 1000)
    assert stated.step_times.distributions == cluster.step_times.distributions
    assert stated.cores is None
    two = forecast(resolve(RunConfig(workers=2, like=str(path), batch_size=1)), one_vector(1000))
    assert two.samples_per_second == pytest.approx(2 / 0.0044, rel=0.05)
    four = forecast(resolve(RunConfig(workers=4, like=str(path), batch_size=1)), one_vector(1000))
    assert four.samples_per_second == pytest.approx(0.92 * 2 / 0.0043, rel=0.05)


def test_a_run_that_teaches_nothing_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path, 11)
    with pytest.raises(UserError, match="only 22 timed steps"):
        read_step_times(path)
    (path / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="has no timing"):
        read_step_times(path)
    with pytest.raises(UserError, match="is not a run folder"):
        read_step_times(tmp_path / "nowhere")


def test_a_plan_from_stated_speeds_names_a_choice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--speeds", "lognormal:100ms,.3", "--link", "1gbit,0.1ms", "--parameters", "1M", "--workers", "4"]
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert "<- use this" in out and "\nuse " in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["plan", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"]["samples_per_second"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--speeds", "1,1"], "give one speed for all"),
        (["--like", "nowhere"], "is not a run folder"),
        (["--speeds", "1s", "--link", "fast"], "not a bandwidth"),
    ],
)
def test_bad_plans_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["plan", *flags, "--workers", "4"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_plan_with_codecs_moves_fewer_bytes_where_there_is_a_server() -> None:
    cluster = {"speeds": "30ms", "link": "100mbit,1ms", "workers": 2, "dataset": "fashion-mnist-sample"}
    plain = make_plan(RunConfig(**cluster), Console(quiet=True)).forecasts
    coded = make_plan(RunConfig(**cluster, codec="int8", pull_codec="lowrank:2"), Console(quiet=True)).forecasts
    for one, other in zip(plain, coded, strict=True):
        ring = one.strategy.startswith(("classic", "allreduce", "local", "diloco"))
        a_sample = other.bytes_per_second / other.samples_per_second
        assert (a_sample < 0.3 * one.bytes_per_second / one.samples_per_second) != ring, one.strategy
        assert other.samples_per_second >= one.samples_per_second


def test_a_machine_that_is_probed_twice_gets_its_notes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int | None] = []

    def train(config: RunConfig, console: Console, rank: object) -> tuple[RunFolder, dict[str, Any]]:
        console.note("using the built-in sample")
        steps.append(config.steps)
        return RunFolder(tmp_path), {"train_seconds": 0.5 * len(steps)}

    monkeypatch.setattr(plan, "train", train)
    said = io.StringIO()
    with Console(said) as console:
        probe(RunConfig(), console, tmp_path)
    assert len(steps) == 2 and said.getvalue() == "using the built-in sample\n"


def test_a_probe_that_is_interrupted_ends_the_plan_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []

    def train(config: RunConfig, console: Console, rank: object) -> tuple[RunFolder, dict[str, Any]]:
        folders.append(Path(config.runs))
        console.report({"kind": "stopping", "reason": "interrupted"})
        return RunFolder(Path(config.runs)), {"train_seconds": 9.0, "reason": "interrupted"}

    monkeypatch.setattr(plan, "train", train)
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    monkeypatch.setattr("paceline.system.cpu.cores", lambda: 2)
    assert main(["plan", "--dataset", "fashion-mnist-sample", "--workers", "2"]) == 130
    out, error = capsys.readouterr()
    assert out == "" and len(folders) == 1 and not folders[0].exists()
    busy = "the load is 64.0 on 2 cores: another program is running, so timings will be off"
    said = [line for line in error.splitlines() if "built-in sample" not in line]
    assert said == [busy, "probing this machine with two workers for a few seconds", "paceline: interrupted"]


@pytest.mark.parametrize(
    "asked", [["--speeds", "100ms"], ["--speeds", "100ms", "--parameters", "25M", "--link", "1gbit,0.2ms"]]
)
def test_a_plan_of_stated_figures_names_no_model_or_data_that_it_does_not_know(
    capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    assert main(["plan", *asked, "--workers", "4", "--steps", "20000"]) == 0
    out = capsys.readouterr().out
    command = out.rpartition("\npaceline train")[2]
    assert "--steps 20000" in command and " ...\n" in command and "your model and data, as --task" in command
    assert "fashion" not in out and "lenet" not in out


def test_a_narrow_plan_names_the_columns_it_leaves_out_and_explains_no_others() -> None:
    found = plan.Plan([cell("async", 2, 95.0)], cell("async", 2, 95.0), "use it", "paceline train")
    lines = "\n".join(plan_lines(found, 60)).replace("\n", " ")
    assert "left out: " in lines and "computing: " not in lines and "times: " in lines
    assert "computing: " in (wide := "\n".join(plan_lines(found))) and "left out" not in wide


def test_one_worker_has_no_exchange_with_itself(tmp_path: Path) -> None:
    """Only the update takes time beside the steps."""
    like = str(recorded(tmp_path, 200))
    alone = forecast(resolve(RunConfig(strategy="classic", like=like, batch_size=1)), one_vector(1000))
    assert alone.computing == pytest.approx(0.004 / 0.0043, rel=0.01)
