"""What a hostile reviewer once broke."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import Command, result_of, run, wait_for_records
from tests.support.waiting import until

SAMPLE = ("--dataset", "fashion-mnist-sample", "--name", "it")
SCRIPT = """
import sys, torch, paceline
x = torch.randn(640, 4); y = (x[:, 0] > 0).long()
with paceline.join() as session:
    width = 6 if session.worker == 0 else int(sys.argv[1])
    net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
    net, batches = session.prepare(net, (x, y), batch_size=16)
    for a, b in batches:
        torch.nn.functional.cross_entropy(net(a), b).backward()
        session.step()
        if len(sys.argv) > 2:
            session.step()
"""


def test_a_run_that_is_still_going_on_cannot_be_resumed(tmp_path: Path) -> None:
    with Command("train", *SAMPLE, "--epochs", "100", cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 30)
        second = run("resume", "runs/it", cwd=tmp_path)
        assert second.process.returncode == 2
        assert "runs/it is still being trained by another command" in second.err
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.finish() == 130


def test_the_sample_that_stood_in_for_the_whole_set_is_named_in_the_config(tmp_path: Path) -> None:
    nowhere = {"PACELINE_SYSTEM_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PACELINE_DATA": ""}
    arguments = ("train", "--strategy", "classic", "--steps", "3", "--name", "it")
    with Command(*arguments, cwd=tmp_path, environment=nowhere) as command:
        assert command.finish() == 0, command.err
    assert 'dataset = "fashion-mnist-sample"' in (tmp_path / "runs/it/config.toml").read_text()


def test_a_finished_run_of_an_own_loop_has_nothing_to_resume_and_keeps_its_result(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    assert run("run", "-n", "2", "--epochs", "1", "--name", "it", "loop.py", "6", cwd=tmp_path).process.returncode == 0
    assert result_of(tmp_path / "runs/it")["batch_size"] == 16
    assert result_of(tmp_path / "runs/it")["dataset"] is None
    command = run("resume", "runs/it", cwd=tmp_path)
    assert command.process.returncode == 2 and "there is nothing to resume" in command.err
    assert result_of(tmp_path / "runs/it")["status"] == "finished"


def test_a_worker_that_brings_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    command = run("run", "-n", "2", "--epochs", "1", "--name", "it", "loop.py", "8", cwd=tmp_path)
    assert command.process.returncode == 2 and "has 58 parameters, worker" in command.err


def test_two_steps_for_one_batch_are_two_steps(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    command = run("run", "-n", "2", "--epochs", "1", "--name", "it", "loop.py", "6", "twice", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    assert result_of(tmp_path / "runs/it")["status"] == "finished"


def test_a_build_that_fails_is_one_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def build():\n    raise ValueError('no data today')\n")
    command = run("train", "--task", "task.py:build", "--strategy", "async", cwd=tmp_path)
    assert command.process.returncode == 2
    assert "cannot be built: ValueError: no data today (task.py, line 2)" in command.err
    assert "Traceback" not in command.err and not list(tmp_path.glob("runs/*"))


def test_a_delay_is_slept_before_every_push_of_a_script(tmp_path: Path) -> None:
    """The script keeps what it is told to sleep, and does not sleep: one delay for each of its pushes."""
    first = "import time; slept = []; time.sleep = slept.append\n"
    last = "    session.report(delays=slept.count(0.2))\n"
    (tmp_path / "loop.py").write_text(first + SCRIPT + last)
    command = run("run", "-n", "2", "--steps", "6", "--delay", "200ms", "--name", "it", "loop.py", "6", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    reported = result_of(tmp_path / "runs/it")["reported"]
    assert sum(each["delays"] for each in reported.values()) >= 6


def has_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return False


PHASES: dict[str, Callable[[Command], bool]] = {
    "Python has started": lambda command: True,
    "the run folder exists": lambda command: (command.cwd / "runs/it").exists(),
    "another process has started": lambda command: len(command.family()) > 1,
    "another process loads torch": lambda command: any(map(has_torch, command.family())),
}
"""How far the command has come, each seen from outside."""


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_while_starting_leaves_nothing_or_a_run_that_says_it_was_stopped(tmp_path: Path, phase: str) -> None:
    with Command("train", *SAMPLE, "--epochs", "100", cwd=tmp_path) as command:
        until(lambda: PHASES[phase](command), phase)
        os.kill(command.process.pid, signal.SIGTERM)
        before_python_could_say_more = -signal.SIGTERM
        assert command.finish() in (130, before_python_could_say_more)
        assert "Traceback" not in command.err
    assert not (tmp_path / "runs/it").exists() or result_of(tmp_path / "runs/it")["status"] == "stopped"


def test_two_tasks_of_one_name_are_two(tmp_path: Path) -> None:
    source = """
import torch, paceline
def build():
    x = torch.randn(64, 8)
    return paceline.Task(torch.nn.Linear(8, 1, bias=BIAS), torch.nn.functional.mse_loss, train=(x, x[:, :1]))
"""
    for name, bias in (("one", "True"), ("two", "False")):
        (tmp_path / f"{name}.py").write_text(source.replace("BIAS", bias))
    code = """
import paceline
for name in ("one", "two"):
    print(paceline.train(f"{name}.py:build", strategy="classic", steps=2, name=name)["num_parameters"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["9", "8"], done.stderr
