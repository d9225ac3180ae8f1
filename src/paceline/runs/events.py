"""`events.jsonl`: what happened, one typed row a line, appended and flushed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


class EventLog:
    """Appends rows; `now` is the training clock, which stands still while nobody trains."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # end the row a crash cut off

    def write(self, kind: str, now: float, **fields: Any) -> None:
        """One row, on disk when this returns."""
        self._file.write(json.dumps({"kind": kind, "now": round(now, 6), **fields}).encode() + b"\n")

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
    for line in path.read_bytes().split(b"\n"):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        yield row
