"""A user's own task is found by the name it was given under."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.assembly.task import load_task

SOURCE = """
import torch
import paceline

def build():
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    return paceline.Task(torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, train=data)
"""


def test_a_module_in_the_folder_of_the_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `paceline` has its own folder first on the path, not the one it is typed in."""
    (tmp_path / "task_of_a_user.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert load_task("task_of_a_user:build").layout.num_parameters == 6
