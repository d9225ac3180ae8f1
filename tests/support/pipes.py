"""Pipes that nobody reads."""

from __future__ import annotations

import contextlib
import os


def open_full_pipe() -> tuple[int, int]:
    """Return the read and the write end of a pipe that takes no more bytes; whoever calls this closes both."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    return reader, writer
