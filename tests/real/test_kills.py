"""Whatever is killed: the run goes on or ends at once with one clear line, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.commands import (
    Command,
    replays,
    result_of,
    run,
    wait_for_more_records,
    wait_for_records,
    wait_until_gone,
)

SAMPLE = ("--dataset", "fashion-mnist-sample", "--name", "it", "--seed", "3", "--score", "none")
LONG = ("train", *SAMPLE, "--strategy", "async", "--workers", "2", "--epochs", "200")


def train(cwd: Path, *arguments: str) -> Command:
    return Command("train", *SAMPLE, *arguments, cwd=cwd)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_killed_worker_is_an_event_and_the_run_goes_on(tmp_path: Path, strategy: str) -> None:
    with train(tmp_path, "--strategy", strategy, "--workers", "3", "--steps", "300") as command:
        wait_for_records(tmp_path / "runs/it", 30)
        os.kill(command.forked()[2], signal.SIGKILL)
        assert command.finish() == 0, command.err
        assert "worker 1 was lost (killed by SIGKILL): the run goes on with 2" in command.err
        assert not command.family()
    result = result_of(tmp_path / "runs/it")
    assert result["status"] == "finished"
    assert result["lost_workers"] == [1]
    assert result["updates"] == 300


def test_when_all_workers_are_killed_the_run_ends_with_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    with Command(*LONG, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 30)
        for pid in command.forked()[1:]:
            os.kill(pid, signal.SIGKILL)
        assert command.finish() == 1
        last = command.err.strip().splitlines()[-1]
        assert "all workers are gone at update" in last and "paceline resume runs/it" in last
        assert "Traceback" not in command.err
        assert not command.family()
    assert result_of(tmp_path / "runs/it")["status"] == "stopped"


def test_a_killed_server_ends_the_run_with_the_way_on_and_loses_nothing(tmp_path: Path) -> None:
    arguments = ("--strategy", "async", "--workers", "2", "--steps", "300", "--checkpoint-every", "0.3")
    with train(tmp_path, *arguments) as command:
        wait_for_records(tmp_path / "runs/it", 150)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 1
        last = command.err.strip().splitlines()[-1]
        assert "the server process ended (killed by SIGKILL)" in last and "'paceline resume runs/it'" in last
        assert not command.family()
    assert not (tmp_path / "runs/it/result.json").exists()
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"]) == ("finished", 300)
    assert replays(tmp_path / "runs/it")


def test_a_server_killed_twice_is_started_again_and_the_whole_log_replays(tmp_path: Path) -> None:
    """With state that a cut must hold on every side: the rule's, the average's, and what the codec left out."""
    training = (
        "--strategy",
        "async",
        "--workers",
        "2",
        "--rule",
        "foresight-cached",
        "--average",
        "on",
        "--codec",
        "int8",
    )
    upkeep = ("--steps", "300", "--checkpoint-every", "0.4", "--restart", "2", "--durable", "--keep", "1")
    with train(tmp_path, *training, *upkeep) as command:
        for number in (80, 180):
            wait_for_records(tmp_path / "runs/it", number)
            os.kill(command.forked()[0], signal.SIGKILL)
            wait_for_records(tmp_path / "runs/it", number + 20)
        assert command.finish() == 0, command.err
        assert (
            "ended (killed by SIGKILL): going on from its newest checkpoint and its log (restart 2 of 2)" in command.err
        )
        assert not command.family()
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"]) == ("finished", 300)
    assert (result["resumes"], result["lost_pushes"]) == (2, 0)
    assert replays(tmp_path / "runs/it")


@pytest.mark.parametrize("victim", ["supervisor", "fork server"])
def test_no_orphan_is_left_when_the_supervisor_or_the_fork_server_is_killed(tmp_path: Path, victim: str) -> None:
    with Command(*LONG, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 30)
        os.kill(command.process.pid if victim == "supervisor" else command.fork_server(), signal.SIGKILL)
        wait_until_gone(command)
        command.finish()
        if victim == "fork server":
            assert command.process.returncode == 1
            assert "'paceline resume runs/it' continues from there" in command.err


def test_ctrl_c_stops_cleanly_with_a_partial_result(tmp_path: Path) -> None:
    with Command(*LONG, "--score", "all", cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 60)
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.finish() == 130
        assert "Traceback" not in command.err and not command.family()
        assert "Average test accuracy" in command.out
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["reason"]) == ("stopped", "interrupted")
    assert result["updates"] >= 57  # 60 records at least, with the header counted as one and two joins


def test_sigterm_saves_a_checkpoint_and_the_run_resumes_from_it(tmp_path: Path) -> None:
    with train(tmp_path, "--strategy", "classic", "--steps", "200", "--threads", "1") as command:
        wait_for_records(tmp_path / "runs/it", 60)
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.finish() == 130, command.err
        assert "'paceline resume runs/it'" in command.err
    stopped = result_of(tmp_path / "runs/it")
    assert stopped["status"] == "stopped" and stopped["updates"] < 200
    assert len(list((tmp_path / "runs/it/checkpoints").iterdir())) == 1
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"]) == ("finished", 200)
    assert replays(tmp_path / "runs/it")


def test_a_stopped_worker_that_wakes_again_does_no_harm(tmp_path: Path) -> None:
    with train(tmp_path, "--strategy", "async", "--workers", "2", "--steps", "1500") as command:
        wait_for_records(tmp_path / "runs/it", 60)
        sleeper = command.forked()[1]
        os.kill(sleeper, signal.SIGSTOP)
        wait_for_more_records(tmp_path / "runs/it", 140)
        os.kill(sleeper, signal.SIGCONT)
        assert command.finish() == 0, command.err
    assert result_of(tmp_path / "runs/it")["staleness"]["max"] > 50
    assert replays(tmp_path / "runs/it")
