"""Fit text to the width of the terminal, escape what a terminal would obey, write durations, detect redrawing."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from typing import TextIO

MIN_WIDTH = 20
MAX_PLAIN_LOSS = 1e6
UNLIMITED_WIDTH = 1 << 16
_COLUMNS = re.compile(r"( *)(\S.*?)(  +)(\S.*)")


def terminal_width(stream: TextIO | None = None) -> int:
    """Return the columns of the terminal, or COLUMNS if it is set, or 80 without a terminal."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return max(MIN_WIDTH, int(asked))
    for one in (stream, sys.__stdout__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, a closed stream, no stream
            if columns := os.get_terminal_size(one.fileno()).columns:  # type: ignore[union-attr]
                return max(MIN_WIDTH, columns)
    return 80


def table_width() -> int:
    """Return the width for a table on standard output."""
    return _width_to_fit(sys.stdout)


def _width_to_fit(stream: TextIO) -> int:
    """Return the columns that lines have to fit in: unlimited in a file or a pipe, unless COLUMNS is set."""
    return terminal_width(stream) if stream.isatty() or os.environ.get("COLUMNS") else UNLIMITED_WIDTH


def counted(number: int, what: str) -> str:
    """Return a number of things.

    >>> counted(1, "push"), counted(2, "push"), counted(1200, "thread")
    ('1 push', '2 pushes', '1,200 threads')
    """
    ending = "" if number == 1 else "es" if what.endswith(("sh", "s", "x")) else "s"
    return f"{number:,} {what}{ending}"


def loss_text(loss: float) -> str:
    """Return a loss with four places, or with three digits if it has exploded.

    >>> loss_text(0.51234), loss_text(1.2117e18)
    ('0.5123', '1.21e+18')
    """
    return f"{loss:.4f}" if abs(loss) < MAX_PLAIN_LOSS else f"{loss:.3g}"


def seconds_text(seconds: float | None) -> str:
    """Return a duration as people write it: with its two largest units, or two digits.

    >>> [seconds_text(value) for value in (None, 0.00042, 0.0312, 0.896, 3.0, 4.52, 42.0)]
    ['-', '0.42 ms', '31 ms', '0.9 s', '3 s', '4.5 s', '42 s']
    >>> [seconds_text(value) for value in (275.4, 600.0, 7500.0, 100_000.0)]
    ['4 min 35 s', '10 min', '2 h 5 min', '1 d 4 h']
    """
    if seconds is None:
        return "-"
    seconds *= 1 + 1e-12  # ties are rounded up, as in the pages
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms" if seconds else "0 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    for large, small, unit, smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        number, rest = divmod(round(seconds / small), large // small)
        if number:
            return f"{number} {unit} {rest} {smaller}" if rest else f"{number} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str, limit: int = 200) -> str:
    r"""Escape what a terminal would obey or not show, such as control and bidi characters; cut long text.

    For all text that a peer or a file chose. Backslashes stay, so that an ordinary text is unchanged.

    >>> printable("red \x1b[31m\n\u202etxt.exe")
    'red \\x1b[31m\\x0a\\u202etxt.exe'
    >>> printable("a" * 30, limit=10)
    'aaaaaaaaa…'
    """
    shown = "".join(one if one.isprintable() else _escaped(one) for one in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def can_redraw(stream: TextIO) -> bool:
    """Return whether written text can be overwritten: a terminal that is not dumb."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def fold(text: str, width: int, indent: str = "") -> str:
    """Wrap text to lines of at most `width`, without breaking words; indent all lines but the first."""
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    return "\n".join(lines)


def fold_for(stream: TextIO, lines: list[str]) -> str:
    """Join lines, wrapped to the width of the terminal or to COLUMNS; else, in a file or a pipe, unchanged."""
    width = _width_to_fit(stream)
    return "\n".join(fold(line, width, "  ") if len(line) > width else line for line in lines)


def fold_help(text: str, width: int) -> str:
    r"""Wrap a help text: prose at words, a command with backslashes, the remark beside a command below it.

    >>> print(fold_help("usage: paceline x RUN [-o FILE]\n\nThe summary.\n\n  paceline x runs/a   this", 20))
    usage: paceline x
        RUN [-o FILE]
    <BLANKLINE>
    The summary.
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
    unbreakable = re.sub(r"\[[^\[\]]*\]", lambda flag: flag[0].replace(" ", "\0"), " ".join(usage.split()))
    return fold(unbreakable, width, "    ").replace("\0", " ")


def _fold_line(line: str, width: int) -> str:
    found = _COLUMNS.fullmatch(line)
    if found is None:
        return fold_command(line, width) if line.startswith(" ") else fold(line, width)
    indent, head, gap, remark = found.groups()
    column = len(indent + head + gap)
    if column <= width // 2:
        return fold(remark, width - column).replace("\n", "\n" + " " * column).join((indent + head + gap, ""))
    below = " " * (len(indent) + 4)
    return fold_command(indent + head, width) + "\n" + textwrap.indent(fold(remark, width - len(below)), below)


def fold_command(line: str, width: int) -> str:
    """Wrap a command with backslashes, so that it can be copied; wrap any other text at words."""
    if len(line) <= width:
        return line
    indent = re.match(" *", line)[0]  # type: ignore[index]
    is_command = line.startswith(("paceline ", "PACELINE"), len(indent))
    lines = fold(line.strip(), width - len(indent) - 2 * is_command, "    " * is_command).split("\n")
    return (" \\\n" if is_command else "\n").join(indent + one for one in lines)
