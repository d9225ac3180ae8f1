"""`events.jsonl`: events of a run, one typed JSON row with a checksum per line, appended and flushed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.system.strict_json import (
    TypeCheck,
    are_numbers,
    are_numbers_or_null,
    dict_of,
    escape_texts,
    from_json,
    is_count,
    is_number,
    is_text,
    list_of,
    optional,
    require_types,
    to_json,
)

CHUNK_BYTES = 1 << 20
MAX_NAMED = 5
MAX_SECONDS = 1e12
_CHECK = b', "crc32": "'
_CHECK_NBYTES = len(_CHECK) + len(b'01234567"}')


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
        text = to_json({"kind": kind, "now": round(now, 6), **fields}).encode()[:-1]
        row = b'%s%s%08x"}\n' % (text, _CHECK, zlib.crc32(text))
        self._file.write(row)
        return len(row)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def _is_bar(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def _by_worker(has_type: TypeCheck) -> TypeCheck:
    return lambda value: (
        isinstance(value, dict) and all(name.isdecimal() and has_type(one) for name, one in value.items())
    )


def _is_timed(value: Any) -> bool:
    """Return whether the value is a worker's part of a `timing` row: after so few steps that none is timed, a count."""
    if not isinstance(value, dict) or not is_count(value.get("steps")):
        return False
    times = [value.get(name) for name in ("cpu", "wall", "waited", "waited_least")]
    return "cpu" not in value or (all(map(is_number, times)) and are_numbers(value.get("quantiles")))


_COUNTS = (
    *("worker", "workers", "updates", "samples", "pushes", "live", "steps", "incarnation", "threads", "generation"),
    *("recomputed_pushes", "lost_pushes", "checkpoint", "bytes_pushed", "bytes_pulled"),
)
_NUMBERS = (
    "fraction",
    "rate",
    "loss",
    "staleness",
    "lr",
    "step_factor",
    "norm",
    "factor",
    "seconds",
    "usual",
    "pause_seconds",
)
_TEXTS = ("reason", "what", "error", "text", "status", "strategy", "which", "fault", "why", "model", "dataset", "unit")
_PARTS = tuple(f"{live}{part}" for live in ("", "live_") for part in ("test", "validation", "train"))
FIELD_TYPES: Mapping[str, TypeCheck] = {
    **dict.fromkeys(_COUNTS, is_count),
    **dict.fromkeys((*_NUMBERS, *(f"{part}_{what}" for part in _PARTS for what in ("accuracy", "loss"))), is_number),
    **dict.fromkeys(_TEXTS, is_text),
    **dict.fromkeys(("figures", *(f"{part}_metrics" for part in _PARTS)), dict_of(optional(is_number))),
    "members": list_of(is_count),
    "factors": are_numbers_or_null,
}
"""Types of the fields that readers use, in rows of every kind but those of KIND_TYPES; each may be null."""
_SUMS = ("computing", "sending", "waiting", "server", "steps", "pushes", "longest", "step", "send")
KIND_TYPES: Mapping[str, Mapping[str, TypeCheck]] = {
    "workers": {
        **dict.fromkeys(_SUMS, are_numbers),
        **dict.fromkeys(("staleness", "ago"), are_numbers_or_null),
        "worker": list_of(is_count),
        "state": list_of(is_text),
        "stale": list_of(_is_bar),
        "deal": is_count,
        "paused": _by_worker(_is_pair),
    },
    "timing": {"server_cpu": is_number, "cores": is_count, "workers": _by_worker(_is_timed)},
}
REQUIRED = {"timing": ("server_cpu", "cores", "workers")}  # fields that rows of a kind always have
_RESULT_COUNTS = (
    *("workers", "updates", "samples", "dropped_pushes", "late_pushes", "lost_pushes", "bytes_pushed", "bytes_pulled"),
    *("num_parameters", "resumes", "deals", *(f"{part}_{what}" for part in _PARTS for what in ("correct", "total"))),
)
_RESULT_NUMBERS = (
    *("train_seconds", "samples_per_second", "virtual_seconds", "wall_seconds"),
    *(f"{part}_{what}" for part in _PARTS for what in ("accuracy", "loss")),
)
_RESULT_TEXTS = (
    *("status", "reason", "strategy", "dataset", "model", "task", "weights", "average", "chosen_on", "weights_sha256"),
    "unit",
)
_OBJECTS = ("environment", "best")
RESULT_TYPES: dict[str, TypeCheck] = {
    **dict.fromkeys(_RESULT_COUNTS, is_count),
    **dict.fromkeys(_RESULT_NUMBERS, is_number),
    **dict.fromkeys(_RESULT_TEXTS, is_text),
    **dict.fromkeys(("staleness", "metrics", *(f"{part}_metrics" for part in _PARTS)), dict_of(optional(is_number))),
    **dict.fromkeys(_OBJECTS, lambda value: isinstance(value, dict)),
    "staleness_histogram": lambda value: dict_of(is_count)(value) and all(name.isdecimal() for name in value),
    "per_class_accuracy": are_numbers_or_null,
    **dict.fromkeys(("lost_workers", "returned_workers"), list_of(is_count)),
    "utilisation": list_of(dict_of(is_number)),
    "reported": dict_of(dict_of(optional(is_number))),
}
"""Types of what readers use of `result.json`, here beside those of rows because they are mostly the same figures."""


class RowParser:
    """Parses lines of one file in order; damaged ones, whose checksum or types are wrong, are skipped and counted.

    Rows of older versions have no checksum; after the first row with one, all have one.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, 0
        self.damaged: list[int] = []  # numbers of the rows, from 1
        self.is_tail = False  # whether the rows are the last ones of a longer file
        self._has_checksums = False

    def parse(self, lines: list[bytes], skipped: Collection[int] = ()) -> list[dict[str, Any]]:
        """Return the rows of these lines, without the `skipped` ones."""
        found = []
        for place, line in enumerate(lines):
            if place in skipped or not line:
                continue
            has_checksum = _check_of(line) is not None
            row = parse_row(line) if has_checksum or not self._has_checksums else None
            if row is not None:
                self._has_checksums |= has_checksum
                found.append(row)
            else:
                self.damaged.append(self.rows + place + 1)
        self.rows += len(lines)
        return found

    def notes(self) -> list[str]:
        """Return a sentence if rows were skipped."""
        if not self.damaged:
            return []
        if self.is_tail:
            return [f"{self.path.name}: {len(self.damaged):,} of the last {self.rows:,} rows cannot be read: ignored"]
        named = ", ".join(f"{number:,}" for number in self.damaged[:MAX_NAMED])
        more = f" and {len(self.damaged) - MAX_NAMED:,} more" if len(self.damaged) > MAX_NAMED else ""
        rows, are = ("row", "is") if len(self.damaged) == 1 else ("rows", "are")
        return [f"{self.path.name}: {rows} {named}{more} of {self.rows:,} cannot be read and {are} ignored"]


def read_events(path: Path, parser: RowParser | None = None) -> list[dict[str, Any]]:
    """Return the whole rows; one that a crash cut off and damaged ones are skipped, and counted by `parser`."""
    *lines, rest = path.read_bytes().split(b"\n")
    last = parse_row(rest)
    return (parser or RowParser(path)).parse(lines) + ([last] if last is not None else [])


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
        self._lines, self.parser = LineReader(path), RowParser(path)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new complete rows."""
        for lines in self._lines.read():
            yield from self.parser.parse(lines)


def read_tail(path: Path, nbytes: int, parser: RowParser | None = None) -> list[dict[str, Any]]:
    """Return the whole rows among the last `nbytes` of a file that may be long and still growing."""
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - nbytes)
        file.seek(begin)
        *lines, rest = file.read().split(b"\n")
    last = parse_row(rest) if lines or not begin else None
    parser = parser or RowParser(path)
    parser.is_tail = begin > 0
    return parser.parse(lines[1:] if begin else lines) + ([last] if last is not None else [])


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if it is damaged; no text in it has characters that a terminal obeys."""
    check = _check_of(line)
    if check is not None:
        text = line[:-_CHECK_NBYTES]
        if zlib.crc32(text) != check:
            return None
        line = text + b"}"
    try:
        row = from_json(line)
        if not isinstance(row, dict) or not is_text(row.get("kind")) or not is_number(row.get("now")):
            return None
        require_types(row, KIND_TYPES.get(row["kind"], FIELD_TYPES))
    except ValueError:
        return None
    if not 0.0 <= row["now"] <= MAX_SECONDS or any(row.get(name) is None for name in REQUIRED.get(row["kind"], ())):
        return None
    has_odd_text = b"\\" in line or b"\x7f" in line or not line.isascii()
    return escape_texts(row) if has_odd_text else row


def _check_of(line: bytes) -> int | None:
    """Return the checksum that a line states; None if it has none, -1 if it is no number."""
    if line[-_CHECK_NBYTES : -_CHECK_NBYTES + len(_CHECK)] != _CHECK or not line.endswith(b'"}'):
        return None
    try:
        return int(line[-10:-2], 16)
    except ValueError:
        return -1
