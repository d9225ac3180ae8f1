"""A run as a trace of Chrome's JSON format, for ui.perfetto.dev: a track a worker, the server's updates, counters.

Reads run folders only. Bounded: of a long run several pushes become one span, and what was left out is said.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.analysis.timeline import Accounts, Span, Timeline, Update
from paceline.errors import UserError
from paceline.runs.arrival_log import Log, look_into
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder

WORKERS = 2
"""The number of the workers' process in the trace, and of the first worker's thread; the server is 1."""


SERVER = {"pid": 1, "tid": 1}


ORDER = ("computing", "sending", "waiting", "paused")


TraceEvent = dict[str, Any]


def microseconds(seconds: float) -> float:
    """As the format wants it; all ends are rounded alike, so that spans that meet still do."""
    return round(seconds * 1e6, 3)


class OneByOne:
    """Every span and update, with an arrow from each push to the update it went into."""

    def __init__(self, server_seconds: float) -> None:
        self._seconds = server_seconds
        self._sent: dict[int, tuple[int, float]] = {}
        self._last: Update | None = None

    def span(self, span: Span) -> Iterator[TraceEvent]:
        args = {} if span.push is None else {"push": span.push}
        if span.fate is not None:
            args["fate"] = span.fate  # type: ignore[assignment]
            if span.fate == "taken" and span.push is not None:
                self._sent[span.push] = span.worker, (span.begin + span.end) / 2
        yield slice_of(span.worker, span.kind, span.begin, span.end, args)

    def update(self, update: Update) -> Iterator[TraceEvent]:
        if self._last is not None:
            yield self._updated(self._last, update.now)
        self._last = update
        for push in update.pushes:
            if push in self._sent:
                worker, at = self._sent.pop(push)
                arrow = {"name": "push", "cat": "push", "id": push}
                yield {"ph": "s", **arrow, **place_of(worker), "ts": microseconds(at)}
                yield {"ph": "f", "bp": "e", **arrow, **SERVER, "ts": microseconds(update.now)}

    def _updated(self, update: Update, before: float) -> TraceEvent:
        end = min(update.now + self._seconds, max(before, update.now))
        args = {"version": update.version, "pushes": len(update.pushes)}
        return {**slice_of(0, f"update {update.version}", update.now, end, args), "cat": "server", **SERVER}

    def rest(self) -> Iterator[TraceEvent]:
        if self._last is not None:
            yield self._updated(self._last, self._last.now + self._seconds)


class Together:
    """So many pushes of a worker as one: how long it computed, sent, waited; and so many updates as one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._sums: dict[int, dict[str, float]] = {}
        self._began: dict[int, tuple[float, float]] = {}
        self._pushes: dict[int, int] = {}
        self._first: Update | None = None
        self._latest: Update | None = None

    def span(self, span: Span) -> Iterator[TraceEvent]:
        if span.kind == "dead":
            yield from self._drawn(span.worker)
            yield slice_of(span.worker, "dead", span.begin, span.end, {})
            return
        sums = self._sums.setdefault(span.worker, dict.fromkeys(ORDER, 0.0))
        sums[span.kind] += span.end - span.begin
        self._began[span.worker] = self._began.get(span.worker, (span.begin, 0.0))[0], span.end
        if span.fate is not None:
            self._pushes[span.worker] = self._pushes.get(span.worker, 0) + 1
            if self._pushes[span.worker] >= self._number:
                yield from self._drawn(span.worker)

    def _drawn(self, worker: int) -> Iterator[TraceEvent]:
        if worker not in self._began:
            return
        begin, end = self._began.pop(worker)
        sums, pushes = self._sums.pop(worker), self._pushes.pop(worker, 0)
        for kind in ORDER:
            until = min(end, begin + sums[kind])
            if until > begin:
                yield slice_of(worker, kind, begin, until, {"pushes": pushes})
                begin = until

    def update(self, update: Update) -> Iterator[TraceEvent]:
        if self._first is not None and update.version - self._first.version >= self._number:
            yield self._updated(update.now)
            self._first = None
        self._first, self._latest = self._first or update, update

    def _updated(self, end: float) -> TraceEvent:
        assert self._first is not None and self._latest is not None
        name = f"updates {self._first.version} to {self._latest.version}"
        return {**slice_of(0, name, self._first.now, end, {}), "cat": "server", **SERVER}

    def rest(self) -> Iterator[TraceEvent]:
        for worker in list(self._began):
            yield from self._drawn(worker)
        if self._first is not None and self._latest is not None:
            yield self._updated(self._latest.now)


def slice_of(worker: int, name: str, begin: float, end: float, args: dict[str, Any]) -> TraceEvent:
    at = microseconds(begin)
    lasts = {"ts": at, "dur": round(microseconds(end) - at, 3)}
    return {"ph": "X", "name": name, "cat": "worker", **place_of(worker), **lasts, "args": args}


def metadata(place: dict[str, int], what: str, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, **place, "ts": 0, "args": args}


def place_of(worker: int) -> dict[str, int]:
    return {"pid": WORKERS, "tid": WORKERS + worker}


def finite(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


MOST_PUSHES = 30_000
MOST_ROWS = 5_000
COUNTERS = {"loss": "loss", "rate": "samples/s", "staleness": "staleness", "updates": "version", "lr": "lr"}
HERE = ("worker_joined", "worker_left", "worker_lost", "worker_draining", "local_steps")
EVERYWHERE = ("evaluation", "checkpoint", "fault", "deal", "stopped", "run_resumed", "recovered", "run_ended")


@dataclass(frozen=True)
class Part:
    """Which seconds of training are drawn, and how many pushes at most one by one."""

    begin: float = 0.0
    end: float = float("inf")
    most: int = MOST_PUSHES

    def cut(self, span: Span) -> Span | None:
        """What of a span lies in it."""
        if self.begin <= span.begin and span.end <= self.end:
            return span
        begin, end = max(span.begin, self.begin), min(span.end, self.end)
        return span._replace(begin=begin, end=end) if begin < end else None


def write_trace(path: Path, output: Path, part: Part) -> tuple[int, list[str]]:
    """Write the trace of a run; returns how many events it has, and what the user should know of it."""
    folder = RunFolder.open(path)
    trace = Trace(folder, part)
    num_events = 0
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw:
            with _text(raw, output) as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                for event in trace.events():
                    file.write((",\n" if num_events else "") + json.dumps(event))
                    num_events += 1
                about = {"run": str(path), "clock": "seconds of training, which stand still during evaluations"}
                file.write(f'\n], "otherData": {json.dumps({**about, "notes": trace.notes})}}}\n')
        temporary.replace(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}; give another -o FILE") from None
    finally:
        temporary.unlink(missing_ok=True)
    return num_events, trace.notes


def _text(raw: BinaryIO, output: Path) -> io.TextIOWrapper:
    """Compressed, where the name says so; the same run gives the same bytes."""
    if output.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile("", "wb", 6, raw, mtime=0), encoding="utf-8", write_through=False)
    return io.TextIOWrapper(raw, encoding="utf-8", write_through=False)


class Trace:
    """The events of one run's trace."""

    def __init__(self, folder: RunFolder, part: Part) -> None:
        self._folder, self._part, self._config = folder, part, folder.config()
        self._log = _log_of(folder)
        self._rows = _standing_rows(folder)
        self.notes = _notes_of(self._log)
        inside = [record for record in self._standing() if part.begin <= record.now <= part.end]
        pushes = sum(record.kind == "push" for record in inside)
        self._together = -(-pushes // part.most)
        """Pushes that become one."""
        if self._together > 1:
            self.notes.append(
                f"{pushes:,} pushes are too many to draw one by one: a span is {self._together} of them, without "
                "arrows; --from and --to show a part in full"
            )

    def _standing(self) -> Iterable[Any]:
        return (self._log.records[place] for place in self._log.standing)

    def events(self) -> Iterator[TraceEvent]:
        accounts = Accounts.of(self._rows, self._config)
        timeline = Timeline(self._config, accounts)
        workers: set[int] = set()
        whole = OneByOne(self._server_seconds()) if self._together <= 1 else Together(self._together)
        for one in timeline.follow(self._standing()):
            if isinstance(one, Update):
                if self._part.begin <= one.now <= self._part.end:
                    yield from whole.update(one)
            elif (span := self._part.cut(one)) is not None:
                workers.add(span.worker)
                yield from whole.span(span)
        yield from whole.rest()
        yield from self._named(workers)
        yield from self._counted()
        yield from self._happened()
        if timeline.num_astray:
            self.notes.append(
                f"{timeline.num_astray} pushes were answered otherwise than the settings say: drawn as answered at once"
            )

    def _server_seconds(self) -> float:
        timing = [row for row in self._rows if row.get("kind") == "timing"]
        return float(timing[-1].get("server_cpu") or 0.0) if timing else 0.0

    def _named(self, workers: set[int]) -> Iterator[TraceEvent]:
        name = self._folder.path.resolve().name
        yield metadata(SERVER, "process_name", name=f"{name}: {self._config.strategy}")
        yield metadata(SERVER, "thread_name", name="server")
        yield metadata(place_of(0), "process_name", name="workers")
        for worker in sorted(workers):
            yield metadata(place_of(worker), "thread_name", name=f"worker {worker}")
            yield metadata(place_of(worker), "thread_sort_index", sort_index=worker)

    def _inside(self, kinds: tuple[str, ...], what: str) -> list[dict[str, Any]]:
        """Rows of these kinds in the part that is drawn, thinned where there are too many."""
        found = [row for row in self._rows if row.get("kind") in kinds and "now" in row]
        found = [row for row in found if self._part.begin <= row["now"] <= self._part.end]
        every = -(-len(found) // MOST_ROWS)
        if every > 1:
            self.notes.append(f"of {len(found):,} {what} one in {every} is drawn")
        return found[:: max(1, every)]

    def _counted(self) -> Iterator[TraceEvent]:
        for row in self._inside(("progress",), "rows of progress"):
            for field, name in COUNTERS.items():
                if isinstance(row.get(field), int | float) and math.isfinite(row[field]):
                    at = microseconds(row["now"])
                    yield {"ph": "C", "name": name, **SERVER, "ts": at, "args": {"value": row[field]}}

    def _happened(self) -> Iterator[TraceEvent]:
        for row in self._inside((*HERE, *EVERYWHERE), "happenings"):
            here = row["kind"] in HERE and isinstance(row.get("worker"), int)
            place = {**place_of(row["worker"]), "s": "t"} if here else {**SERVER, "s": "p"}
            args = {name: finite(value) for name, value in row.items() if name not in ("kind", "now")}
            name = row["kind"].replace("_", " ")
            yield {"ph": "i", "name": name, "cat": "event", "ts": microseconds(row["now"]), **place, "args": args}


def _log_of(folder: RunFolder) -> Log:
    if not folder.arrivals_file.is_file():
        result = folder.result() or {}
        why = "runs of the lab keep none" if result.get("lab") else "the run never started, or its log was lost"
        raise UserError(f"{folder.path} has no {folder.arrivals_file.name}, which a trace is made from: {why}")
    log = look_into(folder.arrivals_file, folder.config())
    if not log.records:
        raise UserError(f"{folder.arrivals_file} holds no record: the run never started")
    return log


def _notes_of(log: Log) -> list[str]:
    notes = []
    if log.torn:
        notes.append(f"arrivals.log is cut off or damaged after {len(log.records):,} records: drawn up to there")
    undone = len(log.records) - len(log.standing)
    if undone:
        notes.append(f"{undone:,} records that a resume took back are left out")
    return notes


def _standing_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """The event rows, without those that a resume took back: the clock went on from before them."""
    rows: list[dict[str, Any]] = []
    if folder.events_file.is_file():
        for row in read_events(folder.events_file):
            if row.get("kind") == "run_resumed" and isinstance(row.get("now"), int | float):
                rows = [one for one in rows if one.get("now", 0.0) <= row["now"] or one.get("kind") == "fault"]
            rows.append(row)
    return rows
