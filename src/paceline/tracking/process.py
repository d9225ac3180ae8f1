"""Runs each tracker of a run in its own process, so that none can slow down or break the run.

`python -m paceline.tracking.process FOLDER NAME PID` follows the run until its result, the end of its parent
PID, or SIGTERM.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.runs.folder import RunFolder
from paceline.system.process import helper_command, helper_environment

FINISH_SECONDS = 15.0  # time for a tracker to finish after the run's end
CLOSE_SECONDS = 2.0
NOTICE_SECONDS = 1.0  # waiting time before a note is shown
NICENESS = 10


class TrackerProcess(NamedTuple):
    """One tracker's process, and the file with its output."""

    name: str
    process: subprocess.Popen[bytes]
    output_file: Path


class Trackers:
    """The tracker processes of one run, for its host."""

    def __init__(self, names: list[str], folder: RunFolder, report: Callable[[dict[str, Any]], None]) -> None:
        self._folder, self._report = folder, report
        self._running: list[TrackerProcess] = []
        for name in dict.fromkeys(names):
            try:
                self._running.append(self._start(name))
            except OSError as error:
                self._note(f"tracker {name} could not be started ({error.strerror})", name)

    def _start(self, name: str) -> TrackerProcess:
        output_file = self._folder.path / f"track-{re.sub('[^A-Za-z0-9.]+', '-', name).strip('-.')}.log"
        command = helper_command("paceline.tracking.process", str(self._folder.path), name, str(os.getpid()))
        with output_file.open("ab") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            # In its own session: Ctrl-C is for the run, which then ends its trackers.
            process = subprocess.Popen(command, env=helper_environment(), start_new_session=True, **streams)
        return TrackerProcess(name, process, output_file)

    def poll(self) -> None:
        """Report, once, each tracker that ended before the run."""
        for one in [one for one in self._running if one.process.poll() is not None]:
            self._running.remove(one)
            self._report_exit(one)

    def end(self, hurry: bool = False) -> None:
        """After the result is written: let the trackers finish, then kill those that take too long."""
        limit = CLOSE_SECONDS if hurry else FINISH_SECONDS
        until = time.monotonic() + limit
        for one in self._running:
            if not _ends_by(one, min(until, time.monotonic() + NOTICE_SECONDS)):
                self._report({"kind": "note", "text": f"waiting at most {limit:g} s for tracker {one.name}"})
            if not _ends_by(one, until):
                one.process.kill()
                one.process.wait()
                self._note(f"tracker {one.name} did not finish within {limit:g} s of the run's end: killed", one.name)
            else:
                self._report_exit(one)
        self._running = []

    def close(self) -> None:
        """Terminate the trackers: the host exits, with or without a result."""
        for one in self._running:
            one.process.terminate()
        self.end(hurry=True)

    def _report_exit(self, one: TrackerProcess) -> None:
        """Report why an ended process failed; delete an empty output file."""
        text = ""
        with contextlib.suppress(OSError):
            text = one.output_file.read_text(errors="replace").strip()
        if one.process.returncode:
            last = text.splitlines()[-1] if text else f"it exited with code {one.process.returncode}"
            self._note(last.removeprefix("paceline: "), one.name)
        elif not text:
            with contextlib.suppress(OSError):
                one.output_file.unlink()

    def _note(self, what: str, name: str) -> None:
        remedy = f"the run is not affected; 'paceline export {self._folder.path} --to {name}' exports all of it"
        self._report({"kind": "note", "text": f"{what}; {remedy}"})


def _ends_by(one: TrackerProcess, until: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(max(0.0, until - time.monotonic()))
    return one.process.returncode is not None


def main(path: str, name: str, parent: str) -> int:
    """Follow the run for one tracker; print errors on standard error."""
    from paceline.tracking.feed import feed
    from paceline.tracking.registry import make_tracker

    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    os.nice(NICENESS)
    folder = RunFolder(Path(path))
    fcntl.flock(1, fcntl.LOCK_EX)  # wait for the tracker of a killed server to end
    os.truncate(1, 0)

    def is_running() -> bool:
        return not ended and os.getppid() == int(parent) and not folder.result_file.exists()

    try:
        feed(folder, name, make_tracker(name), is_running)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
