"""The two files a run appends to, read on from where the last look ended: whole rows, whole records.

For whoever looks at a run, while it goes on or after; what is cut off or damaged is left out and told of.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.runs.arrival_log import MAGIC, RECORD_BYTES, RESUME_KIND
from paceline.runs.events import LineReader, parse_row

RECORDS = np.dtype(
    [
        ("kind", "u1"),
        ("verdict", "u1"),
        ("worker", "<u2"),
        ("incarnation", "<u4"),
        ("seq", "<u4"),
        ("reply", "<u4"),
        ("samples", "<u4"),
        ("loss", "<f4"),
        ("now", "<f8"),
        ("check", "<u4"),
    ]
)
"""A record of `arrivals.log`, as numpy sees it."""
CHUNK_BYTES = RECORD_BYTES << 18
MOST_AT_ONCE = {b'{"kind": "progress': 2000, b'{"kind": "workers"': 500, b'{"kind": "evaluati': 2000}
"""Rows that one look takes in; of more, evenly many are passed over: the log has every push, and accounts are sums."""
MOST_NAMED = 5
Records = NDArray[Any]


class EventFollower:
    """`events.jsonl`, row by row."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self.broken: list[int] = []
        """The numbers of rows that are none, counted from 1."""
        self._lines = LineReader(path)

    def read(self) -> list[dict[str, Any]]:
        """The rows since the last look."""
        lines = [line for some in self._lines.read() for line in some]
        found = self._parse(lines)
        self.rows += len(lines)
        return found

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        passed = _passed_over(lines)
        found = []
        for place, line in enumerate(lines):
            if place in passed:
                continue
            row = _row(line)
            if row is not None:
                found.append(row)
            elif line:
                self.broken.append(self.rows + place + 1)
        return found

    def notes(self, going_on: bool) -> list[str]:
        """What could not be read."""
        notes = []
        if self.broken:
            named = ", ".join(f"{number:,}" for number in self.broken[:MOST_NAMED])
            more = f" and {len(self.broken) - MOST_NAMED:,} more" if len(self.broken) > MOST_NAMED else ""
            rows = "row" if len(self.broken) == 1 else "rows"
            notes.append(f"{self.path.name}: {rows} {named}{more} of {self.rows:,} cannot be read and are left out")
        rest_nbytes = len(self._lines.rest)
        if rest_nbytes and not going_on:
            rest = f"the last {rest_nbytes:,} bytes are no whole row and are left out"
            notes.append(f"{self.path.name} is cut off after row {self.rows:,}: {rest}")
        return notes


def _passed_over(lines: list[bytes]) -> set[int]:
    """Places of rows that nobody misses: neither the first nor the last of a kind that has very many."""
    places: dict[bytes, list[int]] = {start: [] for start in MOST_AT_ONCE}
    if len(lines) > min(MOST_AT_ONCE.values()):
        for place, line in enumerate(lines):
            if line[:18] in places and line.endswith(b"}"):
                places[line[:18]].append(place)
    passed: set[int] = set()
    for start, found in places.items():
        stride = max(1, -(-len(found) // MOST_AT_ONCE[start]))
        passed |= set(found) - set(found[::stride]) - set(found[-1:])
    return passed


def _row(line: bytes) -> dict[str, Any] | None:
    row = parse_row(line)
    usable = row is not None and isinstance(row.get("kind"), str) and isinstance(row.get("now"), int | float)
    return row if usable else None


class ArrivalFollower:
    """`arrivals.log`, in columns; what a resume took back is left out, however long ago it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: str | None = None
        self.torn = 0
        self.undone: list[tuple[int, int]] = []
        """Places of records that no longer stand, from and below."""
        self._header = self._offset = 0
        self._foreign = False

    def read(self, take: Callable[[Records], None], forget: Callable[[], None]) -> bool:
        """Hand each piece of what is new to `take`; `forget` first, where what it was given no longer stands."""
        try:
            size = self.path.stat().st_size
            if not self._begin():
                return False
        except FileNotFoundError:
            return False
        changed = False
        self.torn = (size - self._header) % RECORD_BYTES
        while self._offset + RECORD_BYTES <= size:
            records, asked = self._next()
            if self._take_back(records):
                forget()
                self._offset = self._header
                continue
            first = (self._offset - self._header) // RECORD_BYTES
            if len(records):
                changed = True
                take(records[self._standing(first, len(records))])
            self._offset += len(records) * RECORD_BYTES
            if len(records) < asked:
                behind = (size - self._offset) // RECORD_BYTES
                self.damaged = f"is damaged at byte {self._offset:,}: the {behind:,} records from there on are left out"
                break
        return changed

    def _begin(self) -> bool:
        """Whether the log has a header that is ours."""
        if not self._header:
            with self.path.open("rb") as file:
                line = file.readline(200)
            self._header = self._offset = len(line) if line.endswith(b"\n") else 0
            self._foreign = bool(line) and not line.startswith(MAGIC[: len(line)])
        self.damaged = "is no log of this version and is left out" if self._foreign else None
        return bool(self._header) and not self._foreign

    def _next(self) -> tuple[Records, int]:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read(CHUNK_BYTES)
        asked = len(content) // RECORD_BYTES
        raw = np.frombuffer(content, np.uint8, asked * RECORD_BYTES).reshape(asked, RECORD_BYTES)
        whole = checksums(raw[:, :-4]) == raw[:, -4:].copy().view("<u4")[:, 0]
        num_whole = asked if whole.all() else int(np.argmin(whole))
        return np.frombuffer(content, RECORDS, num_whole), asked

    def _take_back(self, records: Records) -> bool:
        """Note what the resumes among these records undo; whether any of that was handed on before."""
        first, again = (self._offset - self._header) // RECORD_BYTES, False
        for place in np.flatnonzero((records["kind"] == RESUME_KIND) & (records["seq"] > 0)):
            end = first + int(place)
            span = (max(0, end - int(records["seq"][place])), end)
            if span not in self.undone:
                self.undone.append(span)
                again |= span[0] < first
        return again

    def _standing(self, first: int, count: int) -> NDArray[np.bool_]:
        kept = np.ones(count, bool)
        for begin, end in self.undone:
            kept[max(0, begin - first) : max(0, end - first)] = False
        return kept

    def notes(self, going_on: bool) -> list[str]:
        """What could not be read, or no longer counts."""
        notes = [f"{self.path.name} {self.damaged}"] if self.damaged is not None else []
        if self.torn and not going_on and self.damaged is None:
            notes.append(f"{self.path.name} ends in a torn record of {self.torn} bytes: it is left out")
        undone = sum(end - begin for begin, end in self.undone)
        if undone:
            notes.append(
                f"{undone:,} records of {self.path.name} were taken back when the run went on from before them"
            )
        return notes


def checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The CRC-32 of each row, all rows at once.

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
