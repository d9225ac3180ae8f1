"""Rules on real processes: trained with averaging, replayed to the same bits, resumed after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from safetensors.torch import load_file
from torch import equal

from tests.support.commands import Command, replays, result_of, run, wait_for_records

SAMPLE = ("train", "--dataset", "fashion-mnist-sample", "--workers", "2", "--threads", "1", "--split", "labels")
SAMPLE += ("--score", "none")


def test_a_rule_trains_on_processes_and_replays_to_the_same_bits(tmp_path: Path) -> None:
    trained = run(*SAMPLE, "--strategy", "async", "--rule", "gap", "--epochs", "0.5", "--name", "it", cwd=tmp_path)
    assert trained.process.returncode == 0, trained.err
    result = result_of(tmp_path / "runs/it")
    assert (result["rule"], result["average"], result["status"]) == ("gap", "on", "finished")
    assert "starved" in trained.err + trained.out, "a damping rule on split labels is warned of"
    ours, live = (load_file(tmp_path / f"runs/it/{name}.safetensors") for name in ("weights", "live"))
    assert ours.keys() == live.keys() and not any(equal(ours[name], live[name]) for name in ours)
    assert replays(tmp_path / "runs/it")


def test_a_killed_run_with_foresight_resumes_and_replays(tmp_path: Path) -> None:
    arguments = (*SAMPLE, "--rule", "foresight-cached", "--steps", "260", "--checkpoint-every", "0.3", "--name", "it")
    with Command(*arguments, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 150)
        os.killpg(command.process.pid, signal.SIGKILL)
        command.finish()
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert result_of(tmp_path / "runs/it")["updates"] == 260
    assert replays(tmp_path / "runs/it")
