"""Forecasts, plans, and clusters taken from real runs."""

from __future__ import annotations

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
from paceline.studies.plan import LOCAL_STEPS, choose, make_plan, probe, sizes
from paceline.transports.protocol import Timing


def cell(strategy: str, workers: int, rate: float, staleness: float = 0.0) -> Forecast:
    return Forecast(strategy, workers, rate, staleness, staleness, 0.5, 1.0)


def test_no_staleness_is_worth_a_tenth_of_the_speed() -> None:
    crew = [cell("sync", 4, 95.0), cell("async", 4, 100.0, 3.0)]
    assert choose(crew).choice.strategy == "sync"
    crew[0] = cell("sync", 4, 80.0)
    assert choose(crew).choice.strategy == "async"


def test_a_larger_crew_must_be_worth_it() -> None:
    crew = [cell("async", 2, 95.0, 1.0), cell("async", 4, 100.0, 3.0), cell("async", 8, 101.0, 7.0)]
    assert choose(crew).choice.workers == 2


def test_local_steps_must_be_worth_it() -> None:
    crew = [cell("sync", 4, 95.0), cell("diloco:16", 4, 100.0), cell("async-local:16", 4, 101.0, 3.0)]
    assert choose(crew).choice.strategy == "sync"
    crew[0] = cell("sync", 4, 50.0)
    assert choose(crew).choice.strategy == "diloco:16"
    crew[2] = cell("async-local:16", 4, 130.0, 3.0)
    assert choose(crew).choice.strategy == "async-local:16"


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


def test_a_plan_from_stated_speeds_names_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speeds", "lognormal:100ms,.3", "--link", "1gbit,0.1ms", "--parameters", "1M", "--workers", "4"]
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    assert "<- use this" in out and "use " in out.splitlines()[-1]
    assert max(map(len, out.splitlines()[:-1])) <= 80
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
        ring = one.strategy.startswith(("allreduce", "local", "diloco"))
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
