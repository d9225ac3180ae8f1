"""Codecs between real processes: the weights of the simulator, and a killed server that goes on from its middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.commands import Command, replays, result_of, run, wait_for_records

FLAGS = ["--dataset", "fashion-mnist-sample", "--threads", "1", "--codec", "lowrank:4", "--pull-codec", "int8"]


def test_real_sync_with_codecs_equals_the_simulated_one(tmp_path: Path) -> None:
    flags = [*FLAGS, "--strategy", "sync", "--workers", "2", "--steps", "12", "--runs", str(tmp_path)]
    assert run("train", *flags, "--name", "real", cwd=tmp_path).process.returncode == 0
    run("simulate", *flags, "--name", "simulated", "--speeds", "lognormal:1s,1", "--link", "10mbit,1ms", cwd=tmp_path)
    real, simulated = result_of(tmp_path / "real"), result_of(tmp_path / "simulated")
    for name in ("weights_sha256", "test_accuracy", "bytes_pushed", "bytes_pulled"):
        assert simulated[name] == real[name], name


def test_a_killed_server_goes_on_with_every_workers_codec_memory(tmp_path: Path) -> None:
    """Resumed from a checkpoint in its middle, the run is what its whole log says, bit for bit."""
    arguments = ("--strategy", "async", "--workers", "2", "--steps", "400", "--checkpoint-every", "0.1")
    with Command("train", *FLAGS, "--name", "it", *arguments, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 200)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 1
    assert list((tmp_path / "runs/it/checkpoints").glob("0*"))
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert "since checkpoint" in resumed.err
    assert result_of(tmp_path / "runs/it")["updates"] == 400
    assert replays(tmp_path / "runs/it")
