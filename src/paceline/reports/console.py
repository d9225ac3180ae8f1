"""Terminal output of a run: a progress bar or plain lines, then the final figures."""

from __future__ import annotations

import functools
import os
import queue
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO, cast

from paceline.analysis.reported import read_reported
from paceline.analysis.scored_weights import LIVE, kind_of
from paceline.system.terminal import can_redraw, fold_for, terminal_width

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 10.0
LINES_PER_DOUBLING = 20
"""Plain progress lines until now, at most; then as many again each time the elapsed time doubles."""
FRAME_SECONDS = 0.1
NARROW = 64  # columns below which the bar is dropped and only the figures are shown
MAX_CLASSES = 20  # classes listed one by one; the result has all
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
                self._working(row["text"], row.get("fraction"), row.get("seconds_left"))
            case "note":
                self.note(row["text"])
            case "output":
                self._show_output(row["text"], self._stream_of_worker(row["stream"]))
            case "scoring" if self._bar is not None:
                self._draw(1.0, f"scoring the {row['which']} data")
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
            self._draw(row["fraction"] or 0.0, _figures(row))
        elif not self._quiet and time.monotonic() >= self._next_line and row["updates"]:
            self._next_line = time.monotonic() + self._between_lines()
            share = f"{100 * row['fraction']:3.0f} %  " if row["fraction"] is not None else ""
            self.note(f"{share}update {row['updates']}  {_figures(row)}")

    def _between_lines(self) -> float:
        """Return the seconds until the next plain line; they grow with the run, so that a day is a hundred lines."""
        return max(PLAIN_SECONDS, (time.monotonic() - self._began) / LINES_PER_DOUBLING)

    def _working(self, text: str, fraction: float | None, seconds_left: float | None) -> None:
        """Show the progress of work other than a run: the bar if its share is known, else a line now and then."""
        if self._quiet or time.monotonic() < self._next_line:
            return
        if self._fancy and fraction is not None:
            self._next_line = time.monotonic() + FRAME_SECONDS
            self._draw(fraction, text)
            return
        self._next_line = time.monotonic() + (PLAIN_SECONDS / 5 if self._fancy else self._between_lines())
        share = f"{100 * fraction:3.0f} %  " if fraction is not None else ""
        left = f", about {seconds_left:.0f} s left" if seconds_left is not None else ""
        self.note(share + text + left)

    def _draw(self, fraction: float, figures: str) -> None:
        if self._output is not None and self._output.num_waiting > MAX_FRAMES_WAITING:
            return
        if self._bar is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.table import Column

            wide = terminal_width(self._stream) >= NARROW
            self._bar = Progress(
                *([BarColumn(bar_width=None)] if wide else []),
                TaskProgressColumn(),
                *([TimeRemainingColumn(compact=True)] if wide else []),
                TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=RichConsole(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("", total=1.0, figures="")
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=fraction, figures=figures)
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


def clock(seconds: float) -> str:
    """Return minutes, seconds and milliseconds, as the published tables print them.

    >>> clock(175.634)
    '02:55:634'
    """
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 60000:02d}:{milliseconds // 1000 % 60:02d}:{milliseconds % 1000:03d}"


def closing_lines(result: dict[str, Any], classes: tuple[str, ...] | None, folder: str) -> list[str]:
    """Return the final lines, in the form of the published tables, with the other figures of the run."""
    lines = [f"training time: {clock(result['train_seconds'])}"]
    for which in ("train", "validation", "test"):
        if result[f"{which}_accuracy"] is not None:
            correct, total = result[f"{which}_correct"], result[f"{which}_total"]
            lines.append(f"Average {which} accuracy: {result[f'{which}_accuracy']:.2f} % ({correct}/{total})")
        if result[f"{which}_loss"] is not None:
            lines.append(f"Average {which} loss: {result[f'{which}_loss']:.4f}")
        for name, value in (result.get(f"{which}_metrics") or {}).items():
            lines.append(f"{which.capitalize()} {name}: {_measured(value)}")
    lines += _scored_weights(result)
    if result["per_class_accuracy"]:
        lines.append(_per_class(result["per_class_accuracy"], classes))
    stale = result["staleness"]
    lines.append(
        f"{result['updates']} updates, {result['samples']} samples, {result['samples_per_second']:,.0f} samples/s, "
        f"staleness mean {stale['mean']:g} max {stale['max']}, {result['dropped_pushes']} dropped"
    )
    if result.get("utilisation"):
        lines.append(_shares(result["utilisation"]))
    lines += _reported(result)
    if result.get("chosen_on"):
        lines.append(_choice(result))
    if result.get("simulated"):
        lines.append(f"{result['virtual_seconds']:g} virtual seconds, simulated in {result['wall_seconds']:.1f}")
    lines.append(f"status: {result['status']}" + (f" ({result['reason']})" if result["reason"] else ""))
    lines.append(f"run folder: {folder}")
    return lines


def _scored_weights(result: dict[str, Any]) -> list[str]:
    """Return which weights the scores belong to, and the live weights' scores if they are others and known."""
    part = next((part for part in ("test", "validation", "train") if result.get(f"{part}_loss") is not None), None)
    if part is None:
        return []
    if kind_of(result) == LIVE:
        return ["scored and saved: the live weights"]
    accuracy, loss = result.get(f"live_{part}_accuracy"), result.get(f"live_{part}_loss")
    live = [f"{part} accuracy {accuracy:.2f} %"] if accuracy is not None else []
    live += [f"{part} loss {loss:.4f}"] if loss is not None else []
    return ["scored and saved: the averaged weights" + (f" (live weights: {', '.join(live)})" if live else "")]


def _reported(result: dict[str, Any]) -> list[str]:
    """Return the metrics of an own loop: the value that holds, whose it is, and how far those of other workers lie."""
    by_worker: dict[int, list[str]] = {}
    for name, one in read_reported(result).items():
        values = [row[name] for row in result["reported"].values() if name in row]
        finite = [value for value in values if value is not None]
        spread = ""
        if len({_measured(value) for value in values}) > 1 and finite:
            spread = f" ({len(values)} workers: {_measured(min(finite))} to {_measured(max(finite))})"
        by_worker.setdefault(one.worker, []).append(f"{name} {_measured(one.value)}{spread}")
    return [f"reported by worker {worker}: {', '.join(texts)}" for worker, texts in sorted(by_worker.items())]


def _choice(result: dict[str, Any]) -> str:
    """Return what was chosen by which data."""
    best = result.get("best")
    what = f"best weights (update {best['updates']})" if best else "the end of the run"
    on_test = "the test set, whose scores are therefore too good: --validation 0.1 holds out data to choose by"
    return f"{what} chosen on {on_test if result['chosen_on'] == 'test' else 'the validation data'}"


def _measured(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _shares(utilisation: list[dict[str, float]]) -> str:
    """Return how the workers spent their time, on average and for the least busy one."""
    number = len(utilisation)
    means = {name: 100 * sum(worker[name] for worker in utilisation) / number for name in utilisation[0]}
    least = min(range(number), key=lambda worker: utilisation[worker]["computing"])
    text = "workers: " + ", ".join(f"{name} {mean:.0f} %" for name, mean in means.items())
    return text + f"; least worker {least}, computing {100 * utilisation[least]['computing']:.0f} %"


def _per_class(accuracies: list[float | None], classes: tuple[str, ...] | None) -> str:
    names = classes or tuple(str(number) for number in range(len(accuracies)))
    scored = [(name, value) for name, value in zip(names, accuracies, strict=False) if value is not None]
    if len(scored) > MAX_CLASSES:
        lowest = ", ".join(f"{name} {value:.1f}" for name, value in sorted(scored, key=lambda one: one[1])[:5])
        return f"Test accuracy of {len(scored)} classes, the lowest: {lowest}"
    return "Test accuracy by class: " + ", ".join(f"{name} {value:.1f}" for name, value in scored)
