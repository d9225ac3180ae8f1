"""Writes files that survive a crash: whole or not at all, synced; large ones in the background; entries in segments."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_ENTRY = struct.Struct("<QI")  # in front of an entry of a segment: its length and checksum
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


class SegmentWriter:
    """Appends entries to files `NAME-NUMBER.bin` of a folder: to one after another, so that old ones can be removed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._fd: int | None = None
        self._nbytes = 0

    def begin(self, number: int) -> None:
        """Go on in a new segment; what was appended before is synced."""
        self.close(sync=True)
        while (path := self._folder / f"{self._name}-{number:012d}.bin").exists():
            number += 1
        self._fd, self._nbytes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 0
        sync_folder(self._folder)

    def append(self, parts: Sequence[memoryview]) -> None:
        """Append one entry, or nothing if the disk is full, and hand it to the operating system."""
        assert self._fd is not None, "a segment has begun"
        check = 0
        for part in parts:
            check = zlib.crc32(part, check)
        try:
            for part in (memoryview(_ENTRY.pack(sum(map(len, parts)), check)), *parts):
                while part:
                    part = part[os.write(self._fd, part) :]
        except OSError:
            os.truncate(self._fd, self._nbytes)
            raise
        self._nbytes += _ENTRY.size + sum(map(len, parts))

    def sync(self) -> None:
        """Block until all entries are on disk."""
        if self._fd is not None:
            os.fdatasync(self._fd)

    def remove_before(self, number: int) -> None:
        """Remove the segments whose numbers are below `number`."""
        for path in segments(self._folder, self._name):
            if int(path.stem.rpartition("-")[2]) < number:
                path.unlink(missing_ok=True)

    def close(self, sync: bool = False) -> None:
        """Close the current segment."""
        if self._fd is not None:
            if sync:
                self.sync()
            os.close(self._fd)
            self._fd = None


def segments(folder: Path, name: str) -> list[Path]:
    """The segments of this name, the oldest first."""
    return sorted(path for path in folder.glob(f"{name}-*.bin") if path.stem.rpartition("-")[2].isdecimal())


def read_segment(path: Path) -> Iterator[memoryview]:
    """Yield the intact entries of a segment, which may be larger than the memory; end at a torn one."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file:
        content, at = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), 0
    while at + _ENTRY.size <= len(content):
        nbytes, check = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        entry = content[at : at + nbytes]
        if len(entry) != nbytes or zlib.crc32(entry) != check:
            return
        yield entry
        at += nbytes


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
