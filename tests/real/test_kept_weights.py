"""Snapshots of real runs: the same set after a SIGKILL, equal to what replay saves, and of your own loop too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from paceline.reports.console import Console
from paceline.studies.replay import replay
from tests.support.commands import Command, replays, run, wait_for_records

SAMPLE = ("train", "--dataset", "fashion-mnist-sample", "--seed", "3", "--steps", "160", "--checkpoint-every", "0.2")
SAMPLE += ("--score", "none")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "snapshots").iterdir()}


def test_a_killed_and_resumed_run_has_the_snapshots_of_one_that_was_not(tmp_path: Path) -> None:
    arguments = (*SAMPLE, "--strategy", "sync", "--workers", "2", "--threads", "1", "--snapshots", "25")
    whole = run(*arguments, "--name", "whole", cwd=tmp_path)
    assert whole.process.returncode == 0, whole.err
    with Command(*arguments, "--name", "killed", cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/killed", 120)
        os.killpg(command.process.pid, signal.SIGKILL)
        command.finish()
    assert not (tmp_path / "runs/killed/result.json").exists()
    resumed = run("resume", "runs/killed", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert contents(tmp_path / "runs/killed") == contents(tmp_path / "runs/whole")
    rows = json.loads((tmp_path / "runs/killed/snapshots/index.json").read_text())["snapshots"]
    assert rows[0]["version"] == 0 and rows[-1]["version"] == 160 and len(rows) > 8
    assert replays(tmp_path / "runs/killed")


@pytest.mark.parametrize("strategy", ["async", "backup:1"])
def test_a_snapshot_is_what_replay_saves_for_that_update(tmp_path: Path, strategy: str) -> None:
    arguments = ("--strategy", strategy, "--workers", "2", "--snapshots", "5", "--name", "it")
    trained = run(*SAMPLE, *arguments, cwd=tmp_path)
    assert trained.process.returncode == 0, trained.err
    rows = json.loads((tmp_path / "runs/it/snapshots/index.json").read_text())["snapshots"]
    version = rows[len(rows) // 2]["version"]
    with Console() as console:
        again = replay(tmp_path / "runs/it", console, version, tmp_path / "there.safetensors")
    assert again["first_departure"] is None
    ours = load_file(tmp_path / f"runs/it/snapshots/{version:012d}.safetensors")
    theirs = load_file(tmp_path / "there.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(equal(ours[name], theirs[name]) for name in ours)


def test_your_own_loop_keeps_them_too(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples/own_loop.py"
    ran = run("run", "-n", "2", "--epochs", "1", "--snapshots", "2", "--name", "it", str(script), cwd=tmp_path)
    assert ran.process.returncode == 0, ran.err
    rows = json.loads((tmp_path / "runs/it/snapshots/index.json").read_text())["snapshots"]
    assert [round(row["epochs"], 1) for row in rows] == [0.0, 0.5, 1.0]
    last, weights = f"runs/it/snapshots/{rows[-1]['version']:012d}.safetensors", "runs/it/weights.safetensors"
    ours, theirs = load_file(tmp_path / last), load_file(tmp_path / weights)
    assert ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
