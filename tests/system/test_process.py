"""What a helper process imports: our package and the user's folders, never the current folder by accident."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.system.process import helper_command, helper_environment, safe_path

ROOT = str(Path(paceline.__file__).parents[1])


def search_path() -> list[str]:
    return helper_environment()["PYTHONPATH"].split(os.pathsep)


@pytest.mark.parametrize("entry", ["", "here"])
def test_the_current_folder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if entry else "", "/elsewhere"])
    assert search_path() == ["/elsewhere", ROOT]


def test_the_current_folder_stays_if_the_user_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), ROOT])
    assert search_path() == [str(tmp_path), ROOT]


def test_a_helper_ignores_a_module_in_the_folder_it_starts_in(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('foreign')")
    command, environment = helper_command("paceline", "--version"), helper_environment()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("paceline "), done.stderr


def test_a_library_starts_interpreters_without_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('foreign')")
    command, before = [sys.executable, "-c", "import json"], dict(os.environ)
    with safe_path():
        assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert os.environ == before
