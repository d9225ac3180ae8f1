"""What a trace of Chrome's JSON format is made of: spans of workers and updates, one by one or several as one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline.analysis.timeline import Span, Update

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
