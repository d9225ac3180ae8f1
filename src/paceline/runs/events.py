"""`events.jsonl`: what happened, one typed row a line, appended and flushed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


class EventLog:
    """Appends rows; `now` is the training clock, which stands still while nobody trains."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

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
    """The rows that are whole; a row cut off by a crash ends the reading."""
    for line in path.read_bytes().split(b"\n"):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:
            return
        yield row
