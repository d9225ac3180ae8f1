"""Follows runs while somebody looks: what has changed in their folders, encoded once for all who watch.

A source knows where runs lie; the follower asks it at most twice a second, and seldom enough to stay unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from paceline.analysis.listing import newest_folders
from paceline.analysis.status import RunStatus, Standing, read_standing
from paceline.errors import PacelineError, UserError
from paceline.reports.report_data import RunReader
from paceline.reports.watch.mirror import Mirror

LOOK_SECONDS, LATEST_SECONDS = 0.5, 1.0
"""Between two looks: at least, and at most unless looking itself takes long."""
LIGHT_SHARE, MOST_SHARE = 0.005, 0.05
"""Of one core, that looking takes where a second between looks allows it; and that it never exceeds."""
SCAN_SECONDS = 10.0
"""How often a folder is searched for new runs when its own date says nothing; just after it changed, at every look."""
SETTLING_SECONDS = 3.0
IDLE_SECONDS = 2.0
"""How often a run that has ended is looked at: somebody may resume it."""
MOST_RUNS = 30
"""Of a folder that are followed, the newest."""
GONE = "the run folder was removed: this is what was last read"


class Source(Protocol):
    """Where runs are looked for: a run folder, a folder of them, or a server on another machine."""

    title: str
    one: bool
    """Whether a single run was asked for."""

    def look(self) -> dict[str, dict[str, Any] | None]:
        """The digests that have changed since the last look, by the run's name; None for one not followed any more."""
        ...

    def standings(self) -> list[Standing]:
        """How every run stands now, the newest first."""
        ...


class _Followed:
    """One run folder, from its first look to its removal and perhaps its return."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: RunReader | None = None
        self._digest: dict[str, Any] = {}
        self._next = 0.0

    def look(self, now: float) -> dict[str, Any] | None:
        """Its digest, if that has changed."""
        if now < self._next:
            return None
        try:
            return self._read(now)
        except (OSError, UserError):
            if (self.path / "config.toml").exists():
                return None  # read while it was being removed or made: the next look will tell
            was_there, self._reader = self._reader is not None, None
            return {**self._digest, **_ended(self._digest)} if was_there and self._digest else None

    def _read(self, now: float) -> dict[str, Any] | None:
        if self._reader is None:
            self._reader = RunReader(self.path)
        self._reader.folder.config_file.stat()
        if not self._reader.refresh():
            return None
        self._digest = self._reader.digest()
        self._next = now + (0.0 if self._digest["going_on"] else IDLE_SECONDS)
        return self._digest


def _ended(digest: dict[str, Any]) -> dict[str, Any]:
    """What is to be said otherwise of a run whose folder is gone; one that comes back is read anew."""
    status = "removed" if digest["going_on"] else digest["status"]
    return {"notes": [*digest["notes"], GONE], "going_on": False, "status": status}


class FolderSource:
    """A run folder, or all runs below a folder with the newest first."""

    def __init__(self, path: Path) -> None:
        self.title = str(path)
        self._path = path
        self.one = (path / "config.toml").is_file()
        self._followed = {found: _Followed(found) for found in self._find()}
        self._changed, self._scanned, self._settled = self._date(), time.monotonic(), 0.0
        if not self._followed:
            raise UserError(_no_run(path))

    def look(self) -> dict[str, dict[str, Any] | None]:
        now = time.monotonic()
        left = [] if self.one else self._search(now)
        looks = {str(path): followed.look(now) for path, followed in self._followed.items()}
        changed = {run: digest for run, digest in looks.items() if digest is not None}
        return {**changed, **{str(path): None for path in left}}

    def standings(self) -> list[Standing]:
        found = []
        for path in self._find():
            with contextlib.suppress(UserError, OSError):  # damaged, or removed since
                found.append(read_standing(path))
        return found

    def _find(self) -> list[Path]:
        return [self._path] if self.one else newest_folders(self._path)[:MOST_RUNS]

    def _date(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return 0.0

    def _search(self, now: float) -> list[Path]:
        """Follow new runs, as soon as the folder's date says that something came, else now and then (in folders below).

        Returns those that newer ones have crowded out; one that was removed stays, as it was last seen.
        """
        if (date := self._date()) != self._changed:
            self._changed, self._settled = date, now + SETTLING_SECONDS
        if now >= self._settled and now < self._scanned + SCAN_SECONDS:
            return []
        self._scanned, found = now, self._find()
        for path in found:
            self._followed.setdefault(path, _Followed(path))
        left = [path for path in self._followed if path not in found][: max(0, len(self._followed) - MOST_RUNS)]
        for path in left:
            del self._followed[path]
        return left


def _no_run(path: Path) -> str:
    if path.is_dir():
        return f"{path} is no run folder and holds none: give runs/NAME, or a folder of runs"
    return f"{path} does not exist: give a run folder as in runs/NAME, a folder of runs, or HOST:PORT of a server"


class Follower:
    """Keeps the latest digest of every run as JSON, each with the number of the look that brought it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.life = secrets.token_hex(4)
        """Told apart from an earlier follower's numbers by whoever comes back."""
        self._latest: dict[str, tuple[int, bytes]] = {}
        self._number = 0
        self._watchers = 0
        self._closed = False
        self._looking = threading.Lock()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open, the source is looked at."""
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
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def look(self) -> float:
        """Look once; the seconds of one core that it took."""
        with self._looking:
            began = time.thread_time()
            found = {run: encode(digest) if digest else b"" for run, digest in self.source.look().items()}
            spent = time.thread_time() - began
        if found:
            with self._changed:
                self._number += 1
                self._latest |= {run: (self._number, text) for run, text in found.items()}
                self._latest = {run: (number, text) for run, (number, text) in self._latest.items() if text}
                self._changed.notify_all()
        return spent

    def now(self) -> tuple[int, bytes]:
        """The number of the latest look that brought something, and all digests as a JSON list."""
        with self._changed:
            return self._number, self._list(0)

    def after(self, number: int, seconds: float) -> tuple[int, bytes] | None:
        """What has come since look `number`, waited for so long; None when nothing did, or when all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self._closed, seconds)
            return (self._number, self._list(number)) if self._number > number and not self._closed else None

    def _list(self, number: int) -> bytes:
        return b"[" + b",".join(text for at, text in self._latest.values() if at > number) + b"]"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watchers > 0 or self._closed)
            if self._closed:
                return
            pause = pause_after(self.look())
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)


def pause_after(spent: float) -> float:
    """How long not to look after a look that took so many seconds of a core.

    >>> [round(pause_after(spent), 3) for spent in (0.001, 0.004, 0.02, 0.15)]
    [0.5, 0.8, 1.0, 3.0]
    """
    return max(min(max(LOOK_SECONDS, spent / LIGHT_SHARE), LATEST_SECONDS), spent / MOST_SHARE)


def encode(value: Any) -> bytes:
    """JSON that any browser reads: on one line, and null for what is no number.

    >>> encode({"loss": [0.5, float("nan")]})
    b'{"loss":[0.5,null]}'
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


AGAIN_SECONDS = 3.0
"""How often a server that answers no more is looked for."""


LOST = "unreachable"


class ServedRun:
    """Keeps the copy in step whenever somebody looks; a server that is gone is said, and what was last seen stays."""

    one = True

    def __init__(self, mirror: Mirror) -> None:
        mirror.refresh()
        self.title = f"{mirror.run} at {mirror.address}"
        self._mirror, self._copy = mirror, FolderSource(mirror.folder.path)
        self._lock = threading.Lock()
        self._next = 0.0
        self._loss: str | None = None

    def look(self) -> dict[str, dict[str, Any] | None]:
        with self._lock:
            self._refresh()
            found = list(self._copy.look().values())
        return {self.title: self._told(found[0])} if found and found[0] is not None else {}

    def standings(self) -> list[Standing]:
        with self._lock:
            self._refresh()
            return [Standing(self._stood(status), events) for status, events in self._copy.standings()]

    def _refresh(self) -> None:
        """Ask for what is new, of a server that is gone only now and then; the copy's lock goes with it."""
        if time.monotonic() < self._next:
            return
        try:
            self._mirror.refresh()
            self._loss = None
        except (PacelineError, OSError) as error:
            self._next = time.monotonic() + AGAIN_SECONDS
            self._loss = None if self._mirror.folder.result_file.exists() else str(error)

    def _told(self, digest: dict[str, Any]) -> dict[str, Any]:
        """With the run's own folder wherever the copy's is named."""
        text = json.dumps(digest).replace(
            json.dumps(str(self._mirror.folder.path))[1:-1], json.dumps(self._mirror.run)[1:-1]
        )
        told: dict[str, Any] = {**json.loads(text), "id": self.title, "name": Path(self._mirror.run).name}
        if self._loss is not None:
            told |= {"status": LOST, "going_on": False, "notes": [*told["notes"], self._loss]}
        return told

    def _stood(self, status: RunStatus) -> RunStatus:
        named = dataclasses.replace(status, run=self.title)
        return named if self._loss is None else dataclasses.replace(named, status=LOST, reason=self._loss)
