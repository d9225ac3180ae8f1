"""A sweep that is stopped keeps what is done and goes on when it is started again."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, Command, replays, result_of, run
from tests.support.waiting import until

pytestmark = pytest.mark.real

GRID = """
[run]
dataset = "fashion-mnist-sample"
strategy = "{strategy}"
workers = 2
steps = {steps}
batch_size = 8

[grid]
seed = [0, 1, 2, 3]
"""


def wait_for_results(folder: Path, count: int) -> None:
    until(lambda: len(list(folder.glob("*/result.json"))) >= count, f"{count} results in {folder}")


@pytest.mark.parametrize(("strategy", "number"), [("async", signal.SIGINT), ("local:2", signal.SIGTERM)])
def test_a_stopped_sweep_goes_on(tmp_path: Path, strategy: str, number: int) -> None:
    (tmp_path / "try.toml").write_text(GRID.format(strategy=strategy, steps=200))
    with Command("sweep", "try.toml", cwd=tmp_path) as command:
        wait_for_results(tmp_path / "runs/try", 1)
        command.process.send_signal(number)
        assert command.finish() == 130
    assert "Traceback" not in command.err and "\x1b" not in command.err
    kept = [path for path in tmp_path.glob("runs/try/*/result.json") if '"finished"' in path.read_text()]
    expected = f"interrupted: {len(kept)} of 4 runs are done and kept in runs/try; run the same command to continue"
    assert command.err.splitlines()[-1] == f"paceline: {expected}"
    made = {path: path.stat().st_mtime_ns for path in kept}
    again = run("sweep", "try.toml", cwd=tmp_path)
    assert again.process.returncode == 0, again.err
    assert f"{len(kept)} of 4 runs are there already" in again.err
    assert {path: path.stat().st_mtime_ns for path in kept} == made
    assert again.out.splitlines()[-1].startswith("best: the only setting: ")


def test_a_fold_is_a_setting_of_any_run(tmp_path: Path) -> None:
    flags = (
        "--dataset",
        "fashion-mnist-sample",
        "--fold",
        "2/5",
        "--steps",
        "20",
        "--workers",
        "2",
        "--name",
        "folded",
    )
    assert run("train", *flags, cwd=tmp_path).process.returncode == 0
    result = result_of(tmp_path / "runs/folded")
    assert (result["train_total"], result["validation_total"], result["test_total"]) == (9600, 2400, None)
    assert replays(tmp_path / "runs/folded")


def test_a_terminal_sees_a_bar(tmp_path: Path) -> None:
    (tmp_path / "try.toml").write_text(GRID.format(strategy="async", steps=30).replace("[0, 1, 2, 3]", "[0, 1]"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", "sweep", "try.toml"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b"".join(iter(lambda: _piece(ours), b""))
    os.close(ours)
    assert process.wait(PATIENCE) == 0
    assert b"of 2 runs done" in seen and b"\x1b[" in seen


def _piece(terminal: int) -> bytes:
    """What comes next; nothing once the other end is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
