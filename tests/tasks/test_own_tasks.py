"""A user's own task is found by the name it was given under."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.assembly.task import load_task
from paceline.errors import UserError

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


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("training=data", "unknown argument of paceline.Task 'training': did you mean 'train'"),
        ("", r"TypeError: paceline.Task\(...\) missing 1 required positional argument: 'train'"),
    ],
)
def test_a_wrong_argument_of_a_task_is_named_as_the_user_writes_it(written: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong_argument.py"
    path.write_text(SOURCE.replace("train=data", written))
    with pytest.raises(UserError, match=said) as caught:
        load_task(f"{path}:build")
    assert "SupervisedTask" not in str(caught.value)
