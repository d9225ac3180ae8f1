"""Ranks that a launcher started: the ring over torch.distributed, or one that serves and others that work."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import UserError
from tests.support.commands import Command, replays, result_of, run, wait_for_records

SAMPLE = ("--dataset", "fashion-mnist-sample", "--seed", "3", "--name", "it", "--batch-size", "100")


@contextlib.contextmanager
def ranks(cwd: Path, *arguments: str) -> Iterator[list[Command]]:
    """Two processes of one command, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Command("train", *SAMPLE, *arguments, cwd=cwd, environment={
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                })
            )
            for rank in range(2)
        ]  # fmt: skip


def test_ranks_have_the_weights_of_one_machine(tmp_path: Path) -> None:
    """Shards of 4,500 and 7,500 samples end in short batches at different times: each counts by its samples."""
    arguments = ("--strategy", "allreduce", "--shard-weights", "3,5", "--batch-size", "70", "--steps", "80")
    arguments += ("--score", "test")
    with ranks(tmp_path, *arguments) as both:
        assert [command.finish() for command in both] == [0, 0], both[0].err + both[1].err
        assert "Average test accuracy" in both[0].out and not both[1].out and not both[1].err
    other = run("train", *SAMPLE, *arguments, "--workers", "2", "--name", "one-machine", cwd=tmp_path)
    assert other.process.returncode == 0, other.err
    here, there = (load_file(tmp_path / f"runs/{name}/weights.safetensors") for name in ("it", "one-machine"))
    assert result_of(tmp_path / "runs/it")["samples"] == result_of(tmp_path / "runs/one-machine")["samples"]
    for name, tensor in here.items():
        assert torch.allclose(tensor, there[name], rtol=1e-4, atol=1e-6), name


def test_a_rank_that_dies_leaves_no_other_hanging(tmp_path: Path) -> None:
    with ranks(tmp_path, "--strategy", "allreduce", "--epochs", "500") as both:
        wait_for_records(tmp_path / "runs/it", 20)
        os.kill(both[1].process.pid, signal.SIGKILL)
        assert [command.finish() for command in both] == [1, -signal.SIGKILL], both[0].err
        last = both[0].err.strip().splitlines()[-1]
        assert last.startswith("paceline: rank 0 lost the others at update")
        assert "Traceback" not in both[0].err


def test_a_stopped_first_rank_ends_all_with_a_result(tmp_path: Path) -> None:
    with ranks(tmp_path, "--strategy", "local:2", "--epochs", "500") as both:
        wait_for_records(tmp_path / "runs/it", 20)
        os.kill(both[0].process.pid, signal.SIGTERM)
        assert [command.finish() for command in both] == [130, 130], both[0].err + both[1].err
    assert result_of(tmp_path / "runs/it")["status"] == "stopped"
    assert replays(tmp_path / "runs/it")


def test_ranks_with_a_codec_stay_near_those_without(tmp_path: Path) -> None:
    losses, sent = {}, {}
    for codec in ("none", "lowrank:4"):
        with ranks(tmp_path, "--strategy", "allreduce", "--codec", codec, "--steps", "60", "--lr", "0.05") as both:
            assert [command.finish() for command in both] == [0, 0], both[0].err + both[1].err
        result = result_of(tmp_path / "runs/it")
        losses[codec], sent[codec] = result["train_loss"], result["bytes_pushed"]
        shutil.move(tmp_path / "runs/it", tmp_path / f"runs/{codec}")
    assert losses["none"] < 2.0
    assert sent["none"] > 10 * sent["lowrank:4"]
    assert losses["lowrank:4"] != losses["none"]
    assert losses["lowrank:4"] == pytest.approx(losses["none"], abs=0.3)
    with pytest.raises(UserError, match="used --codec lowrank:4 on a ring"):
        replays(tmp_path / "runs/lowrank:4")


@contextlib.contextmanager
def tasks(cwd: Path, *arguments: str) -> Iterator[list[Command]]:
    """Two processes of one command, as Slurm's srun would start them."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Command("train", *SAMPLE, *arguments, cwd=cwd, environment={
                    "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0", "SLURM_JOB_ID": "71",
                    "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
                    "SLURM_STEP_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "1",
                })
            )
            for task in range(2)
        ]  # fmt: skip


@pytest.mark.parametrize(("launch", "tls"), [(ranks, ["--tls"]), (tasks, [])])
def test_the_first_rank_serves_the_others(tmp_path: Path, launch: Any, tls: list[str]) -> None:
    with launch(tmp_path, "--strategy", "async", "--steps", "20", "--score", "none", *tls) as both:
        assert [command.finish() for command in both] == [0, 0], both[0].err + both[1].err
        assert "started 2 processes (world size 2): rank 0 serves 1 worker\n" in both[0].err
        assert not both[1].out and not both[1].err
        assert ("TLS: workers may check --fingerprint sha256:" in both[0].err) == bool(tls)
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["workers"], result["updates"]) == ("finished", 1, 20)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["it"]


def test_what_stops_the_first_task_is_told_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "runs/it").mkdir(parents=True)
    with tasks(tmp_path, "--strategy", "sync") as both:
        assert [command.finish() for command in both] == [2, 1]
    assert both[1].err.startswith("paceline: rank 0, which serves, failed: runs/it exists already")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["it"]
