"""Simulated runs: determinism, times that can be worked out by hand, and the same weights as real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.runs.arrival_log import read_arrivals
from paceline.runs.folder import RunFolder

pytestmark = pytest.mark.long  # left to `make test`

SMALL = ["--dataset", "fashion-mnist-sample", "--threads", "1"]


def simulated(folder: Path, name: str, *flags: str) -> dict[str, Any]:
    assert main(["simulate", *SMALL, "--runs", str(folder), "--name", name, *flags]) == 0
    result: dict[str, Any] = json.loads((folder / name / "result.json").read_text())
    return result


def timed(folder: Path, name: str, *flags: str) -> dict[str, Any]:
    return simulated(folder, name, "--timing-only", *flags)


SLOW = [
    pytest.param(name, marks=pytest.mark.real)
    for name in ("sync", "backup:1", "bounded:1", "allreduce", "async-local:3")
]


@pytest.mark.parametrize("strategy", ["async", *SLOW])
def test_the_same_config_and_seed_give_the_same_bytes(tmp_path: Path, strategy: str) -> None:
    flags = ["--workers", "3", "--strategy", strategy, "--speeds", "lognormal:1s,.4", "--link", "100mbit,1ms"]
    steps = ["--steps", "12", "--score", "none"]
    first, second = (simulated(tmp_path, name, *flags, *steps) for name in "ab")
    assert first["weights_sha256"] == second["weights_sha256"]
    assert (tmp_path / "a" / "events.jsonl").read_bytes() == (tmp_path / "b" / "events.jsonl").read_bytes()
    logs = [(tmp_path / name / "arrivals.log").read_bytes().partition(b"\n")[2] for name in "ab"]
    assert logs[0] == logs[1]
    other = simulated(tmp_path, "c", *flags, *steps, "--seed", "1")
    assert other["weights_sha256"] != first["weights_sha256"]


def test_steps_are_the_only_time_without_a_link(tmp_path: Path) -> None:
    result = timed(tmp_path, "a", "--workers", "2", "--speeds", "1,4", "--steps", "20", "--strategy", "async")
    assert result["virtual_seconds"] == 16.0  # 16 of the fast and 4 of the slow; the slow one's last lands with it
    assert [worker["computing"] for worker in result["utilisation"]] == [1.0, 1.0]


def test_a_target_that_was_not_reached_chose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "2", "--steps", "4", "--eval-every", "0.01", "--target-accuracy", "100"]
    result = simulated(tmp_path, "a", *flags)
    assert result["reason"] is None and result["chosen_on"] is None
    assert "chosen on" not in capsys.readouterr().out


@pytest.mark.parametrize(("split", "pushes"), [("iid", 240), ("full", 480)])
def test_times_alone_have_as_many_batches_as_training(tmp_path: Path, split: str, pushes: int) -> None:
    flags = ["--workers", "2", "--split", split, "--epoch-mode", "own", "--epochs", "1", "--batch-size", "50"]
    result = timed(tmp_path, "a", *flags)
    assert (result["updates"], result["samples"]) == (pushes, 50 * pushes)


def test_a_round_takes_as_long_as_its_slowest_worker(tmp_path: Path) -> None:
    result = timed(tmp_path, "a", "--workers", "4", "--speeds", "1,1,1,4", "--steps", "10", "--strategy", "sync")
    assert result["virtual_seconds"] == 40.0
    assert [worker["waiting"] for worker in result["utilisation"]] == [0.75, 0.75, 0.75, 0.0]
    without = timed(tmp_path, "b", "--workers", "4", "--speeds", "1,1,1,4", "--steps", "10", "--strategy", "backup:1")
    assert without["virtual_seconds"] == 10.0


def test_the_links_two_directions_are_shared_by_all_pushes_and_all_pulls(tmp_path: Path) -> None:
    """1 M floats are 4 MB: 0.032 s alone on 1 gbit, four times that for four at once; the same again to pull."""
    flags = ["--workers", "4", "--speeds", "1s", "--link", "1gbit,1ms", "--parameters", "1M", "--strategy", "sync"]
    one, eleven = (timed(tmp_path, f"s{steps}", *flags, "--steps", str(steps)) for steps in (1, 11))
    a_round = (eleven["virtual_seconds"] - one["virtual_seconds"]) / 10
    assert a_round == pytest.approx(1.0 + 2 * (4 * 0.032 + 0.001), rel=1e-6)


def test_a_ring_costs_what_its_formula_says(tmp_path: Path) -> None:
    flags = ["--workers", "4", "--speeds", "1s", "--link", "1gbit,1ms", "--parameters", "1M", "--strategy", "allreduce"]
    one, eleven = (timed(tmp_path, f"s{steps}", *flags, "--steps", str(steps)) for steps in (1, 11))
    a_round = (eleven["virtual_seconds"] - one["virtual_seconds"]) / 10
    assert a_round == pytest.approx(1.0 + 2 * 3 * (0.032 / 4 + 0.001), rel=1e-6)


@pytest.mark.parametrize(
    ("path", "strategy", "exchange"),
    [("ring", "local:5", 2 * 3 * 0.032 / 4), ("star", "local:5", 2 * 4 * 0.032), ("star", "diloco:5", 2 * 4 * 0.032)],
)
def test_local_steps_exchange_less(tmp_path: Path, path: str, strategy: str, exchange: float) -> None:
    flags = ["--workers", "4", "--speeds", "1s", "--link", "1gbit", "--parameters", "1M", "--strategy", strategy]
    one, five = (timed(tmp_path, f"s{steps}", *flags, "--path", path, "--steps", str(steps)) for steps in (1, 5))
    a_round = (five["virtual_seconds"] - one["virtual_seconds"]) / 4
    assert a_round == pytest.approx(5.0 + exchange, rel=1e-6)
    assert five["samples"] == 5 * 4 * 5 * 32


@pytest.mark.parametrize("strategy", ["local:8", "async-local:8"])
def test_by_speed_all_push_at_the_same_time_and_the_log_says_how_many_steps(tmp_path: Path, strategy: str) -> None:
    flags = [
        "--workers",
        "3",
        "--speeds",
        "1,1,4",
        "--strategy",
        strategy,
        "--steps",
        "30",
        "--path",
        "star",
        "--local-steps",
    ]
    even, by_speed = (timed(tmp_path, how, *flags, how) for how in ("even", "speed"))
    records, _ = read_arrivals(tmp_path / "speed" / "arrivals.log", RunFolder.open(tmp_path / "speed").config())
    assert [(record.worker, record.seq) for record in records if record.kind == "steps"] == [(2, 2)]
    last = [record for record in records if record.kind == "push"][-9:]
    assert {record.samples for record in last if record.worker == 2} == {2 * 32}
    assert {record.samples for record in last if record.worker != 2} == {8 * 32}
    assert [sum(record.worker == worker for record in last) for worker in range(3)] == [3, 3, 3]
    assert by_speed["samples"] / by_speed["virtual_seconds"] > 0.9 * (even["samples"] / even["virtual_seconds"])


def test_cores_are_shared(tmp_path: Path) -> None:
    result = timed(
        tmp_path, "a", "--workers", "4", "--speeds", "1s", "--cores", "2", "--steps", "10", "--strategy", "sync"
    )
    assert result["virtual_seconds"] == pytest.approx(20.0)


def test_the_server_takes_one_push_at_a_time(tmp_path: Path) -> None:
    flags = ["--workers", "4", "--speeds", "1ms", "--server-time", "100ms", "--strategy", "async", "--steps", "50"]
    assert timed(tmp_path, "a", *flags)["virtual_seconds"] == pytest.approx(5.0, rel=0.01)


def test_bounded_staleness_holds_the_fast_ones_back(tmp_path: Path) -> None:
    flags = ["--workers", "2", "--speeds", "1,10", "--steps", "44", "--strategy"]
    bounded, free = timed(tmp_path, "b", *flags, "bounded:3"), timed(tmp_path, "f", *flags, "async")
    assert bounded["utilisation"][0]["waiting"] > 0.5 > free["utilisation"][0]["waiting"]
    records, _ = read_arrivals(tmp_path / "b" / "arrivals.log", RunFolder.open(tmp_path / "b").config())
    clocks = [0, 0]
    for record in records:
        if record.kind == "push":
            clocks[record.worker] += 1
            assert max(clocks) - min(clocks) <= 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--speeds", "1,1,1"], "3 speeds for 2 workers"),
        (["--speeds", "30parsecs"], "unknown unit 'parsecs'"),
        (["--speeds", "lognormal:30ms"], "lognormal takes 2"),
        (["--speeds", "lognorml:30ms,.3"], "did you mean"),
        (["--speeds", "0,1"], "above zero"),
        (["--speeds", "1e-30,1"], "nanosecond"),
        (["--speeds", "1e99,1"], "'1e99' is above 1e+09 seconds"),
        (["--speeds", "inf,1"], "write 30ms"),
        (["--timing-only", "--eval-every", "1"], "leave out --eval-every"),
        (["--timing-only", "--workers", "70000"], "at most 65535"),
        (["--link", "1gigabit"], "unknown unit 'gigabit'"),
        (["--link", "0gbit"], "carries nothing"),
        (["--link", "1gbit,2ms,3"], "more than two"),
        (["--server-time", "fast"], "--server-time"),
        (["--parameters", "5M"], "add --timing-only"),
        (["--timing-only", "--parameters", "5M", "--codec", "lowrank:4"], "give --model instead of --parameters"),
        (["--timing-only", "--parameters", "3000M", "--codec", "int8"], "up to 2^31 parameters"),
        (["--strategy", "allreduce", "--codec", "int8"], "only between ranks"),
        (["--faults", "no-such.toml"], "no-such.toml"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["simulate", *SMALL, "--runs", str(tmp_path / "runs"), "--workers", "2", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "runs").exists()
