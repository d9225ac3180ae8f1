"""What the processes of a run import: torch only in the fork server and its children, no compiler but for scripts."""

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


def test_the_workers_of_a_script_share_what_an_optimizer_imports(tmp_path: Path) -> None:
    """Else each of them imports it by itself: of 4 workers on 2 cores, that was two thirds of the start."""
    lines = [
        "import sys",
        "before = set(sys.modules)",
        "import paceline, torch",
        "model = torch.nn.Linear(1, 1)",
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        "print(sorted(name for name in {*sys.modules} - before if name.startswith('torch.')))",
        "session = paceline.join()",
        "model, optimizer, loader = session.prepare(model, optimizer, torch.randn(8, 1), batch_size=4, steps=2)",
        "for x in loader:",
        "    optimizer.zero_grad()",
        "    model(x).mean().backward()",
        "    optimizer.step()",
        "session.finish()",
    ]
    (tmp_path / "loop.py").write_text("\n".join(lines))
    words = [sys.executable, "-m", "paceline", "run", "-n", "1", "loop.py"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert run.stdout.splitlines()[0].endswith("[]"), run.stdout
