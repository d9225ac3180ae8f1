"""What a command imports before it answers: a help text or a mistake needs neither numpy nor torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "numpy", "rich", "ray", "http", "asyncio", "unittest", "doctest", "importlib.metadata"}
OF_SETTINGS = {"argparse", "dataclasses", "inspect", "json", "tomllib", "pathlib", "difflib", "subprocess", "shutil"}
NETWORK = {"ssl", "socket", "multiprocessing", "email"}
CASES = {
    "--help": HEAVY | OF_SETTINGS | NETWORK,
    "help": HEAVY | OF_SETTINGS | NETWORK,
    "train --help": HEAVY | NETWORK,
    "help run": HEAVY | NETWORK,
    "train --wokers 2": HEAVY | NETWORK,
    "server --help": HEAVY | NETWORK,
    "simulate --help": HEAVY | NETWORK,
    "sweep --help": HEAVY | NETWORK,
    "report --help": HEAVY | NETWORK,
    "compare --help": HEAVY | NETWORK,
    "list .": HEAVY,
}


@pytest.mark.parametrize("command", CASES)
def test_a_quick_command_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "paceline", *command.split()]
    run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "paceline.cli.main" in imported and run.returncode in (0, 2)
    assert not imported & CASES[command]
