"""A worker whose code raises an exception or makes a mistake, which ends the run, and how the user is told of it."""

from __future__ import annotations

import linecache
import re
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from paceline.config import RunConfig, is_script
from paceline.errors import PacelineError, RunFailed, ServerLost, UserError
from paceline.interfaces import Report
from paceline.runs.folder import RunFolder

MAX_SAID, MAX_NOTES, MAX_TRACEBACK = 200, 400, 20_000  # characters of an exception in one line, and its traceback
COMPLAINT = "complaint"  # the kind of notice about a process that ends with an error of ours
SAME_SECONDS = 0.3  # how long to wait for other workers that fail in the same way
NO_GROUP = (
    "; Paceline starts the workers and averages: leave out init_process_group, DistributedDataParallel and sampler"
)
_HINTS = {
    "environment variable RANK expected": NO_GROUP,
    "process group has not been initialized": (
        "; Paceline makes none: leave this call out; session.worker is the rank, session.num_workers the world size"
    ),
    "EOF when reading a line": "; workers have no standard input: give the script arguments",
}
"""What the exceptions of a script that is not made for workers say, and what to add to them."""
_OURS = str(Path(__file__).parents[2])
_FRAME = re.compile(r'^ +File "(.*?)", line (\d+)', re.MULTILINE)
_LAST_FRAME = re.compile(r'^ +File ".*\n(?: +.*\n)*', re.MULTILINE)
_OUR_FRAME = re.compile(rf'^  File "{re.escape(_OURS)}/.*\n(?:    .*\n)*', re.MULTILINE)
_OF_LOADER = "\nOriginal Traceback (most recent call last):\n"  # before what a process of a DataLoader raised


class RaisedException(NamedTuple):
    """An exception as one process tells it to another: in one line, and with its traceback."""

    text: str
    traceback: str


def describe_exception(error: BaseException) -> RaisedException:
    """Describe an exception of a user's code: its traceback begins with the first frame that is neither ours nor
    runpy's, and has none of ours between; one that calls sys.exit(...) needs none.

    One that comes from a process of a DataLoader is described as it was raised there.
    """
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error.__cause__, StopIteration) and any(_is_internal(frame.filename) for frame in innermost):
        error = error.__cause__  # it is the user's, and the generator that must not raise it is ours
    begin, shows_ours = error.__traceback__, False
    while begin is not None and begin.tb_next is not None and _is_internal(begin.tb_frame.f_code.co_filename):
        begin = begin.tb_next
    if begin is not None and _is_internal(begin.tb_frame.f_code.co_filename):
        begin, shows_ours = error.__traceback__, True  # the user's code has no frame in it: show all
    what = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    place = _place(error, begin)
    _, is_of_loader, inner = what.partition(_OF_LOADER)
    if is_of_loader:
        what = _LAST_FRAME.split(inner)[-1].strip()
        place = _innermost([(name, int(line)) for name, line in _FRAME.findall(inner)]) or place
    text = f"{' '.join(what.split()).removesuffix(':')[:MAX_SAID]}{place}"
    text += "".join(f"; {note}" for note in getattr(error, "__notes__", ()))[:MAX_NOTES]
    text += next((hint for sign, hint in _HINTS.items() if sign in what), "")
    shown = "".join(traceback.format_exception(type(error), error, begin)) if not isinstance(error, SystemExit) else ""
    return RaisedException(text, (shown if shows_ours else _OUR_FRAME.sub("", shown))[-MAX_TRACEBACK:])


def _place(error: BaseException, begin: TracebackType | None) -> str:
    """Name the innermost line of the user's own code: not that of a library which it called."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    return _innermost([(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(begin)])


def _innermost(frames: list[tuple[str, int]]) -> str:
    own = [(name, line) for name, line in frames if not _is_library(name) and linecache.getline(name, line)]
    name, line = (own or frames or [("", 0)])[-1]
    return f" ({Path(name).name}, line {line})" if name else ""


def _is_internal(name: str) -> bool:
    return name.startswith(f"{_OURS}/") or "runpy" in name or name.startswith("<frozen ")


def _is_library(name: str) -> bool:
    return _is_internal(name) or "site-packages" in name or "/lib/python3" in name


class WorkerFailures:
    """The processes of a run that raised an exception or a UserError: the first ends it, others may fail alike."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        self._late: WorkerFailures | None = None  # those since the run was told to stop
        self._deadline = 0.0
        self.is_told = False

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, name: str, notice: dict[str, Any]) -> None:
        """Take the notice of a process that raised an exception or a UserError."""
        self._deadline = self._deadline or time.monotonic() + SAME_SECONDS
        self._found.setdefault(name, notice)

    def stop_by_user(self) -> None:
        """The user has told the run to stop: what fails from now on is mentioned at its end, and no failure of it."""
        if not self._found and self._late is None:
            self._late = WorkerFailures()

    def is_late(self, notice: dict[str, Any] | None) -> bool:
        """Whether there is a notice, and it came after the user told the run to stop."""
        return self._late is not None and notice is not None

    def add_late(self, name: str, notice: dict[str, Any]) -> None:
        """Take the notice of a worker that came after that."""
        assert self._late is not None
        self._late.add(name, notice)

    @property
    def seconds_left(self) -> float | None:
        """How long to wait for further failures; None if there is none yet, or the user was told."""
        return max(0.0, self._deadline - time.monotonic()) if self._found and not self.is_told else None

    @property
    def line(self) -> str:
        """What happened, in one line.

        >>> failures = WorkerFailures()
        >>> failures.add("worker 1 of 3", {"text": "ValueError: no (train.py, line 7)", "traceback": "..."})
        >>> failures.line
        'worker 1 of 3: ValueError: no (train.py, line 7)'
        >>> failures.add("worker 0 of 3", {"text": "ValueError: no (train.py, line 7)", "traceback": "..."})
        >>> failures.line
        'worker 1 of 3: ValueError: no (train.py, line 7); and 1 other worker: the same'
        """
        name, first = next(iter(self._found.items()))
        same = sum(one["text"] == first["text"] for one in self._found.values()) - 1
        others = f"; and {same} other worker{'s' * (same > 1)}: the same" if same else ""
        return f"{name}: {first['text']}{others}"

    def tell(self, report: Report) -> None:
        """Show the traceback of the first failure, and one line for each that is another."""
        self.is_told = True
        (_, first), *others = self._found.items()
        different = [f"{name}: {one['text']}" for name, one in others if one["text"] != first["text"]]
        for line in [*first["traceback"].rstrip().splitlines(), *different]:
            report({"kind": "output", "stream": "stderr", "text": line})

    def end(self, folder: RunFolder, report: Report) -> None:
        """At the end of the run: raise its error if there was a failure, else mention those that came after a stop."""
        if self._found:
            if not self.is_told:
                self.tell(report)
            raise self.error(folder)
        if self._late:
            report({"kind": "note", "text": f"{self._late.line}: the run had been told to stop, and is saved"})

    def error(self, folder: RunFolder) -> PacelineError:
        """The error that ends the run, which says what the user can do."""
        result = folder.result()
        if folder.is_unstarted() and next(iter(self._found.values())).get("kind") == COMPLAINT:
            return UserError(self.line)
        if folder.is_unstarted():
            end = "nothing was trained"
        elif result is not None and result["status"] == "finished":
            end = f"training had finished, and {folder.path} is complete"
        else:
            end = folder.stopped_hint(result)
        return RunFailed(f"{self.line}: {end}")


def lost_server(what: str, folder: RunFolder, config: RunConfig) -> RunFailed:
    """The error for a server that is gone, and `what` became of it; the run can be resumed if training had begun."""
    if not folder.has_log:
        hint = "os._exit(...) in the task leaves none" if "exit code 0" in what else ""
        return RunFailed(f"{what} before training began: see the lines above{'; ' * bool(hint)}{hint}")
    hint = folder.resume_hint(config)
    if is_script(config) and not config.durable:  # only the script can compute its pushes
        return ServerLost(what, hint, "pushes since its newest checkpoint are lost (--durable keeps them)")
    return ServerLost(what, hint)
