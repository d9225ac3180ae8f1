"""`paceline watch --terminal`: redraws running runs in place; prints plain lines if not on a terminal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TextIO

from paceline.analysis.scored_weights import SHORT
from paceline.analysis.statistics import FAILED
from paceline.analysis.status import UNDER_WAY, RunSnapshot, RunStatus
from paceline.reports.sentences import event_sentence
from paceline.reports.status_table import MAX_LETTERS, MAX_WORKERS, format_run, format_workers, loss_parts
from paceline.reports.watch.sources import RunSource, pause_after
from paceline.system.terminal import loss_text, printable, seconds_text

PLAIN_SECONDS = 10.0
LEVELS = "▁▂▃▄▅▆▇█"
MAX_EVENTS = 5
MAX_LOSSES = 400  # losses kept per run; at this number, every second one is dropped
MIN_WIDTH = 20
COLORS = {"running": "green", "evaluating": "green", "stopped": "yellow"}
COLORS |= dict.fromkeys((*FAILED, "killed"), "red")


class StyledLine(NamedTuple):
    """One line of the view, and its style."""

    text: str
    style: str = ""


class RunHistory:
    """What the view keeps of one run: its losses, thinned, and the last event shown."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._until = -1.0
        self._every, self._skipped = 1, 0
        self._last_event: dict[str, Any] = {}

    def add(self, events: Sequence[dict[str, Any]]) -> None:
        """Add the losses of rows not seen before."""
        for row in events:
            if row.get("kind") == "progress" and row["now"] > self._until and row.get("loss") is not None:
                self._until = row["now"]
                self._skipped += 1
                if self._skipped >= self._every:
                    self._skipped = 0
                    self.losses.append(row["loss"])
                if len(self.losses) >= MAX_LOSSES:
                    self.losses, self._every = self.losses[::2], 2 * self._every

    def new_sentences(self, events: Sequence[dict[str, Any]], weights: str) -> list[str]:
        """Return sentences about events since the last call. `weights` are those scored."""
        begin = next((place for place in range(len(events), 0, -1) if events[place - 1] == self._last_event), 0)
        self._last_event = events[-1] if events else self._last_event
        return [text for _, text in sentences(events[begin:], weights)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as one line of blocks, each the mean of an interval.

    >>> sparkline([1, 1, 3, 5, 8, 8], 3)
    '▁▄█'
    """
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    edges = [place * len(values) // cells for place in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((mean - low) * scale)] for mean in means)


def bar(fraction: float, width: int) -> str:
    """
    >>> bar(0.5, 4)
    '━━──'
    """
    full = round(max(0.0, min(1.0, fraction)) * width)
    return "━" * full + "─" * (width - full)


def sentences(events: Sequence[dict[str, Any]], weights: str) -> list[tuple[float, str]]:
    """Return the time and text of each event; several joins in a row become one sentence. `weights` are those scored.

    >>> sentences([{"kind": "worker_joined", "now": 0.0, "worker": worker} for worker in range(3)], "live")
    [(0.0, '3 workers joined')]
    """
    found: list[tuple[float, str]] = []
    whole = [row for row in events if "kind" in row and "now" in row]
    for (kind, again), rows in groupby(whole, lambda row: (row["kind"], bool(row.get("incarnation")))):
        same = list(rows)
        if kind == "worker_joined" and len(same) > 1:
            found.append((same[-1]["now"], f"{len(same):,} workers {'joined again' if again else 'joined'}"))
            continue
        found += [
            (row["now"], text) for row in same if (text := event_sentence(row) or _score(row, weights)) is not None
        ]
    return found


def _score(row: dict[str, Any], weights: str) -> str | None:
    for part in ("test", "validation"):
        accuracy, loss = row.get(f"{part}_accuracy"), row.get(f"{part}_loss")
        if accuracy is not None:
            return f"{part.capitalize()} accuracy {accuracy:.2f} % ({weights} weights)"
        if loss is not None:
            return f"{part.capitalize()} loss {loss_text(loss)} ({weights} weights)"
    return None


def view(snapshot: RunSnapshot, history: RunHistory, width: int, height: int) -> list[StyledLine]:
    """Return one run in at most `height` lines of `width`: progress, loss, workers, latest events."""
    status, events = snapshot
    style = COLORS.get(status.status, "bold")
    lines = [StyledLine(text, style) for text in format_run(status, width).splitlines()]
    if status.fraction is not None:
        lines.append(StyledLine(f"{bar(status.fraction, width - 6)} {100 * status.fraction:3.0f} %", style))
    if history.losses:
        lines.append(StyledLine("loss " + sparkline(history.losses, width - 5), "cyan"))
    newest = reversed(sentences(events, status.weights)[-MAX_EVENTS:])
    latest = [StyledLine(_shorten(f"{seconds_text(now):>7}  {text}", width), "dim") for now, text in newest]
    workers = _worker_lines(status, width, height - len(lines) - len(latest))
    return (lines + workers + latest)[:height]


def _worker_lines(status: RunStatus, width: int, room: int) -> list[StyledLine]:
    """Return as many workers as fit, and always the stragglers."""
    for max_workers in (MAX_WORKERS, 16, 8, 4, 2, 1):
        lines = "\n".join(format_workers(status, width, max_workers)).splitlines()
        if len(lines) <= room:
            break
    slow = ("is slow (", "is paused", "has made no step", "is lost")
    return [StyledLine(line, "yellow" if any(words in line for words in slow) else "") for line in lines]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def select_run(run_snapshots: Sequence[RunSnapshot]) -> RunSnapshot:
    """Return the run to show in full: the newest that is active, else the newest."""
    return next((one for one in run_snapshots if one.status.status in UNDER_WAY), run_snapshots[0])


def other_runs(run_snapshots: Sequence[RunSnapshot], shown: RunSnapshot, width: int) -> list[StyledLine]:
    """Return a line for each of the other runs."""
    lines = []
    for status, _ in run_snapshots:
        if status is not shown.status:
            share = f"{100 * status.fraction:3.0f} %" if status.fraction is not None else "    -"
            accuracy = status.test_accuracy if status.test_accuracy is not None else status.validation_accuracy
            scored = f"  {accuracy:.2f} % {SHORT[status.weights]}" if accuracy is not None else ""
            text = f"{share}  {status.status:<10} {status.run}{scored}"
            lines.append(StyledLine(_shorten(printable(text, MAX_LETTERS), width), COLORS.get(status.status, "")))
    return lines


def plain_line(status: RunStatus) -> str:
    """Return one line for a log file."""
    parts = [f"{status.run}: {status.status}" + (f" ({status.reason})" if status.reason else "")]
    if status.fraction is not None:
        parts.append(f"{100 * status.fraction:.0f} %")
    if status.updates:
        parts.append(f"update {status.updates:,}")
    parts += loss_parts(status)
    if status.rate:
        parts.append(f"{status.rate:,.0f} {status.unit}/s")
    return printable(", ".join([*parts, *status.damaged]), MAX_LETTERS)


def watch_in_terminal(source: RunSource, stream: TextIO) -> None:
    """Show the source until its single run ends, or until Ctrl-C."""
    if stream.isatty():
        _draw(source, stream)
    else:
        _print_lines(source, stream)


def _poll(source: RunSource) -> Iterator[tuple[list[RunSnapshot], bool]]:
    """Yield the current runs repeatedly, and whether this is the last time."""
    while True:
        began = time.thread_time()
        run_snapshots = source.run_snapshots()
        over = source.one and not any(one.status.status in UNDER_WAY for one in run_snapshots)
        yield run_snapshots, over
        if over:
            return
        time.sleep(pause_after(time.thread_time() - began))


def _draw(source: RunSource, stream: TextIO) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    histories: dict[str, RunHistory] = {}
    console = Console(file=stream)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for run_snapshots, _ in _poll(source):
            if not run_snapshots:
                live.update(Text(f"{source.title} was removed", "red"), refresh=True)
                continue
            size = shutil.get_terminal_size((80, 24))
            width, height = max(MIN_WIDTH, size.columns), max(4, size.lines - 1)
            shown = select_run(run_snapshots)
            history = histories.setdefault(shown.status.run, RunHistory())
            history.add(shown.events)
            others = other_runs(run_snapshots, shown, width)
            lines = view(shown, history, width, height - min(2, len(others)))
            lines += others[: height - len(lines)]
            texts = [Text(line.text, line.style, no_wrap=True, overflow="crop") for line in lines]
            live.update(Group(*texts), refresh=True)


def _print_lines(source: RunSource, stream: TextIO) -> None:
    """Print a line now and then, one per event, and one at the end."""
    histories: dict[str, RunHistory] = {}
    due: dict[str, float] = {}
    for run_snapshots, over in _poll(source):
        for status, events in run_snapshots:
            history = histories.setdefault(status.run, RunHistory())
            for text in history.new_sentences(events, status.weights):
                print(printable(f"{status.run}: {text}", MAX_LETTERS), file=stream)
            now, ended = time.monotonic(), status.status not in UNDER_WAY
            if over or now >= due.get(status.run, 0.0):
                due[status.run] = float("inf") if ended else now + PLAIN_SECONDS
                print(plain_line(status), file=stream)
        stream.flush()
