"""Writes files that survive a crash: whole or not at all, synced; large ones on a background thread, in order."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

MAX_WAITING = 4  # queued jobs, each with a copy of the weights, before `submit` blocks on a slow disk


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file, sync and rename, so that readers and a crash find the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # a signal too
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that files created, renamed or removed in it stay so after a power failure."""
    with opened_folder(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network file systems cannot
                raise


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder, as for a lock or a sync of its entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class BackgroundWriter:
    """Runs jobs in order on a background thread; or inside `submit`, if time is simulated."""

    def __init__(self, background: bool = True) -> None:
        self._thread = ThreadPoolExecutor(1, "paceline-writer") if background else None
        self._waiting: deque[Future[None]] = deque()
        self._failing: dict[str, int | None] = {}
        self._changes: list[tuple[str, OSError | None]] = []

    @property
    def busy(self) -> bool:
        return any(not job.done() for job in self._waiting)

    def submit(self, what: str, job: Callable[[], object]) -> None:
        """Queue a job and return. An OSError is kept for `changes`, under the name `what`."""
        if self._thread is None:
            self._try(what, job)
            return
        while len(self._waiting) >= MAX_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._try, what, job))

    def _try(self, what: str, job: Callable[[], object]) -> None:
        try:
            job()
        except OSError as error:
            if what not in self._failing or self._failing[what] != error.errno:
                self._changes.append((what, error))
            self._failing[what] = error.errno
        else:
            if what in self._failing:
                del self._failing[what]
                self._changes.append((what, None))

    def changes(self) -> list[tuple[str, OSError | None]]:
        """Return, since the last call, each `what` that started to fail (with its error) or works again (None)."""
        found, self._changes = self._changes, []
        return found

    def wait(self) -> None:
        """Block until every job is done."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Wait for all jobs and end the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
