"""Shared by the published tables: reading the CSV files, choosing rows, requirements on the machine."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from paceline.config import RunConfig
from paceline.errors import UserError, unknown_name


class NumberedRow(Protocol):
    """A row with a number and a name of words joined by dashes."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class MachineSpec:
    """The devices available to run rows."""

    device: str
    num_devices: int  # GPUs, or cores if the device is the CPU

    def __str__(self) -> str:
        what = "GPU" if self.device == "cuda" else "core"
        return f"{self.num_devices} {what}{'s' if self.num_devices != 1 else ''}"


@dataclass(frozen=True)
class RowOptions:
    """Options of the command line for all rows; without `epochs` and `steps` a run has its published length."""

    epochs: float | None
    steps: int | None
    device: str
    data_dir: str | None
    runs: str
    settings: dict[str, object]  # flags of `paceline train` to pass on


class RealRow(NumberedRow, Protocol):
    """A row that is trained for real."""

    @property
    def dataset(self) -> str: ...

    def config(self, options: RowOptions) -> RunConfig:
        """Return our config for the row; equal configs have equal names."""
        ...

    def why_not(self, machine: MachineSpec) -> str | None:
        """Return why the machine cannot run the row, or None."""
        ...


AnyRow = TypeVar("AnyRow", bound=NumberedRow)
AnyRealRow = TypeVar("AnyRealRow", bound=RealRow)


@dataclass(frozen=True)
class RowResult(Generic[AnyRealRow]):
    """A published row with our run of it, or the reason why it was not run."""

    row: AnyRealRow
    folder: Path | None = None
    result: dict[str, Any] | None = None
    why_not: str | None = None


def read_table(file: str, kinds: Sequence[Callable[[str], Any]]) -> list[list[Any]]:
    """Read a table shipped with the package, and convert the cells of each column with its function in `kinds`."""
    text = resources.files("paceline.studies.published").joinpath(file).read_text(encoding="utf-8")
    _, *rows = csv.reader(io.StringIO(text))
    return [[kind(cell) for kind, cell in zip(kinds, row, strict=True)] for row in rows]


def figure(cell: str) -> float | None:
    """Return the number in a cell, or None if the cell is empty."""
    return float(cell) if cell else None


def percent(cell: str) -> float | None:
    """Return the share in a cell as percent, or None if the cell is empty."""
    return 100.0 * float(cell) if cell else None


def choose(rows: Sequence[AnyRow], text: str | None) -> list[AnyRow]:
    """Return all rows, or those selected by numbers and ranges (1,4,7-9) or by words of the name (async cnn)."""
    if text is None:
        return list(rows)
    if all(part.strip().replace("-", "", 1).isdecimal() for part in text.split(",")):
        numbers = dict.fromkeys(number for part in text.split(",") for number in _range(part))
        return [_numbered(rows, number) for number in numbers]
    words = text.replace(",", " ").split()
    names = {word for row in rows for word in row.name.split("-")}
    for word in words:
        if word not in names:
            raise unknown_name("word for --rows", word, names)
    chosen = [row for row in rows if all(word in row.name.split("-") for word in words)]
    if not chosen:
        example = rows[len(rows) // 3].name
        raise UserError(f"--rows '{text}': no row's name has all of these words: give words as in {example}")
    return chosen


def _range(part: str) -> range:
    first, dash, last = part.strip().partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _numbered(rows: Sequence[AnyRow], number: int) -> AnyRow:
    if not 1 <= number <= len(rows):
        raise UserError(f"--rows {number}: the table has rows 1 to {len(rows)}: give numbers in this range")
    return rows[number - 1]
