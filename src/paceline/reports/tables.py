"""Plain tables that fit the terminal, CSV output, and the table of data sets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.system.terminal import UNLIMITED_WIDTH, fold, printable

if TYPE_CHECKING:
    from paceline.data.download import DatasetStatus

GAP = 2  # spaces between two columns
MIN_LETTERS = 8  # letters kept of a shortened name


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Pad columns to their widest cell; align the first column left, the others right.

    >>> print(table(["run", "loss"], [["a", "0.5"]]))
    run  loss
    a     0.5
    """
    shown = [[printable(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    lines = []
    for row in shown:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append((GAP * " ").join(cells).rstrip())
    return "\n".join(lines)


class Column(NamedTuple):
    """Heading of a column, and its order of removal if space is short (0: never)."""

    head: str
    drop_order: int


class FittedTable(NamedTuple):
    """The text of a table, and the headings of the columns that it had no room for."""

    text: str
    left_out: list[str]


def fit_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, keep_empty: bool = False) -> str:
    """Return the text of `fitted_table`."""
    return fitted_table(columns, rows, width, keep_empty).text


def fitted_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, keep_empty: bool = False
) -> FittedTable:
    """Return a table of at most `width` columns: the last to be dropped first, each that still fits.

    If even those that are never dropped do not fit, the names in the first one are shortened in the middle. Empty
    columns are dropped unless `keep_empty`.

    >>> fitted = fitted_table([Column("run", 0), Column("loss", 1), Column("%", 2)], [["a-long-name", "0.5", "90"]], 16)
    >>> print(fitted.text, fitted.left_out)
    run           %
    a-long-name  90 ['loss']
    >>> print(fitted_table([Column("run", 0)], [["a-very-long-name"]], 11).text)
    run
    a-ver…-name
    """
    filled = [keep_empty or any(row[place] != "-" for row in rows) for place in range(len(columns))]
    wanted = [place for place, column in enumerate(columns) if not column.drop_order or filled[place]]
    widths = [
        max(len(printable(cell)) for cell in cells) for cells in zip([c.head for c in columns], *rows, strict=True)
    ]
    kept = [place for place in wanted if not columns[place].drop_order]
    room = width - sum(widths[place] + GAP for place in kept) + GAP
    optional = [place for place in wanted if columns[place].drop_order]
    for place in sorted(optional, key=lambda place: (-columns[place].drop_order, place)):
        if widths[place] + GAP <= room:
            kept.append(place)
            room -= widths[place] + GAP
    kept.sort()
    longest = max(MIN_LETTERS, widths[0] + min(0, room))
    body = [[shortened(row[0], longest), *(row[place] for place in kept[1:])] for row in rows]
    left_out = [columns[place].head for place in wanted if place not in kept]
    return FittedTable(table([columns[place].head for place in kept], body), left_out)


def left_out_lines(heads: list[str], width: int) -> list[str]:
    """Return the line that names the columns that a table had no room for; none if it has all."""
    more = "a wider terminal shows it" if len(heads) == 1 else "a wider terminal shows them"
    return [fold(f"left out: {', '.join(heads)} ({more})", width)] if heads else []


def shortened(text: str, room: int) -> str:
    """Return the text, with its middle replaced by an ellipsis if it is too long."""
    if len(text) <= room:
        return text
    behind = (room - 1) // 2
    return f"{text[: room - 1 - behind]}…{text[-behind:]}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> markdown_table(["run", "loss"], [["a", "0.5"]])
    ['| run | loss |', '|---|---|', '| a | 0.5 |']
    """
    first, *others = [f"| {' | '.join(row)} |" for row in [head, *rows]]
    return [first, "|---" * len(head) + "|", *others]


def formatted(rows: Iterable[Mapping[str, Any]], forms: Sequence[str]) -> list[list[str]]:
    """Return the values of each row as text, each column in its number format; missing values are empty."""
    return [
        ["" if value is None else format(value, form) for value, form in zip(row.values(), forms, strict=True)]
        for row in rows
    ]


def as_csv(rows: list[dict[str, Any]], names: Sequence[str] | None = None) -> str:
    """Return one line per row, with these column names or those of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names or list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


DATA_COLUMNS = (Column("data set", 0), Column("train", 2), Column("test", 1), Column("found", 0))


def data_table(rows: list[DatasetStatus], width: int = UNLIMITED_WIDTH) -> str:
    """Return one row per data set, then its folder or how to get it, and its licence."""
    from paceline.data.datasets import remedy  # it imports numpy, which the other tables do without

    cells = [
        [row.name, f"{row.train_size:,}", f"{row.test_size:,}", (row.origin or "here") if row.found else "not here"]
        for row in rows
    ]
    lines = [fit_table(DATA_COLUMNS, cells, width), ""]
    for row in rows:
        source = str(row.path) if row.found else remedy(row.name)
        lines += [fold(f"{row.name}: {source}", width, "  "), fold(f"  {row.licence}", width, "  ")]
    return "\n".join(lines)
