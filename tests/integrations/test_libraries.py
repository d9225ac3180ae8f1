"""Programs of Lightning, transformers and Accelerate on Paceline's workers, against the real packages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import GIVING_WAY, run

PROGRAM = Path(__file__).parent / "program.py"
NEEDS = {"fabric": "lightning", "trainer": "lightning", "accelerate": "accelerate", "huggingface": "transformers"}
SECONDS = 110.0
pytestmark = pytest.mark.real


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: 'make integrations' runs this test")


@pytest.fixture(params=list(NEEDS))
def library(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    require(NEEDS[name])
    return name


def accumulating(library: str) -> list[str]:
    return [] if library == "fabric" else ["--accumulate", "2"]  # a Fabric loop accumulates by itself


def plain(library: str, *arguments: str, cwd: Path) -> dict[str, torch.Tensor]:
    """The weights of the program without Paceline, or with it and without a run."""
    file = cwd / "plain.safetensors"
    environment = {**os.environ, **GIVING_WAY, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), library, *arguments, "--save", str(file)]
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return load_file(file)


def on_workers(workers: int, library: str, *arguments: str, cwd: Path, flags: tuple[str, ...] = ()) -> Path:
    """Run the program under Paceline; its weights are in worker.safetensors, the run in runs/it."""
    settings = ["--threads", "1", "--runs", str(cwd / "runs"), "--name", "it", *flags]
    script = [str(PROGRAM), library, *arguments, "--save", str(cwd / "worker.safetensors")]
    command = run("run", "-n", str(workers), *settings, *script, cwd=cwd, seconds=SECONDS)
    assert command.process.returncode == 0, command.err
    return cwd / "runs" / "it"


def require_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=tolerance, msg=name)


def test_one_worker_equals_the_plain_program_bit_for_bit(library: str, tmp_path: Path) -> None:
    arguments = ["--clip", "0.5", *accumulating(library)]
    expected = plain(library, *arguments, "--plain", cwd=tmp_path)
    require_close(plain(library, *arguments, cwd=tmp_path), expected, 0.0)
    on_workers(1, library, *arguments, cwd=tmp_path, flags=("--strategy", "sync"))
    require_close(load_file(tmp_path / "worker.safetensors"), expected, 0.0)


def test_two_workers_in_step_equal_one_process_with_both_batches(library: str, tmp_path: Path) -> None:
    arguments = accumulating(library)
    expected = plain(library, *arguments, "--plain", "--batch", "16", cwd=tmp_path)
    folder = on_workers(2, library, *arguments, "--named", "sync", cwd=tmp_path, flags=("--strategy", "sync"))
    found = load_file(tmp_path / "worker.safetensors")
    require_close(found, expected, 1e-6)
    saved = {name.removeprefix("net."): tensor for name, tensor in load_file(folder / "weights.safetensors").items()}
    require_close(found, saved, 0.0)


def test_workers_of_async_replay_identically(library: str, tmp_path: Path) -> None:
    folder = on_workers(2, library, "--clip", "0.5", cwd=tmp_path, flags=("--strategy", "async"))
    again = run("replay", str(folder), cwd=tmp_path, seconds=SECONDS)
    assert again.process.returncode == 0 and "identical to the run" in again.out + again.err


def test_a_killed_worker_goes_on_where_it_was(library: str, tmp_path: Path) -> None:
    expected = plain(library, "--plain", cwd=tmp_path)
    marker = tmp_path / "killed"
    flags = "--strategy", "sync", "--restart-workers", "1"
    on_workers(1, library, "--die", str(marker), cwd=tmp_path, flags=flags)
    assert marker.exists()
    require_close(load_file(tmp_path / "worker.safetensors"), expected, 0.0)


def test_another_strategy_in_the_code_than_in_the_command_is_one_line(library: str, tmp_path: Path) -> None:
    if library == "accelerate":
        pytest.skip("a program of Accelerate calls paceline.join(), which names no strategy")
    command = run("run", "-n", "2", "--strategy", "sync", str(PROGRAM), library, "--named", "async", cwd=tmp_path)
    assert command.process.returncode == 2
    lines = [line for line in command.err.splitlines() if "strategy" in line]
    assert lines and all("names the strategy async, and the run's strategy is sync" in line for line in lines)
    assert "Traceback" not in command.err


def test_metrics_of_all_workers_are_refused_in_one_line(tmp_path: Path) -> None:
    require("lightning")
    command = run("run", "-n", "2", "--strategy", "sync", str(PROGRAM), "trainer", "--sync-dist", cwd=tmp_path)
    assert command.process.returncode == 2
    assert "sync_dist=True) waits for all workers" in command.err and "Traceback" not in command.err


@pytest.mark.parametrize("library", ["fabric", "trainer"])
def test_a_checkpoint_after_the_end_holds_the_optimizers_state(library: str, tmp_path: Path) -> None:
    require("lightning")
    file = tmp_path / "last.ckpt"
    on_workers(2, library, "--checkpoint", str(file), cwd=tmp_path, flags=("--strategy", "sync"))
    saved = torch.load(file, weights_only=True)
    state = saved["optimizer"] if library == "fabric" else saved["optimizer_states"][0]
    assert {float(one["step"]) for one in state["state"].values()} == {12.0}  # 64 samples, 8 a batch, 3 passes, shared


def test_only_worker_0_saves_checkpoints_of_transformers(tmp_path: Path) -> None:
    require("transformers")
    folder = tmp_path / "out"
    on_workers(2, "huggingface", "--checkpoint", str(folder), cwd=tmp_path, flags=("--strategy", "sync"))
    assert sorted(one.name for one in folder.iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    state = torch.load(folder / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert {float(one["step"]) for one in state["state"].values()} == {8.0}


def test_ray_train_places_the_processes_of_a_run_that_replays(tmp_path: Path) -> None:
    require("ray")
    example = Path(__file__).parents[2] / "examples" / "integrations" / "ray_train.py"
    environment = {**os.environ, **GIVING_WAY}
    command = [sys.executable, str(example), "sync"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^test accuracy 9\d\.\d % after 504 updates$", ended.stdout, re.MULTILINE), ended.stdout
    again = run("replay", "runs/ray-sync", cwd=tmp_path, seconds=SECONDS)
    assert again.process.returncode == 0 and "identical to the run" in again.out + again.err
