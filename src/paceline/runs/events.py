"""`events.jsonl`: events of a run, one typed JSON row per line, appended and flushed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.system.strict_json import to_json

CHUNK_BYTES = 1 << 20


class EventLog:
    """Appends rows; `now` is the training clock, which stands still while no worker trains."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # terminate a row that a crash cut off

    def write(self, kind: str, now: float, **fields: Any) -> int:
        """Write one row to the file and return its number of bytes."""
        row = to_json({"kind": kind, "now": round(now, 6), **fields}).encode() + b"\n"
        self._file.write(row)
        return len(row)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Return the complete rows; skip one that a crash cut off."""
    return _whole_rows(path.read_bytes().split(b"\n"))


class LineReader:
    """Reads a file that may still grow: each call returns the complete lines added since the last."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.rest = b""  # bytes after the last complete line: still being written, or cut off

    def read(self) -> Iterator[list[bytes]]:
        """Yield the new complete lines in batches; a partial line comes with a later call."""
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
    """Reads events from a file that may still grow: each call returns the rows added since the last."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new complete rows."""
        for lines in self._lines.read():
            yield from _whole_rows(lines)


def read_tail(path: Path, nbytes: int) -> list[dict[str, Any]]:
    """Return the complete rows among the last `nbytes` of a file that may be long and still growing."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - nbytes)
        file.seek(begin)
        lines = file.read().split(b"\n")
    return list(_whole_rows(lines[1:] if begin else lines))


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if it is not a JSON object."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _whole_rows(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    return (row for line in lines if (row := parse_row(line)) is not None)
