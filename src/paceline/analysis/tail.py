"""Follows the two files a run appends to; skips and reports incomplete and damaged parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.runs.arrival_log import MAGIC, RECORD_BYTES, RESUME_KIND
from paceline.runs.events import LineReader, RowParser

RECORDS = np.dtype(
    [("kind", "u1"), ("verdict", "u1"), ("worker", "<u2")]
    + [(name, "<u4") for name in ("incarnation", "seq", "reply", "samples")]
    + [("loss", "<f4"), ("now", "<f8"), ("check", "<u4")]
)
"""A record of `arrivals.log` as a numpy dtype."""
CHUNK_BYTES = RECORD_BYTES << 18
MAX_ROWS_PER_READ = {b'{"kind": "progress': 2000, b'{"kind": "workers"': 500, b'{"kind": "evaluati': 2000}
"""Rows per kind and read; the rest are skipped evenly. No push is lost: the log has them all, and accounts are sums."""
Records = NDArray[Any]


class EventFollower:
    """Follows `events.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._lines, self._parser = LineReader(path), RowParser(path)

    def read(self) -> list[dict[str, Any]]:
        """Return the rows added since the last call."""
        lines = [line for some in self._lines.read() for line in some]
        return self._parser.parse(lines, _skipped_rows(lines))

    def notes(self, going_on: bool) -> list[str]:
        """Return sentences about unreadable parts."""
        notes, rest_nbytes, path = self._parser.notes(), len(self._lines.rest), self._parser.path
        if rest_nbytes and not going_on:
            rest = f"the last {rest_nbytes:,} bytes are an incomplete row and are ignored"
            notes.append(f"{path.name} is cut off after row {self._parser.rows:,}: {rest}")
        return notes


def _skipped_rows(lines: list[bytes]) -> set[int]:
    """Return the indices of rows to skip in kinds with very many; never the first or last of a kind."""
    places: dict[bytes, list[int]] = {start: [] for start in MAX_ROWS_PER_READ}
    if len(lines) > min(MAX_ROWS_PER_READ.values()):
        for place, line in enumerate(lines):
            if line[:18] in places and line.endswith(b"}"):
                places[line[:18]].append(place)
    skipped: set[int] = set()
    for start, found in places.items():
        stride = max(1, -(-len(found) // MAX_ROWS_PER_READ[start]))
        skipped |= set(found) - set(found[::stride]) - set(found[-1:])
    return skipped


class ArrivalFollower:
    """Follows `arrivals.log` as numpy columns; leaves out records that a resume undid, even if read earlier."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: str | None = None
        self.torn = 0
        self.undone: list[tuple[int, int]] = []  # index ranges of undone records
        self._header = self._offset = 0
        self._foreign = False

    def read(self, on_records: Callable[[Records], None], on_undo: Callable[[], None]) -> bool:
        """Pass new records to `on_records`; call `on_undo` first if records passed earlier were undone.

        After `on_undo`, all effective records are passed again. Returns whether there was anything new.
        """
        try:
            size = self.path.stat().st_size
            if not self._begin():
                return False
        except FileNotFoundError:
            return False
        changed = False
        self.torn = (size - self._header) % RECORD_BYTES
        while self._offset + RECORD_BYTES <= size:
            records, num_read = self._next()
            if self._undo(records):
                on_undo()
                self._offset = self._header
                continue
            first = (self._offset - self._header) // RECORD_BYTES
            if len(records):
                changed = True
                on_records(records[self._effective(first, len(records))])
            self._offset += len(records) * RECORD_BYTES
            if len(records) < num_read:
                behind = (size - self._offset) // RECORD_BYTES
                self.damaged = f"is damaged at byte {self._offset:,}: the {behind:,} records after it are ignored"
                break
        return changed

    def _begin(self) -> bool:
        """Return whether the log has a header of this format."""
        if not self._header:
            with self.path.open("rb") as file:
                line = file.readline(200)
            self._header = self._offset = len(line) if line.endswith(b"\n") else 0
            self._foreign = bool(line) and not line.startswith(MAGIC[: len(line)])
        self.damaged = "is not a log of this version and is ignored" if self._foreign else None
        return bool(self._header) and not self._foreign

    def _next(self) -> tuple[Records, int]:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read(CHUNK_BYTES)
        num_read = len(content) // RECORD_BYTES
        raw = np.frombuffer(content, np.uint8, num_read * RECORD_BYTES).reshape(num_read, RECORD_BYTES)
        whole = checksums(raw[:, :-4]) == raw[:, -4:].copy().view("<u4")[:, 0]
        return np.frombuffer(content, RECORDS, num_read if whole.all() else int(np.argmin(whole))), num_read

    def _undo(self, records: Records) -> bool:
        """Store which records the resumes in `records` undo; return whether any were passed on before."""
        first, again = (self._offset - self._header) // RECORD_BYTES, False
        for place in np.flatnonzero((records["kind"] == RESUME_KIND) & (records["seq"] > 0)):
            end = first + int(place)
            span = (max(0, end - int(records["seq"][place])), end)
            if span not in self.undone:
                self.undone.append(span)
                again |= span[0] < first
        return again

    def _effective(self, first: int, count: int) -> NDArray[np.bool_]:
        kept = np.ones(count, bool)
        for begin, end in self.undone:
            kept[max(0, begin - first) : max(0, end - first)] = False
        return kept

    def notes(self, going_on: bool) -> list[str]:
        """Return sentences about unreadable and undone records."""
        notes = [f"{self.path.name} {self.damaged}"] if self.damaged is not None else []
        if self.torn and not going_on and self.damaged is None:
            notes.append(f"{self.path.name} ends in a torn record of {self.torn} bytes, which is ignored")
        undone = sum(end - begin for begin, end in self.undone)
        if undone:
            notes.append(f"{undone:,} records of {self.path.name} were undone when the run resumed from a checkpoint")
        return notes


def checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the CRC-32 of each row, all rows at once.

    >>> import zlib
    >>> int(checksums(np.frombuffer(b"paceline", np.uint8)[None])[0]) == zlib.crc32(b"paceline")
    True
    """
    found = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        found = _TABLE[(found ^ column) & 0xFF] ^ (found >> np.uint32(8))
    return found ^ np.uint32(0xFFFFFFFF)


def _table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0xEDB88320) ^ (table >> np.uint32(1)), table >> np.uint32(1))
    return table.astype(np.uint32)


_TABLE = _table()
