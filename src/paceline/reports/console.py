"""Terminal output of a run while it goes on: a progress bar or plain lines."""

from __future__ import annotations

import functools
import os
import queue
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

from paceline.system.terminal import can_redraw, fold_for, seconds_text, terminal_width

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 10.0
LINES_PER_DOUBLING = 20
"""Plain progress lines until now, at most; then as many again each time the elapsed time doubles."""
FRAME_SECONDS = 0.1
TIMED_SECONDS = 1.0  # of an activity, before the time left is estimated
NARROW = 64  # columns below which the bar is dropped and only the figures are shown
MAX_WAITING, MAX_FRAMES_WAITING = 1000, 16
"""Texts that wait for a reader: beyond this, notes are dropped and counted, and frames of the bar are left out."""
DRAIN_SECONDS = 2.0  # how long the end of a command waits for a reader


class OutputQueue:
    """A text stream that never blocks: a thread writes to the real one, whose reader may be slow or stopped.

    Otherwise a full pipe or Ctrl-S would stop the thread that owns the weights. Each `write` is shown as a whole, in
    order, or is dropped and counted. Callable from a signal handler.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.isatty, self.fileno = stream.isatty, stream.fileno
        self._num_dropped = 0
        self._starts = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        """How many texts wait to be written."""
        return self._waiting.qsize()

    def write(self, text: str) -> int:
        """Queue a text."""
        if self._pid != os.getpid():  # a fork has no copy of the thread; its parent writes what waited
            self._begin()
        if self.num_waiting >= MAX_WAITING:
            self._num_dropped += 1
            return len(text)
        self._waiting.put(text)
        if self._thread is None and self._starts.acquire(blocking=False):  # else a signal interrupted these lines
            self._thread = threading.Thread(target=self._run, args=(self._waiting,), name="console", daemon=True)
            self._thread.start()
            self._starts.release()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes at once."""

    def drain(self, seconds: float) -> None:
        """Wait until everything is written, at most so long, and end the thread. A later `write` starts another."""
        if self._thread is not None and self._pid == os.getpid():
            self._waiting.put(None)
            self._thread.join(seconds)
        self._begin()

    def _run(self, waiting: queue.SimpleQueue[str | None]) -> None:
        try:
            while (text := waiting.get()) is not None:
                self._emit(text)
                if self._num_dropped and waiting.empty():
                    number, self._num_dropped = self._num_dropped, 0
                    self._emit(f"{number} messages are not shown: nobody read this output for a while\n")
        except (OSError, ValueError):  # the terminal or the reader is gone for good
            while waiting.get() is not None:
                pass

    def _emit(self, text: str) -> None:
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(self.encoding, "backslashreplace")
        while data:  # not by the stream: at exit, Python would wait for its lock
            try:
                data = data[os.write(number, data) :]
            except BlockingIOError:
                select.select([], [number], [])


class Activity(NamedTuple):
    """What the rows are about now: their kind, when they began, and at which share."""

    kind: str
    began: float
    fraction: float


class Console:
    """Receives the rows a host reports. Draws a bar on a terminal, else prints a line now and then."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False, keeps_stdout: bool = False) -> None:
        """With `keeps_stdout`, what workers print goes to standard error: a result follows on standard output."""
        self.keeps_stdout = keeps_stdout
        stream = stream or sys.stderr
        self._output = OutputQueue(stream) if stream is not None else None
        self._stream = cast(TextIO, self._output)
        self._outputs = {-1: self._output} if self._output is not None else {}  # by descriptor; our own is -1
        self.stopping: str | None = None  # reason of a requested stop; the run may still finish by itself first
        self._quiet = quiet or self._stream is None  # a closed standard error is None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._next_line, self._began = 0.0, time.monotonic()
        self._activity = Activity("", 0.0, 0.0)

    @functools.cached_property
    def _fancy(self) -> bool:
        """Whether a bar can be drawn; found out when there is something to draw."""
        return not self._quiet and can_redraw(self._stream)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def report(self, row: dict[str, Any]) -> None:
        """Show one row of the run: progress, a note, or an evaluation."""
        match row["kind"]:
            case "progress":
                self._progress(row)
            case "working":
                self._working(row)
            case "note":
                self.note(row["text"])
            case "scoring":
                if self._activity.kind != "scoring":
                    self._next_line = 0.0
                self._working(row)
            case "output":
                self._show_output(row["text"], self._stream_of_worker(row["stream"]))
            case "stopping":
                self.stopping = row["reason"]
                self.note(f"{self.stopping}: saving what there is")

    def note(self, text: str) -> None:
        """Print one permanent line."""
        if self._quiet:
            return
        text = fold_for(self._stream, [text])
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")

    def is_behind(self) -> bool:
        """Whether much of what workers print waits for a slow reader; more would be dropped."""
        return any(queued.num_waiting > MAX_WAITING // 2 for queued in self._outputs.values())

    def _stream_of_worker(self, name: str) -> TextIO | None:
        return sys.stdout if name == "stdout" and not self.keeps_stdout else sys.stderr

    def _show_output(self, text: str, stream: TextIO | None) -> None:
        """Show one line that a worker printed, also if messages are not shown; above the bar, if there is one."""
        if stream is None:
            return
        if self._bar is not None and stream.isatty():
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif stream is sys.stderr and self._output is not None:
            self._output.write(text + "\n")
        else:
            self._outputs.setdefault(stream.fileno(), OutputQueue(stream)).write(text + "\n")

    def _progress(self, row: dict[str, Any]) -> None:
        if self._fancy:
            self._draw(row["fraction"] or 0.0, _figures(row), self._seconds_left(row))
        elif not self._quiet and time.monotonic() >= self._next_line and row["updates"]:
            self._next_line = time.monotonic() + self._between_lines()
            share = f"{100 * row['fraction']:3.0f} %  " if row["fraction"] is not None else ""
            self.note(f"{share}update {row['updates']}  {_figures(row)}")

    def _between_lines(self) -> float:
        """Return the seconds until the next plain line; they grow with the run, so that a day is a hundred lines."""
        return max(PLAIN_SECONDS, (time.monotonic() - self._began) / LINES_PER_DOUBLING)

    def _seconds_left(self, row: dict[str, Any]) -> float | None:
        """Return the time left as the row says, or by the progress since rows of its kind began."""
        kind, fraction, now = row["kind"], row.get("fraction"), time.monotonic()
        if kind != self._activity.kind or (fraction or 0.0) < self._activity.fraction:
            self._activity = Activity(kind, now, fraction or 0.0)
        if (told := row.get("seconds_left")) is not None:
            return float(told)
        elapsed, done = now - self._activity.began, (fraction or 0.0) - self._activity.fraction
        return elapsed * (1.0 - fraction) / done if fraction and done > 0 and elapsed >= TIMED_SECONDS else None

    def _working(self, row: dict[str, Any]) -> None:
        """Show the progress of scoring or of work other than a run: a bar if its share is known, else some lines."""
        text, fraction, left = row["text"], row.get("fraction"), self._seconds_left(row)
        if self._quiet or time.monotonic() < self._next_line:
            return
        if self._fancy and fraction is not None:
            self._next_line = time.monotonic() + FRAME_SECONDS
            self._draw(fraction, text, left)
            return
        self._next_line = time.monotonic() + (PLAIN_SECONDS / 5 if self._fancy else self._between_lines())
        share = f"{100 * fraction:3.0f} %  " if fraction is not None else ""
        self.note(share + text + (f", about {seconds_text(left)} left" if left is not None else ""))

    def _draw(self, fraction: float, figures: str, seconds_left: float | None) -> None:
        if self._output is not None and self._output.num_waiting > MAX_FRAMES_WAITING:
            return
        if self._bar is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
            from rich.table import Column

            wide = terminal_width(self._stream) >= NARROW
            self._bar = Progress(
                *([BarColumn(bar_width=None)] if wide else []),
                TaskProgressColumn(),
                *([TextColumn("{task.fields[left]}")] if wide else []),
                TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=RichConsole(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("", total=1.0, figures="", left="")
            self._bar.start()
        assert self._task is not None
        left = f"{seconds_text(seconds_left)} left" if seconds_left is not None else ""
        self._bar.update(self._task, completed=fraction, figures=figures, left=left)
        self._bar.refresh()

    def close(self) -> None:
        """Restore the terminal, and wait a while until everything is shown."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for queued in self._outputs.values():
            queued.drain(DRAIN_SECONDS)


def _figures(row: dict[str, Any]) -> str:
    parts = [f"loss {row['loss']:.4f}"] if row["loss"] is not None else []
    if row["rate"]:
        parts.append(f"{row['rate']:,.0f}/s")
    if row["staleness"]:
        parts.append(f"stale {row['staleness']:.1f}")
    return "  ".join(parts)
