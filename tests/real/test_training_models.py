"""The larger models through the command line: trained by real processes, their running statistics saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.assembly.core import make_model
from tests.support.commands import result_of, run


@pytest.mark.parametrize("model", ["resnet18", "inception-28-small"])
def test_two_steps_of_sync_by_two_workers(tmp_path: Path, small_files: Path, model: str) -> None:
    small = ("--dataset", "fashion-mnist", "--data-dir", str(small_files), "--batch-size", "8", "--score", "none")
    pace = ("--strategy", "sync", "--workers", "2", "--steps", "2", "--name", "it")
    command = run("train", *small, *pace, "--model", model, cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["updates"], result["status"], result["model"]) == (2, "finished", model)
    trained = make_model(model, (1, 28, 28), 10)
    statistics = trained.state_dict()["stem.norm.running_mean"].clone()
    trained.load_state_dict(load_file(tmp_path / "runs/it/weights.safetensors"))
    assert not torch.equal(trained.state_dict()["stem.norm.running_mean"], statistics)
    assert torch.isfinite(trained.eval()(torch.randn(2, 1, 28, 28))).all()


def test_batch_norm_on_split_labels_warns_in_one_line_and_names_group_norm(tmp_path: Path, small_files: Path) -> None:
    small = ("--dataset", "fashion-mnist", "--data-dir", str(small_files), "--batch-size", "4", "--split", "labels")
    small += ("--score", "none")
    pace = ("--strategy", "sync", "--workers", "2", "--steps", "1")
    for model, warned in (("resnet18", 1), ("resnet18-gn", 0)):
        command = run("train", *small, *pace, "--model", model, "--name", model, cwd=tmp_path)
        assert command.process.returncode == 0, command.err
        lines = [line for line in command.err.splitlines() if "batch norm" in line]
        assert len(lines) == warned and all("--model resnet18-gn" in line for line in lines), command.err
