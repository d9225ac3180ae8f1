"""What the processes of a run import: torch only in the fork server and its children, and there no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton", "numpy.testing"}

pytestmark = pytest.mark.real


def test_the_process_of_the_command_does_not_import_torch(tmp_path: Path) -> None:
    flags = ["--strategy", "sync", "--steps", "2", "--dataset", "fashion-mnist-sample", "--score", "none"]
    words = [sys.executable, "-X", "importtime", "-m", "paceline", "train", *flags]
    run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    assert "paceline.runtimes.local.supervisor" in imported and "torch" not in imported


def test_the_fork_server_imports_torch_but_no_compiler() -> None:
    lines = [
        "import sys, importlib",
        "from paceline.runtimes.local.fork_server import PRELOADED",
        "[importlib.import_module(name) for name in PRELOADED]",
        f"print(*({COMPILERS!r} & set(sys.modules)), 'torch' in sys.modules)",
    ]
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]
