"""Hosts over ssh, with an ssh that stays on this machine: they are looked at, started, heard, and seen to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Command, result_of, started_by, wait_for_records
from tests.support.fake_ssh import install_fake_ssh
from tests.support.waiting import until

SAMPLE = ("--dataset", "fashion-mnist-sample", "--strategy", "async", "--name", "it", "--batch-size", "100")
TOKEN = "a-token-that-no-ps-shows"


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    return install_fake_ssh(tmp_path)


def write_hosts(folder: Path, *lines: str) -> None:
    (folder / "hosts").write_text("\n".join(lines))


def wait_until_none(log: str) -> None:
    until(lambda: not started_by(log), lambda: f"the end of {started_by(log)}")


def test_every_host_that_fails_has_its_line_and_nothing_is_started(tmp_path: Path, ssh: dict[str, str]) -> None:
    write_hosts(
        tmp_path, "anna@changed", "stranger", "closed", "far", "old", "good python=/nowhere/python", "localhost"
    )
    with Command("train", *SAMPLE, "--hosts", "hosts", cwd=tmp_path, environment=ssh) as command:
        assert command.finish() == 2
    said = command.err.splitlines()
    for expected in (
        "anna@changed: its host key has changed: find out why before you trust it, then 'ssh-keygen -R changed'",
        "stranger: its host key is not known here: 'ssh stranger' once by hand, and compare it",
        "closed: no ssh server listens there: start it, or give port=N",
        "far: it cannot be reached within 10 s: is it on, and its name right?",
        "good: there is no Python at /nowhere/python: write python=PATH on its line",
    ):
        assert expected in said
    assert any(line.startswith("old: it has paceline 0.0.9, this machine ") for line in said)
    assert said[-1].startswith("paceline: 6 hosts of 7 cannot take part (see above), nothing was started")
    assert not (tmp_path / "runs").exists()
    assert "tethered" not in Path(ssh["FAKE_SSH_LOG"]).read_text()


def test_hosts_train_until_ctrl_c_and_leave_nobody_behind(tmp_path: Path, ssh: dict[str, str]) -> None:
    write_hosts(tmp_path, "anna@node1 threads=1", "stranger workers=3", "localhost threads=1")
    arguments = ("train", *SAMPLE, "--hosts", "hosts", "--skip-failed", "--epochs", "500", "--score", "none")
    with Command(*arguments, cwd=tmp_path, environment={**ssh, "PACELINE_TOKEN": TOKEN}) as command:
        wait_for_records(tmp_path / "runs/it", 20)
        commands = " ".join(started_by(ssh["FAKE_SSH_LOG"]).values())
        os.kill(command.process.pid, signal.SIGINT)
        assert command.finish() == 130, command.err
    wait_until_none(ssh["FAKE_SSH_LOG"])
    assert "paceline.cli.ssh_worker worker --connect 127.0.0.1:" in commands
    assert "--worker 0 --threads 1" in commands and "--worker 1 --threads 1" in commands
    assert TOKEN not in commands and TOKEN not in Path(ssh["FAKE_SSH_LOG"]).read_text()
    assert "[anna@node1, worker 0] worker 0 of 2: async" in command.err
    assert "[localhost, worker 1] worker 1 of 2: async" in command.err
    assert "stranger: its host key is not known here" in command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["workers"]) == ("stopped", 2)


def test_a_worker_ends_when_whoever_started_it_is_gone() -> None:
    """Whatever the reason, even SIGKILL: its standard input closes."""
    words = ["-m", "paceline.cli.ssh_worker", "worker", "--connect", "127.0.0.1:9", "--patience", "100"]
    with subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(f"{TOKEN}\n")
        process.stdin.flush()
        command = Path(f"/proc/{process.pid}/cmdline").read_text()
        process.stdin.close()
        assert process.wait(30) in (130, -signal.SIGTERM)
    assert TOKEN not in command
