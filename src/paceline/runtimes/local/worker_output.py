"""What the workers of a script print: whole lines, each with the number of its worker."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.interfaces import Report

REDRAW_SECONDS = 0.5  # between two shown states of a line that is written again and again, as a progress bar is
LONGEST = 1 << 16  # bytes of a line; a longer one is shown in parts
_CHUNK = 1 << 16


@dataclass
class LineSplitter:
    """Cuts a stream of bytes into lines. A line that ends with a carriage return is shown now and then.

    >>> lines = LineSplitter()
    >>> lines.feed(b"one\\ntw", now=0.0), lines.feed(b"o\\r\\n", now=0.0), lines.feed(b"thr", now=0.0), lines.end()
    (['one'], ['two'], [], ['thr'])
    >>> lines.feed(b"\\r 1 %\\r 2 %\\r 3 %\\n", now=1.0)
    [' 1 %', ' 3 %']
    """

    _partial: bytes = b""
    _redrawn: bytes = b""  # the newest state of a redrawn line, which was not shown
    _next_redraw: float = field(default=0.0)

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines that `data` completes."""
        whole = (self._partial + data).replace(b"\r\n", b"\n")
        ended, newline, self._partial = whole.rpartition(b"\n")
        shown: list[bytes] = []
        for line in ended.split(b"\n") if newline else ():
            *states, last = line.split(b"\r")
            self._redraw(states, now, shown)
            shown.append(last if last.strip() or not (states or self._redrawn) else self._redrawn)
            if not shown[-1].strip() and (states or self._redrawn):
                shown.pop()  # only the end of a line that is shown already
            self._redrawn, self._next_redraw = b"", 0.0
        *states, last = self._partial[:-1].split(b"\r")  # but for the last byte: a "\n" may follow it
        self._partial = last + self._partial[-1:]
        self._redraw(states, now, shown)
        while len(self._partial) > LONGEST:
            shown.append(self._partial[:LONGEST])
            self._partial = self._partial[LONGEST:]
        return [line.decode(errors="replace") for line in shown]

    def _redraw(self, states: list[bytes], now: float, shown: list[bytes]) -> None:
        for state in filter(bytes.strip, states):
            self._redrawn = state
            if now >= self._next_redraw:
                self._next_redraw, self._redrawn = now + REDRAW_SECONDS, b""
                shown.append(state)

    def end(self) -> list[str]:
        """Return what is left of an unfinished line."""
        last = self._partial.rpartition(b"\r")[2].strip(b"\n") or self._partial.strip(b"\r\n") or self._redrawn
        self._partial = self._redrawn = b""
        return [last.decode(errors="replace")] if last.strip() else []


@dataclass(eq=False)
class _Pipe:
    reader: int
    worker: int
    stream: str
    lines: LineSplitter = field(default_factory=LineSplitter)


class WorkerOutput:
    """Reads the standard output and error of workers from pipes and reports their lines.

    `is_behind` says whether the user's terminal takes no more now: then nothing is read, and a worker that prints
    waits, as it would for the terminal itself.
    """

    def __init__(self, report: Report, is_behind: Callable[[], bool], numbered: bool = True) -> None:
        self._report, self.is_behind, self._numbered = report, is_behind, numbered
        self._poll = select.epoll()
        self._pipes: dict[int, _Pipe] = {}
        self._only: set[int] | None = None  # the workers whose lines are shown; None: all

    def fileno(self) -> int:
        """A descriptor that is readable while a worker's output waits to be read."""
        return self._poll.fileno()

    def open(self, worker: int) -> list[int]:
        """Make the pipes of a worker; return the ends that its process writes to, for the caller to close."""
        writers = []
        for stream in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._pipes[reader] = _Pipe(reader, worker, stream)
            self._poll.register(reader, select.EPOLLIN)
            writers.append(writer)
        return writers

    def show_only(self, worker: int) -> None:
        """From now on show this worker's lines, and no others but those of workers named before.

        The code of this one has failed, and what others print until they are ended tells nothing.
        """
        if self._only is None:
            self.read()
        self._only = {*(self._only or ()), worker}

    def read(self) -> None:
        """Report the lines that wait, one chunk of each pipe."""
        for number, _ in self._poll.poll(0.0):
            self._read_chunk(self._pipes[number])

    def read_out(self, worker: int) -> None:
        """Report all that a worker has written, now that its process has ended; others may still hold its pipes."""
        for pipe in [one for one in self._pipes.values() if one.worker == worker]:
            while self._read_chunk(pipe):
                pass
            self._show(pipe, pipe.lines.end())

    def close(self) -> None:
        """Report what is left, and close all pipes."""
        for pipe in list(self._pipes.values()):
            self.read_out(pipe.worker)
        for pipe in self._pipes.values():
            os.close(pipe.reader)
        self._pipes.clear()
        self._poll.close()

    def _read_chunk(self, pipe: _Pipe) -> bool:
        """Read once; return whether there may be more."""
        with contextlib.suppress(BlockingIOError):
            if data := os.read(pipe.reader, _CHUNK):
                self._show(pipe, pipe.lines.feed(data, time.monotonic()))
                return True
            self._show(pipe, pipe.lines.end())
            self._poll.unregister(pipe.reader)
            os.close(pipe.reader)
            del self._pipes[pipe.reader]
        return False

    def _show(self, pipe: _Pipe, lines: list[str]) -> None:
        prefix = f"[worker {pipe.worker}] " if self._numbered else ""
        for line in lines if self._only is None or pipe.worker in self._only else ():
            self._report({"kind": "output", "stream": pipe.stream, "text": prefix + line})
