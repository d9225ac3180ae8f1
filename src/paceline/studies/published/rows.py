"""What all published tables share: how their figures are read, their rows chosen, and what a row needs of a machine."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from paceline.config import RunConfig
from paceline.errors import UserError, unknown_name


class Row(Protocol):
    """A row by its number and its name, whose words are joined by dashes."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Machine:
    """What a table's rows can be run on."""

    device: str
    num_devices: int
    """GPUs, or cores where the device is the CPU."""

    def __str__(self) -> str:
        what = "GPU" if self.device == "cuda" else "core"
        return f"{self.num_devices} {what}{'s' if self.num_devices != 1 else ''}"


@dataclass(frozen=True)
class Asked:
    """What the command line asks of all rows; a length of None is the published one."""

    epochs: float | None
    steps: int | None
    device: str
    data_dir: str | None
    runs: str
    settings: dict[str, object]
    """Flags of `paceline train` that are handed on."""


class RealRow(Row, Protocol):
    """A row that is run for real."""

    @property
    def dataset(self) -> str: ...

    def config(self, asked: Asked) -> RunConfig:
        """The same setting here; rows that come to the same have the same name."""
        ...

    def why_not(self, machine: Machine) -> str | None:
        """What the machine lacks."""
        ...


AnyRow = TypeVar("AnyRow", bound=Row)
AnyRealRow = TypeVar("AnyRealRow", bound=RealRow)


@dataclass(frozen=True)
class Made(Generic[AnyRealRow]):
    """A published row and our run of it, or why there is none."""

    row: AnyRealRow
    folder: Path | None = None
    result: dict[str, Any] | None = None
    why_not: str | None = None


def cells_of(file: str) -> Iterable[dict[str, str]]:
    """The lines of a table that ships with the package."""
    text = resources.files("paceline.studies.published").joinpath(file).read_text(encoding="utf-8")
    return csv.DictReader(io.StringIO(text))


def figure(cell: str) -> float | None:
    """A number, or None where they have none."""
    return float(cell) if cell else None


def choose(rows: Sequence[AnyRow], text: str | None) -> list[AnyRow]:
    """All rows, or those asked for: numbers and ranges (1,4,7-9) or words that all must be in the name (async cnn)."""
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
        raise UserError(f"--rows '{text}': no row has all of these; the names are like {example}")
    return chosen


def _range(part: str) -> range:
    first, dash, last = part.strip().partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _numbered(rows: Sequence[AnyRow], number: int) -> AnyRow:
    if not 1 <= number <= len(rows):
        raise UserError(f"--rows {number}: the table has rows 1 to {len(rows)}")
    return rows[number - 1]
