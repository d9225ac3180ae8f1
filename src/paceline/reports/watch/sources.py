"""Follows runs for all watchers: a source finds and reads runs; the follower polls it and encodes what changed once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from paceline.analysis.listing import newest_folders
from paceline.analysis.status import RunSnapshot, RunStatus, read_run_snapshot
from paceline.errors import PacelineError, UserError
from paceline.reports.report_data import RunReader
from paceline.reports.watch.mirror import Mirror
from paceline.system.strict_json import to_json

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.5, 1.0
"""Pause between polls: at least, and at most unless a poll itself takes long."""
TARGET_CPU_SHARE, MAX_CPU_SHARE = 0.005, 0.05
"""Share of one core for polling: aimed at if MAX_POLL_SECONDS allows it, and never exceeded."""
SCAN_SECONDS = 10.0
"""Interval of searches for new runs while the folder's date is unchanged; after a change, every poll."""
SETTLING_SECONDS = 3.0
REWRITING_SECONDS = 0.05  # a run that starts rewrites its settings: look again after this long
IDLE_SECONDS = 2.0  # interval of polls of a run that has ended: it may be resumed
MAX_RUNS = 30  # runs of a folder that are followed, the newest
RETRY_SECONDS = 3.0  # interval of attempts to reach a server that no longer answers
UNREACHABLE = "unreachable"
FOLDER_REMOVED = "the run folder was removed: these are the last data read"


class RunSource(Protocol):
    """Runs to watch: a run folder, a folder of runs, or a server on another machine."""

    title: str
    one: bool  # whether it is a single run

    def poll(self) -> dict[str, dict[str, Any] | None]:
        """Return the report data that changed since the last poll, by run; None for a run no longer followed."""
        ...

    def run_snapshots(self) -> list[RunSnapshot]:
        """Return the status and latest events of every run, the newest first."""
        ...


class _Followed:
    """One run folder, which may be removed and come back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: RunReader | None = None
        self._digest: dict[str, Any] = {}
        self._next = 0.0

    def poll(self, now: float) -> dict[str, Any] | None:
        """Return the report data if it changed."""
        if now < self._next:
            return None
        try:
            return self._read(now)
        except (OSError, UserError):
            if (self.path / "config.toml").exists():
                return None  # read while it was being created or removed: the next poll decides
            reader, self._reader, last = self._reader, None, self._digest  # a new folder is read from its start
            if reader is None or not last:
                return None
            status = "removed" if last["going_on"] else last["status"]
            return {**last, "notes": [*last["notes"], FOLDER_REMOVED], "going_on": False, "status": status}

    def _read(self, now: float) -> dict[str, Any] | None:
        if self._reader is None:
            self._reader = RunReader(self.path)
        self._reader.folder.config_file.stat()
        if not self._reader.refresh():
            return None
        self._digest = self._reader.digest()
        self._next = now + (0.0 if self._digest["going_on"] else IDLE_SECONDS)
        return self._digest


class FolderSource:
    """A run folder, or all runs below a folder, the newest first."""

    def __init__(self, path: Path) -> None:
        self.title, self._path = str(path), path
        self.one = (path / "config.toml").is_file()
        self._followed = {found: _Followed(found) for found in self._find()}
        self._changed, self._scanned, self._settled = self._date(), time.monotonic(), 0.0
        if not self._followed:
            raise UserError(_no_run(path))

    def poll(self) -> dict[str, dict[str, Any] | None]:
        now = time.monotonic()
        left = [] if self.one else self._find_new(now)
        looks = {str(path): followed.poll(now) for path, followed in self._followed.items()}
        changed = {run: digest for run, digest in looks.items() if digest is not None}
        return {**changed, **{str(path): None for path in left}}

    def run_snapshots(self) -> list[RunSnapshot]:
        return [snapshot for path in self._find() if (snapshot := _snapshot(path)) is not None]

    def _find(self) -> list[Path]:
        return [self._path] if self.one else newest_folders(self._path)[:MAX_RUNS]

    def _date(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return 0.0

    def _find_new(self, now: float) -> list[Path]:
        """Follow new runs: at once if the folder's date changed, else at intervals (for subfolders).

        Returns the runs that newer ones replaced; a removed run stays, as last read.
        """
        if (date := self._date()) != self._changed:
            self._changed, self._settled = date, now + SETTLING_SECONDS
        if now >= self._settled and now < self._scanned + SCAN_SECONDS:
            return []
        self._scanned, found = now, self._find()
        for path in found:
            self._followed.setdefault(path, _Followed(path))
        left = [path for path in self._followed if path not in found][: max(0, len(self._followed) - MAX_RUNS)]
        for path in left:
            del self._followed[path]
        return left


def _snapshot(path: Path) -> RunSnapshot | None:
    """Return a run's status, `damaged` if its files cannot be read; None if it was removed."""
    try:
        return read_run_snapshot(path)
    except (UserError, OSError):
        if not (path / "config.toml").exists():
            return None
    time.sleep(REWRITING_SECONDS)
    try:
        return read_run_snapshot(path)
    except (UserError, OSError) as error:
        status = RunStatus(str(path), "unknown", "unknown", 1, "damaged", str(error))
        return RunSnapshot(status, []) if (path / "config.toml").exists() else None


def _no_run(path: Path) -> str:
    if path.is_dir():
        return f"{path} is not a run folder and contains none: give runs/NAME, or a folder of runs"
    what = "is a file" if path.exists() else "does not exist"
    return f"{path} {what}: give a run folder as in runs/NAME, a folder of runs, or HOST:PORT of a server"


class RunFollower:
    """Keeps the latest report data of every run as JSON, with the number of the poll that brought it."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.instance = secrets.token_hex(4)
        """Distinguishes event numbers of this follower from those of an earlier one."""
        self._latest: dict[str, tuple[int, bytes]] = {}
        self._number = self._watchers = 0
        self.closed = False
        self._polling, self._changed = threading.Lock(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Poll the source while this context is open."""
        with self._changed:
            self._watchers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def poll(self) -> float:
        """Poll the source once; return the CPU seconds it took."""
        with self._polling:
            began = time.thread_time()
            found = {run: encode(digest) if digest else b"" for run, digest in self.source.poll().items()}
            spent = time.thread_time() - began
        if found:
            with self._changed:
                self._number += 1
                self._latest |= {run: (self._number, text) for run, text in found.items()}
                self._latest = {run: (number, text) for run, (number, text) in self._latest.items() if text}
                self._changed.notify_all()
        return spent

    def now(self) -> tuple[int, bytes]:
        """Return the number of the latest poll with changes, and the data of all runs as a JSON list."""
        with self._changed:
            return self._number, self._list(0)

    def after(self, number: int, seconds: float) -> tuple[int, bytes] | None:
        """Wait at most `seconds` for changes after poll `number`; None if there are none or the follower is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self.closed, seconds)
            return (self._number, self._list(number)) if self._number > number and not self.closed else None

    def _list(self, number: int) -> bytes:
        return b"[" + b",".join(text for at, text in self._latest.values() if at > number) + b"]"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watchers > 0 or self.closed)
            if self.closed:
                return
            pause = pause_after(self.poll())
            with self._changed:
                self._changed.wait_for(lambda: self.closed, pause)


def pause_after(spent: float) -> float:
    """Return the pause after a poll that took this many CPU seconds.

    >>> [round(pause_after(spent), 3) for spent in (0.001, 0.004, 0.02, 0.15)]
    [0.5, 0.8, 1.0, 3.0]
    """
    return max(min(max(MIN_POLL_SECONDS, spent / TARGET_CPU_SHARE), MAX_POLL_SECONDS), spent / MAX_CPU_SHARE)


def encode(value: Any) -> bytes:
    """Return one line of JSON, with null for NaN and infinity.

    >>> encode({"loss": [0.5, float("nan")]})
    b'{"loss":[0.5,null]}'
    """
    return to_json(value, compact=True).encode()


class RemoteRun:
    """A run on another machine, mirrored at each poll; if its server is gone, the last data stay, with a note."""

    one = True

    def __init__(self, mirror: Mirror) -> None:
        mirror.refresh()
        self.title = f"{mirror.run} at {mirror.address}"
        self._mirror, self._copy = mirror, FolderSource(mirror.folder.path)
        self._lock, self._next = threading.Lock(), 0.0
        self._loss: str | None = None

    def poll(self) -> dict[str, dict[str, Any] | None]:
        with self._lock:
            self._refresh()
            found = list(self._copy.poll().values())
        return {self.title: self._with_origin(found[0])} if found and found[0] is not None else {}

    def run_snapshots(self) -> list[RunSnapshot]:
        with self._lock:
            self._refresh()
            return [RunSnapshot(self._with_title(status), events) for status, events in self._copy.run_snapshots()]

    def _refresh(self) -> None:
        """Update the mirror, at intervals if the server is gone."""
        if time.monotonic() < self._next:
            return
        try:
            self._mirror.refresh()
            self._loss = None
        except (PacelineError, OSError) as error:
            self._next = time.monotonic() + RETRY_SECONDS
            self._loss = None if self._mirror.folder.result_file.exists() else str(error)

    def _with_origin(self, digest: dict[str, Any]) -> dict[str, Any]:
        """Return the data with the run's own folder in place of the mirror's."""
        copy, own = (to_json(str(path))[1:-1] for path in (self._mirror.folder.path, self._mirror.run))
        text = to_json(digest).replace(copy, own)
        found: dict[str, Any] = {**json.loads(text), "id": self.title, "name": Path(self._mirror.run).name}
        if self._loss is not None:
            found |= {"status": UNREACHABLE, "going_on": False, "notes": [*found["notes"], self._loss]}
        return found

    def _with_title(self, status: RunStatus) -> RunStatus:
        named = dataclasses.replace(status, run=self.title)
        return named if self._loss is None else dataclasses.replace(named, status=UNREACHABLE, reason=self._loss)
