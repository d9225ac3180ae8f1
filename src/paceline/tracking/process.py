"""Trackers beside a run that goes on, each in a process of its own: none can slow the run, or break it.

`python -m paceline.tracking.process FOLDER NAME` is such a process. It follows the run's event file until whoever
started it ends, or asks it to come to an end (SIGTERM).
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

PATIENCE_SECONDS = 15.0
"""That a tracker may take for the rest after the run's end."""
HURRY_SECONDS = 2.0
SILENT_SECONDS = 1.0
"""Of waiting, before it is said."""
NICENESS = 10


class Beside(NamedTuple):
    """One tracker's process, and the file that has whatever it printed."""

    name: str
    process: subprocess.Popen[bytes]
    said: Path


class Trackers:
    """The trackers of one run, for its host."""

    def __init__(self, names: list[str], folder: RunFolder, report: Callable[[dict[str, Any]], None]) -> None:
        self._folder, self._report = folder, report
        self._running: list[Beside] = []
        for name in dict.fromkeys(names):
            try:
                self._running.append(self._start(name))
            except OSError as error:
                self._note(f"tracker {name} could not be started ({error.strerror})", name)

    def _start(self, name: str) -> Beside:
        said = self._folder.path / f"track-{re.sub('[^A-Za-z0-9.]+', '-', name).strip('-.')}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "paceline.tracking.process", str(self._folder.path), name, str(os.getpid())]
        with said.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which then tells its trackers how it ended
            )
        return Beside(name, process, said)

    def look(self) -> None:
        """Say once of each that has ended before the run."""
        for one in [one for one in self._running if one.process.poll() is not None]:
            self._running.remove(one)
            self._settle(one)

    def end(self, hurry: bool = False) -> None:
        """After the run's result is there: give them time for the rest, then end those that are not done."""
        limit = HURRY_SECONDS if hurry else PATIENCE_SECONDS
        until = time.monotonic() + limit
        for one in self._running:
            if not _ends_by(one, min(until, time.monotonic() + SILENT_SECONDS)):
                self._report({"kind": "note", "text": f"waiting for tracker {one.name}, {limit:g} s at most"})
            if not _ends_by(one, until):
                one.process.kill()
                one.process.wait()
                self._note(f"tracker {one.name} was not done {limit:g} s after the run's end, and was ended", one.name)
            else:
                self._settle(one)
        self._running = []

    def close(self) -> None:
        """The host goes, with a result or without one."""
        for one in self._running:
            one.process.terminate()
        self.end(hurry=True)

    def _settle(self, one: Beside) -> None:
        """Of a process that has ended: nothing, or why it could not go on."""
        text = ""
        with contextlib.suppress(OSError):
            text = one.said.read_text(errors="replace").strip()
        if one.process.returncode:
            last = text.splitlines()[-1] if text else f"it ended with code {one.process.returncode}"
            self._note(last.removeprefix("paceline: "), one.name)
        elif not text:
            with contextlib.suppress(OSError):
                one.said.unlink()

    def _note(self, what: str, name: str) -> None:
        later = f"the run is not touched by that, and 'paceline export {self._folder.path} --to {name}' tells it all"
        self._report({"kind": "note", "text": f"{what}; {later}"})


def _ends_by(one: Beside, until: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(max(0.0, until - time.monotonic()))
    return one.process.returncode is not None


def main(path: str, name: str, parent: str) -> int:
    """Follow the run for one tracker; a line on standard error says what went wrong."""
    from paceline.tracking.feed import feed
    from paceline.tracking.registry import make_tracker

    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    os.nice(NICENESS)
    folder = RunFolder(Path(path))
    fcntl.flock(1, fcntl.LOCK_EX)  # of a server that was killed: its tracker comes to an end first
    os.truncate(1, 0)

    def goes_on() -> bool:
        return not ended and os.getppid() == int(parent) and not folder.result_file.exists()

    try:
        feed(folder, name, make_tracker(name), goes_on)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
