"""Text for people: as wide as their terminal, and without control characters where there is none."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

NARROWEST = 20
UNCUT = 1 << 16
_COLUMNS = re.compile(r"( *)(\S.*?)(  +)(\S.*)")


def width_here(stream: TextIO | None = None) -> int:
    """Columns of the terminal that is written to; 80 where there is none, unless COLUMNS says otherwise."""
    columns = shutil.get_terminal_size((80, 24)).columns
    if stream is not None and not os.environ.get("COLUMNS"):
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(stream.fileno()).columns or columns
    return max(NARROWEST, columns)


def table_width() -> int:
    """Columns that a table on standard output may have; one for a file or another program is not cut."""
    return width_here() if sys.stdout.isatty() or os.environ.get("COLUMNS") else UNCUT


def can_draw(stream: TextIO) -> bool:
    """Whether what was written can be written over: a terminal, and none that only prints."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def fold(text: str, width: int, indent: str = "") -> str:
    """One sentence on lines no longer than `width`, but for words that are; further lines are indented."""
    wrapped = textwrap.wrap(
        text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent, drop_whitespace=True
    )
    return "\n".join(wrapped)


def fold_for(stream: TextIO, lines: list[str]) -> str:
    """Lines for a person at a terminal, folded to its width; for a file as they are."""
    if not stream.isatty():
        return "\n".join(lines)
    width = width_here(stream)
    return "\n".join(fold(line, width, "  ") if len(line) > width else line for line in lines)


def fold_help(text: str, width: int) -> str:
    r"""Help whose lines fit: prose is folded, a command goes on after a backslash, a remark beside it goes below it.

    >>> print(fold_help("usage: paceline x RUN [-o FILE]\n\nWhat it does.\n\n  paceline x runs/a   this", 20))
    usage: paceline x
        RUN [-o FILE]
    <BLANKLINE>
    What it does.
    <BLANKLINE>
      paceline x runs/a
          this
    """
    usage, blank, rest = text.partition("\n\n")
    if usage.startswith("usage:"):
        text = _fold_usage(usage, width) + blank + rest
    return "\n".join(_fold_line(line, width) if len(line) > width else line for line in text.split("\n"))


def _fold_usage(usage: str, width: int) -> str:
    if max(map(len, usage.split("\n"))) <= width:
        return usage
    together = re.sub(r"\[[^\[\]]*\]", lambda flag: flag[0].replace(" ", "\0"), " ".join(usage.split()))
    return fold(together, width, "    ").replace("\0", " ")


def _fold_line(line: str, width: int) -> str:
    found = _COLUMNS.fullmatch(line)
    if found is None:
        return _fold_command(line, width) if line.startswith(" ") else fold(line, width)
    indent, head, gap, remark = found.groups()
    column = len(indent + head + gap)
    if column <= width // 2:
        return fold(remark, width - column).replace("\n", "\n" + " " * column).join((indent + head + gap, ""))
    below = " " * (len(indent) + 4)
    return _fold_command(indent + head, width) + "\n" + textwrap.indent(fold(remark, width - len(below)), below)


def _fold_command(line: str, width: int) -> str:
    """A command goes on after a backslash, so that it can be copied; what is no command is only folded."""
    if len(line) <= width:
        return line
    indent = re.match(" *", line)[0]  # type: ignore[index]
    is_command = line.startswith(("paceline ", "PACELINE"), len(indent))
    lines = fold(line.strip(), width - len(indent) - 2 * is_command, "    " * is_command).split("\n")
    return (" \\\n" if is_command else "\n").join(indent + one for one in lines)
