"""Workers without a server: the weights of `sync` bit for bit, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.commands import Command, replays, result_of, run, wait_for_records

SAMPLE = ("--dataset", "fashion-mnist-sample", "--seed", "3")


def test_allreduce_has_the_weights_of_sync_bit_for_bit_and_replays(tmp_path: Path) -> None:
    for strategy in ("allreduce", "sync"):
        arguments = ("--strategy", strategy, "--workers", "3", "--steps", "40", "--name", strategy)
        command = run("train", *SAMPLE, *arguments, "--momentum", "0.9", cwd=tmp_path)
        assert command.process.returncode == 0, command.err
    ring, star = (result_of(tmp_path / f"runs/{name}") for name in ("allreduce", "sync"))
    assert ring["updates"] == 40
    for name in ("weights_sha256", "samples", "train_loss", "test_accuracy"):
        assert ring[name] == star[name], name
    assert replays(tmp_path / "runs/allreduce")


def test_a_killed_worker_leaves_the_ring_and_the_rest_go_on(tmp_path: Path) -> None:
    arguments = ("--strategy", "allreduce", "--workers", "3", "--steps", "300", "--name", "it")
    with Command("train", *SAMPLE, *arguments, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 60)
        os.kill(command.forked()[2], signal.SIGKILL)
        assert command.finish() == 0, command.err
        assert "worker 2 was lost (killed by SIGKILL): the run goes on with 2" in command.err
        assert not command.family()
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["lost_workers"], result["updates"]) == ("finished", [2], 300)
    assert replays(tmp_path / "runs/it")


def test_a_ring_whose_first_worker_is_killed_ends_at_once_and_resumes(tmp_path: Path) -> None:
    arguments = (
        "--strategy",
        "local:2",
        "--workers",
        "2",
        "--steps",
        "150",
        "--name",
        "it",
        "--checkpoint-every",
        "0.3",
    )
    with Command("train", *SAMPLE, *arguments, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 120)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 1
        last = command.err.strip().splitlines()[-1]
        assert "the process of worker 0 ended (killed by SIGKILL)" in last and "'paceline resume runs/it'" in last
        assert not command.family()
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"]) == ("finished", 150)
    assert replays(tmp_path / "runs/it")


def test_a_ring_that_reached_its_target_stops_for_everybody(tmp_path: Path) -> None:
    arguments = ("--strategy", "allreduce", "--workers", "2", "--epochs", "50", "--name", "it")
    command = run("train", *SAMPLE, *arguments, "--eval-every", "0.2", "--target-accuracy", "15", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    assert result_of(tmp_path / "runs/it")["reason"] == "target accuracy 15 % reached"
    assert "was lost" not in command.err
