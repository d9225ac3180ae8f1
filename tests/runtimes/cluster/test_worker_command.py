"""The command that a worker of a script starts again with: it says what the worker was started with."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import cluster
from paceline.runtimes.cluster import join
from paceline.runtimes.cluster.join import worker_flags
from paceline.runtimes.scripts.remote.worker import WorkerCommand, work_in_processes
from paceline.transports.auth import ConnectOptions
from tests.support.waiting import until

CHANGED: dict[str, Any] = {
    "connect": "10.0.0.1:29500",
    "tls": True,
    "fingerprint": "sha256:00",
    "ca": "ca.pem",
    "patience": 12.5,
    "threads": 3,
    "script": "elsewhere/train.py",
}
LEFT_OUT = {
    "token_file": "the token is in the environment",
    "worker": "each process has its own number",
    "overlap": "each process is one worker",
    "data_dir": "refused for a script",
    "device": "refused for a script",
    "weights": "refused for a script",
}


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> ConnectOptions:
    """What `paceline worker` makes of its flags."""
    seen: list[ConnectOptions] = []
    monkeypatch.setattr(join, "join_server", lambda options, console: seen.append(options) or True)
    assert cluster.worker_verb(words) == 0
    return seen[0]


def test_every_option_is_passed_on_or_left_out_for_a_reason() -> None:
    """A new option of `paceline worker` must be in one of the two."""
    names = {field.name for field in dataclasses.fields(ConnectOptions)}
    assert names == CHANGED.keys() | LEFT_OUT.keys() and not CHANGED.keys() & LEFT_OUT.keys()


@pytest.mark.parametrize("without", [(), ("fingerprint",), ("ca",), ("fingerprint", "ca"), ("threads", "script")])
@pytest.mark.parametrize("tls", [True, False, None])
def test_the_flags_are_parsed_to_the_same_options(
    without: tuple[str, ...], tls: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: value for name, value in CHANGED.items() if name not in without} | {"tls": tls}
    if "fingerprint" in given or "ca" in given:
        given["tls"] = True  # these flags imply it
    options = ConnectOptions(**given)
    assert parsed(worker_flags(options), monkeypatch) == options


def test_the_token_is_in_the_environment_and_not_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = WorkerCommand.of(worker_flags(ConnectOptions("10.0.0.1:1", token_file="secret")), b"the token")
    assert command.environment["PACELINE_TOKEN"] == "the token"
    assert not any("token" in word or "secret" in word for word in command.line)


@pytest.mark.real
def test_workers_beside_each_other_leave_together(tmp_path: Path) -> None:
    """A SIGTERM of their parent reaches all of them, so that each can leave after its push."""
    child = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('left' + sys.argv[-1]).touch(), sys.exit(130)))\n"
        "pathlib.Path('here' + sys.argv[-1]).touch()\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "child.py").write_text(child)
    line, environment = [sys.executable, str(tmp_path / "child.py")], dict(os.environ)
    parent = (
        "from paceline.runtimes.scripts.remote.worker import WorkerCommand, work_in_processes\n"
        f"work_in_processes(WorkerCommand({line!r}, {str(tmp_path)!r}, {environment!r}), [0, 1])\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL) as process:
        until(lambda: all((tmp_path / f"here{n}").exists() for n in range(2)), "both workers")
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    assert all((tmp_path / f"left{n}").exists() for n in range(2)) and process.returncode != 0


@pytest.mark.real
@pytest.mark.parametrize(("codes", "expected"), [((0, 0), True), ((0, 2), False)])
def test_all_of_them_must_succeed(tmp_path: Path, codes: tuple[int, int], expected: bool) -> None:
    line = [sys.executable, "-c", f"import sys; sys.exit({codes!r}[int(sys.argv[-1])])"]
    assert work_in_processes(WorkerCommand(line, str(tmp_path), dict(os.environ)), [0, 1]) is expected
