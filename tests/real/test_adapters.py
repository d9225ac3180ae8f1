"""Adapters beside a frozen model: only they travel, the base keeps its bits, and what is saved loads again."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import replays, result_of, run, simulate

LORA = Path(__file__).parents[2] / "examples/lora.py"


@pytest.fixture(scope="module")
def lora() -> dict[str, Any]:
    """The names of the example, which trains nothing when it is imported."""
    return runpy.run_path(str(LORA), run_name="lora")


def check(folder: Path, lora: dict[str, Any], num_pushes: int) -> None:
    """The bytes of all pushes are those of the adapters, and everything else is as it was."""
    torch.set_num_threads(1)
    begun = lora["with_adapters"](lora["pretrained"]())
    adapters = {name: p for name, p in begun.named_parameters() if p.requires_grad}
    nbytes = sum(p.numel() * p.element_size() for p in adapters.values())
    result = result_of(folder)
    assert result["bytes_pushed"] == nbytes * num_pushes
    assert result["num_parameters"] == sum(p.numel() for p in adapters.values())
    saved = load_file(folder / "weights.safetensors")
    for name, tensor in begun.state_dict().items():
        assert torch.equal(saved[name], tensor) == (name not in adapters), name
    begun.load_state_dict(saved, strict=True)
    whole = sum(p.numel() * p.element_size() for p in begun.parameters())
    assert 24 < whole / nbytes < 25  # the ratio that the docs name


def test_the_example_sends_only_adapters(tmp_path: Path, lora: dict[str, Any]) -> None:
    done = run("run", "-n", "2", "--strategy", "sync", "--runs", "runs", "--name", "it", str(LORA), cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert "2,560 of 63,632 parameters were trained and sent" in done.out
    result = result_of(tmp_path / "runs/it")
    check(tmp_path / "runs/it", lora, 2 * result["updates"] + result["late_pushes"])
    assert result["reported"]["0"]["test_loss"] < 0.1
    runs = ("--runs", str(tmp_path / "runs"), "--threads", "1")
    began = ("--weights", str(tmp_path / "runs/it/weights.safetensors"), "--lr", "1e-30", "--average", "none")
    simulate("--task", f"{LORA}:build", *began, *runs, "--steps", "1", "--score", "none", "--name", "again")
    first, again = (load_file(tmp_path / "runs" / name / "weights.safetensors") for name in ("it", "again"))
    assert {name: torch.equal(first[name], tensor) for name, tensor in again.items()} == dict.fromkeys(first, True)


def test_a_task_with_frozen_parameters_sends_only_the_others(tmp_path: Path, lora: dict[str, Any]) -> None:
    flags = ("--task", f"{LORA}:build", "--threads", "1", "--optimizer", "adamw", "--lr", "0.01", "--strategy", "sync")
    simulate(*flags, "--steps", "6", "--score", "none", "--runs", str(tmp_path), "--name", "it")
    result = result_of(tmp_path / "it")
    check(tmp_path / "it", lora, 2 * result["updates"] + result["late_pushes"])
    assert replays(tmp_path / "it")
