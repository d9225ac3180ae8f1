"""Writes a run as a Chrome JSON trace for ui.perfetto.dev; in a long run several pushes share one span."""

from __future__ import annotations

import gzip
import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.timeline import Span, Timeline, TimelineUpdate, TimeReports
from paceline.errors import UserError
from paceline.runs.arrival_log import LogContents, scan_log
from paceline.runs.events import RowParser, read_events
from paceline.runs.folder import RunFolder
from paceline.system.strict_json import to_json

WORKERS = 2  # process id of the workers in the trace, and thread id of the first worker; the server is 1
SERVER = {"pid": 1, "tid": 1}
ORDER = ("computing", "sending", "waiting", "paused")
MAX_PUSHES = 30_000
MAX_ROWS = 5_000
COUNTERS = {"loss": "loss", "rate": "samples/s", "staleness": "staleness", "updates": "version", "lr": "lr"}
WORKER_EVENTS = (
    *("worker_joined", "worker_left", "worker_lost", "worker_draining", "local_steps"),
    *("expelled", "stalled", "suspicious"),
)
RUN_EVENTS = ("evaluation", "checkpoint", "fault", "deal", "stopped", "run_resumed", "recovered", "run_ended")
TraceEvent = dict[str, Any]


def microseconds(seconds: float) -> float:
    """Convert to the trace's unit; equal rounding, so that adjacent spans still meet."""
    return round(seconds * 1e6, 3)


class DetailedTrace:
    """Emits every span and update, with an arrow from each push to its update."""

    def __init__(self, server_seconds: float) -> None:
        self._seconds = server_seconds
        self._sent: dict[int, tuple[int, float]] = {}
        self._last: TimelineUpdate | None = None

    def span(self, span: Span) -> Iterator[TraceEvent]:
        args: dict[str, Any] = {} if span.push is None else {"push": span.push}
        if span.fate is not None:
            args["fate"] = span.fate
            if span.fate == "taken" and span.push is not None:
                self._sent[span.push] = span.worker, (span.begin + span.end) / 2
        yield slice_of(span.worker, span.kind, span.begin, span.end, args)

    def update(self, update: TimelineUpdate) -> Iterator[TraceEvent]:
        if self._last is not None:
            yield self._updated(self._last, update.now)
        self._last = update
        for push in update.pushes:
            if push in self._sent:
                worker, at = self._sent.pop(push)
                arrow = {"name": "push", "cat": "push", "id": push}
                yield {"ph": "s", **arrow, **thread_of(worker), "ts": microseconds(at)}
                yield {"ph": "f", "bp": "e", **arrow, **SERVER, "ts": microseconds(update.now)}

    def _updated(self, update: TimelineUpdate, before: float) -> TraceEvent:
        end = min(update.now + self._seconds, max(before, update.now))
        args = {"version": update.version, "pushes": len(update.pushes)}
        return {**slice_of(0, f"update {update.version}", update.now, end, args), "cat": "server", **SERVER}

    def flush(self) -> Iterator[TraceEvent]:
        if self._last is not None:
            yield self._updated(self._last, self._last.now + self._seconds)


class AggregatedTrace:
    """Merges several pushes of a worker into one span per activity, and several updates into one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._sums: dict[int, dict[str, float]] = {}
        self._began: dict[int, tuple[float, float]] = {}
        self._pushes: dict[int, int] = {}
        self._first: TimelineUpdate | None = None
        self._latest: TimelineUpdate | None = None

    def span(self, span: Span) -> Iterator[TraceEvent]:
        if span.kind == "dead":
            yield from self._flush_worker(span.worker)
            yield slice_of(span.worker, "dead", span.begin, span.end, {})
            return
        sums = self._sums.setdefault(span.worker, dict.fromkeys(ORDER, 0.0))
        sums[span.kind] += span.end - span.begin
        self._began[span.worker] = self._began.get(span.worker, (span.begin, 0.0))[0], span.end
        if span.fate is not None:
            self._pushes[span.worker] = self._pushes.get(span.worker, 0) + 1
            if self._pushes[span.worker] >= self._number:
                yield from self._flush_worker(span.worker)

    def _flush_worker(self, worker: int) -> Iterator[TraceEvent]:
        if worker not in self._began:
            return
        begin, end = self._began.pop(worker)
        sums, pushes = self._sums.pop(worker), self._pushes.pop(worker, 0)
        for kind in ORDER:
            until = min(end, begin + sums[kind])
            if until > begin:
                yield slice_of(worker, kind, begin, until, {"pushes": pushes})
                begin = until

    def update(self, update: TimelineUpdate) -> Iterator[TraceEvent]:
        if self._first is not None and update.version - self._first.version >= self._number:
            yield self._updated(update.now)
            self._first = None
        self._first, self._latest = self._first or update, update

    def _updated(self, end: float) -> TraceEvent:
        assert self._first is not None and self._latest is not None
        name = f"updates {self._first.version} to {self._latest.version}"
        return {**slice_of(0, name, self._first.now, end, {}), "cat": "server", **SERVER}

    def flush(self) -> Iterator[TraceEvent]:
        for worker in list(self._began):
            yield from self._flush_worker(worker)
        if self._first is not None and self._latest is not None:
            yield self._updated(self._latest.now)


def slice_of(worker: int, name: str, begin: float, end: float, args: dict[str, Any]) -> TraceEvent:
    at = microseconds(begin)
    lasts = {"ts": at, "dur": round(microseconds(end) - at, 3)}
    return {"ph": "X", "name": name, "cat": "worker", **thread_of(worker), **lasts, "args": args}


def metadata(thread: dict[str, int], what: str, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, **thread, "ts": 0, "args": args}


def thread_of(worker: int) -> dict[str, int]:
    return {"pid": WORKERS, "tid": WORKERS + worker}


@dataclass(frozen=True)
class TraceWindow:
    """The seconds of training to draw, and the number of pushes up to which each is drawn by itself."""

    begin: float = 0.0
    end: float = float("inf")
    max_pushes: int = MAX_PUSHES

    def clip(self, span: Span) -> Span | None:
        """Return the part of a span inside the window, or None."""
        if self.begin <= span.begin and span.end <= self.end:
            return span
        begin, end = max(span.begin, self.begin), min(span.end, self.end)
        return span._replace(begin=begin, end=end) if begin < end else None


def write_trace(path: Path, output: Path, part: TraceWindow) -> tuple[int, list[str]]:
    """Write the trace of a run; return its number of events, and notes for the user."""
    trace = ChromeTrace(RunFolder.open(path), part)
    num_events = 0
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if output.suffix == ".gz" else raw  # no date: equal bytes
            with io.TextIOWrapper(packed, encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                for event in trace.events():
                    file.write((",\n" if num_events else "") + to_json(event))
                    num_events += 1
                about = {"run": str(path), "clock": "seconds of training, which stand still during evaluations"}
                file.write(f'\n], "otherData": {to_json({**about, "notes": trace.notes})}}}\n')
        temporary.replace(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}; give another -o FILE") from None
    finally:
        temporary.unlink(missing_ok=True)
    return num_events, trace.notes


class ChromeTrace:
    """The events of one run's trace."""

    def __init__(self, folder: RunFolder, part: TraceWindow) -> None:
        self._folder, self._part, self._config = folder, part, folder.config()
        self._log = _log_of(folder)
        parser = RowParser(folder.events_file)
        self._rows = _effective_rows(folder, parser)
        self.notes = [*_notes_of(self._log), *parser.notes()]
        self._records = self._log.effective_records
        inside = [record for record in self._records if part.begin <= record.now <= part.end]
        pushes = sum(record.kind == "push" for record in inside)
        self._group_size = -(-pushes // part.max_pushes)  # pushes per span
        if self._group_size > 1:
            self.notes.append(
                f"{pushes:,} pushes are too many to draw one by one: each span covers {self._group_size}, without "
                "arrows; --from and --to show a part in full"
            )

    def events(self) -> Iterator[TraceEvent]:
        accounts = TimeReports.of(self._rows, self._config)
        timeline = Timeline(self._config, accounts)
        workers: set[int] = set()
        whole = DetailedTrace(self._server_seconds()) if self._group_size <= 1 else AggregatedTrace(self._group_size)
        for one in timeline.follow(self._records):
            if isinstance(one, TimelineUpdate):
                if self._part.begin <= one.now <= self._part.end:
                    yield from whole.update(one)
            elif (span := self._part.clip(one)) is not None:
                workers.add(span.worker)
                yield from whole.span(span)
        yield from whole.flush()
        yield from self._named(workers)
        yield from self._counted()
        yield from self._happened()
        if timeline.num_mismatched:
            mismatched = timeline.num_mismatched
            self.notes.append(f"{mismatched} pushes do not match the settings: drawn as if answered at once")

    def _server_seconds(self) -> float:
        timing = [row for row in self._rows if row.get("kind") == "timing"]
        return float(timing[-1].get("server_cpu") or 0.0) if timing else 0.0

    def _named(self, workers: set[int]) -> Iterator[TraceEvent]:
        name = self._folder.path.resolve().name
        yield metadata(SERVER, "process_name", name=f"{name}: {self._config.strategy}")
        yield metadata(SERVER, "thread_name", name="server")
        yield metadata(thread_of(0), "process_name", name="workers")
        for worker in sorted(workers):
            yield metadata(thread_of(worker), "thread_name", name=f"worker {worker}")
            yield metadata(thread_of(worker), "thread_sort_index", sort_index=worker)

    def _inside(self, kinds: tuple[str, ...], what: str) -> list[dict[str, Any]]:
        """Return rows of these kinds inside the window, thinned if there are too many."""
        found = [row for row in self._rows if row.get("kind") in kinds and "now" in row]
        found = [row for row in found if self._part.begin <= row["now"] <= self._part.end]
        every = -(-len(found) // MAX_ROWS)
        if every > 1:
            self.notes.append(f"one in {every} of {len(found):,} {what} is drawn")
        return found[:: max(1, every)]

    def _counted(self) -> Iterator[TraceEvent]:
        for row in self._inside(("progress",), "rows of progress"):
            for field, name in COUNTERS.items():
                if isinstance(row.get(field), int | float) and math.isfinite(row[field]):
                    at = microseconds(row["now"])
                    yield {"ph": "C", "name": name, **SERVER, "ts": at, "args": {"value": row[field]}}

    def _happened(self) -> Iterator[TraceEvent]:
        for row in self._inside((*WORKER_EVENTS, *RUN_EVENTS), "events"):
            here = row["kind"] in WORKER_EVENTS and isinstance(row.get("worker"), int)
            thread = {**thread_of(row["worker"]), "s": "t"} if here else {**SERVER, "s": "p"}
            args = {name: value for name, value in row.items() if name not in ("kind", "now")}
            odd = [name for name, value in args.items() if isinstance(value, float) and not math.isfinite(value)]
            args |= {name: str(args[name]) for name in odd}  # JSON has no NaN and no infinity
            name = row["kind"].replace("_", " ")
            yield {"ph": "i", "name": name, "cat": "event", "ts": microseconds(row["now"]), **thread, "args": args}


def _log_of(folder: RunFolder) -> LogContents:
    if not folder.arrivals_file.is_file():
        result = folder.result() or {}
        why = "lab runs have none" if result.get("lab") else "the run never started, or its log is lost"
        raise UserError(f"{folder.path} has no {folder.arrivals_file.name}, which a trace needs: {why}")
    log = scan_log(folder.arrivals_file, folder.config())
    if not log.records:
        raise UserError(f"{folder.arrivals_file} has no records: the run never started")
    return log


def _notes_of(log: LogContents) -> list[str]:
    notes = []
    if log.torn:
        notes.append(f"arrivals.log is cut off or damaged after {len(log.records):,} records: drawn up to there")
    undone = len(log.records) - len(log.effective_indices)
    if undone:
        notes.append(f"{undone:,} records that a resume undid are ignored")
    return notes


def _effective_rows(folder: RunFolder, parser: RowParser) -> list[dict[str, Any]]:
    """Return the event rows without those that a resume undid: the clock went back before them."""
    rows: list[dict[str, Any]] = []
    if folder.events_file.is_file():
        for row in read_events(folder.events_file, parser):
            if row["kind"] == "run_resumed":
                rows = [one for one in rows if one["now"] <= row["now"] or one["kind"] == "fault"]
            rows.append(row)
    return rows
