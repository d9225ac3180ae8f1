"""`events.jsonl`: what happened, one typed row a line, appended and flushed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

CHUNK_BYTES = 1 << 20


class EventLog:
    """Appends rows; `now` is the training clock, which stands still while nobody trains."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # end the row a crash cut off

    def write(self, kind: str, now: float, **fields: Any) -> int:
        """One row, on disk when this returns; how many bytes it took."""
        row = json.dumps({"kind": kind, "now": round(now, 6), **fields}).encode() + b"\n"
        self._file.write(row)
        return len(row)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The rows that are whole; one that a crash cut off is passed over."""
    return _whole_rows(path.read_bytes().split(b"\n"))


class LineReader:
    """Reads a file that may still be written: each time the whole lines that have come since."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.rest = b""
        """Behind the last whole line: being written, or cut off."""

    def read(self) -> Iterator[list[bytes]]:
        """The lines that are new, many at a time; one that is half there comes another time."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._read)
            while chunk := file.read(CHUNK_BYTES):
                self._read += len(chunk)
                *lines, self.rest = (self.rest + chunk).split(b"\n")
                yield lines


class EventReader:
    """The rows of a file that may still be written: each time those that have come since."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)

    def read(self) -> Iterator[dict[str, Any]]:
        """The whole rows that are new."""
        for lines in self._lines.read():
            yield from _whole_rows(lines)


def read_tail(path: Path, nbytes: int) -> list[dict[str, Any]]:
    """The whole rows among the last `nbytes` of the file, which may be long and still be written."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - nbytes)
        file.seek(begin)
        lines = file.read().split(b"\n")
    return list(_whole_rows(lines[1:] if begin else lines))


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds; None for a line that holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _whole_rows(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    return (row for line in lines if (row := parse_row(line)) is not None)
