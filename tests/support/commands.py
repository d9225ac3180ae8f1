"""Runs `paceline` as a user would, in a process of its own, and watches what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.cli.main import main
from paceline.reports.console import Console
from paceline.runs.arrival_log import RECORD_BYTES
from paceline.studies.replay import describe, replay
from tests.support.waiting import PATIENCE, until

GIVING_WAY = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Tests run side by side: a thread that waits must not keep the core from another test's."""


def _listen_to_interrupts() -> None:
    """As in a terminal, even where the tests themselves were started in the background and ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """One `paceline ...` process with all its descendants; use it as a context manager so that none outlives a test."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        environment: dict[str, str] | None = None,
        stderr: int = subprocess.PIPE,
        module: str = "paceline",
    ) -> None:
        self.cwd = cwd
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env={**os.environ, **GIVING_WAY, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            preexec_fn=_listen_to_interrupts,
        )
        self.out = self.err = ""

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *details: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def finish(self, seconds: float = PATIENCE) -> int:
        """Wait for the end; returns the exit code."""
        self.out, self.err = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def family(self) -> dict[int, str]:
        """Every process of this command's session that is alive, by pid, with its command line.

        A process without one has given its memory back and is about to be gone.
        """
        alive = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    command = (entry / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
                if int(fields[3]) == self.process.pid and fields[0] != "Z" and command:
                    alive[int(entry.name)] = command
        return alive

    def forked(self) -> list[int]:
        """Server and workers, in the order they were forked: the server first."""
        fork_server, largest = self.fork_server(), int(Path("/proc/sys/kernel/pid_max").read_text())
        forked = [pid for pid in self.family() if _parent(pid) == fork_server]
        return sorted(forked, key=lambda pid: (pid - fork_server) % largest)  # process ids begin again at the largest

    def fork_server(self) -> int:
        """The process that forks the others."""
        return next(pid for pid in self.family() if _parent(pid) == self.process.pid)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def run(*arguments: str, cwd: Path, seconds: float = PATIENCE, environment: dict[str, str] | None = None) -> Command:
    """Run to the end."""
    with Command(*arguments, cwd=cwd, environment=environment) as command:
        command.finish(seconds)
    return command


def simulate(*arguments: str) -> None:
    """Run `paceline simulate` in this process, where torch is imported already."""
    assert main(["simulate", *arguments]) == 0


def started_by(mark: str) -> dict[int, str]:
    """The command lines of all living processes that have this text in their environment, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def wait_for_records(folder: Path, count: int, seconds: float = PATIENCE) -> None:
    """Until the run's log holds at least `count` records."""
    log = folder / "arrivals.log"
    until(lambda: log.exists() and log.stat().st_size > count * RECORD_BYTES, f"{count} records of {folder}", seconds)


def wait_for_more_records(folder: Path, count: int) -> None:
    """Until the run's log holds `count` records more than now."""
    wait_for_records(folder, (folder / "arrivals.log").stat().st_size // RECORD_BYTES + count)


def wait_until_gone(command: Command) -> None:
    """Until no process of the command is left."""
    until(lambda: not command.family(), lambda: f"the end of {command.family()}")


def replays(folder: Path) -> bool:
    """Whether a run's log gives its weights again, bit for bit; in this process, where torch is imported already."""
    with Console() as console:
        outcome = replay(folder, console)
    if not outcome["identical"]:
        print("\n".join(describe(outcome)))
    return outcome["identical"] is True


def result_of(folder: Path) -> dict[str, Any]:
    """The run's result."""
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded
