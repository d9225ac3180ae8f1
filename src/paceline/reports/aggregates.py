"""Aggregates the events and log records of a run as they arrive: the input of the report data."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.analysis.reported import ReportedMetrics
from paceline.analysis.status import STARTS, WINDOW_SECONDS, WorkerStatus, is_whole, workers_of
from paceline.analysis.tail import Records
from paceline.reports.sentences import event_sentence
from paceline.reports.time_series import Column, TimeSeries
from paceline.reports.worker_lanes import WorkerLanes
from paceline.runs.arrival_log import PUSH_KIND

PROGRESS = ("samples", "loss", "staleness", "live", "lr", "step_factor", "norm", "bytes_pushed", "bytes_pulled")
_PARTS = ("test", "validation", "train", "live_test", "live_validation")
EVALUATED = tuple(f"{part}_{what}" for part in _PARTS for what in ("accuracy", "loss"))
SCORES = ("samples", *EVALUATED)
TAKEN = 0  # verdict of an accepted push
MAX_REPORTED = 12  # metrics of an own loop that have a curve
MAX_FIRST_EVENTS, MAX_LAST_EVENTS = 40, 160
"""Events listed one by one, at the start and at the end; those between are counted."""


class Aggregates:
    """Aggregates of one run so far."""

    def __init__(self, places: int) -> None:
        self.first_push: dict[str, float] | None = None
        self.reset_pushes()
        self.progress, self.scores = TimeSeries(*PROGRESS), TimeSeries(*SCORES)
        self.lanes = WorkerLanes(places)
        self.latest: deque[dict[str, Any]] = deque(maxlen=64)  # progress rows of the current server
        self.started = False
        self.last_kind: str | None = None
        self.now = 0.0
        self.counts: dict[str, int] = {}
        self.stale: list[list[int]] | None = None
        self.reported, self.lost = ReportedMetrics(), set[Any]()
        self.curves: dict[str, tuple[int, TimeSeries]] = {}  # by metric: the lowest worker that reported it, its values
        self._accounts: deque[dict[str, Any]] = deque()
        self._first_events: list[dict[str, Any]] = []
        self._last_events: deque[dict[str, Any]] = deque(maxlen=MAX_LAST_EVENTS)
        self._num_events = 0

    def add_pushes(self, records: Records) -> None:
        """Add new records of the log."""
        kept = records[(records["kind"] == PUSH_KIND) & (records["verdict"] == TAKEN)]
        self.num_pushes += len(kept)
        values = {"samples": kept["samples"].astype(float), "loss": kept["loss"].astype(float)}
        if self.first_push is None and len(kept):
            self.first_push = {name: float(kept[name][0]) for name in ("now", "samples", "loss")}
        self.pushes.add(kept["now"], values)
        known = records["now"][np.isfinite(records["now"])]
        if len(known):
            self.now = max(self.now, float(known.max()))

    def reset_pushes(self) -> None:
        """Drop all pushes: a resume undid some, and all effective ones are added again."""
        self.pushes, self.num_pushes = TimeSeries("samples", "loss"), 0
        self.first_push = None

    def add_events(self, rows: list[dict[str, Any]]) -> None:
        """Add new event rows."""
        progress, scores, reports = [], [], []
        for row in rows:
            kind = row["kind"]
            self.last_kind, self.now = kind, max(self.now, float(row["now"]))
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if kind == "progress":
                progress.append(row)
                self.latest.append(row)
            elif kind == "evaluation":
                scores.append(row)
            else:
                self._take(kind, row)
            if kind == "reported" and isinstance(row.get("worker"), int) and isinstance(row.get("figures"), dict):
                reports.append(row)
        self.progress.add(_column(progress, "now"), {name: _column(progress, name) for name in PROGRESS})
        self.scores.add(_column(scores, "now"), {name: _column(scores, name) for name in SCORES})
        self._add_reports(reports)

    def _add_reports(self, rows: list[dict[str, Any]]) -> None:
        for name in dict.fromkeys(name for row in rows for name in row["figures"]):
            mine = [row for row in rows if name in row["figures"]]
            lowest = min(row["worker"] for row in mine)
            if (name not in self.curves and len(self.curves) < MAX_REPORTED) or lowest < self.curves.get(name, (0,))[0]:
                self.curves[name] = lowest, TimeSeries("samples", "value")
            if name in self.curves:
                worker, course = self.curves[name]
                mine = [{**row, "value": row["figures"][name]} for row in mine if row["worker"] == worker]
                course.add(_column(mine, "now"), {key: _column(mine, key) for key in course.names})

    def _take(self, kind: str, row: dict[str, Any]) -> None:
        now, worker = float(row["now"]), row.get("worker")
        if kind in STARTS:
            self.started = True
            self.latest.clear()
            self._accounts.clear()
            self.lanes.begin(now)
        elif kind == "workers" and is_whole(row):
            self._account(row)
        elif kind == "worker_joined" and isinstance(worker, int):
            self.lanes.joined(worker, now)
        elif kind in ("worker_lost", "worker_left") and isinstance(worker, int):
            self.lanes.left(worker, now)
        if kind == "worker_lost":
            self.lost.add(worker)
        elif kind == "reported":
            self.reported.add_row(worker, row.get("figures"))
        text = event_sentence(row)
        if text is not None:
            self._num_events += 1
            kept = self._first_events if len(self._first_events) < MAX_FIRST_EVENTS else self._last_events
            kept.append({"t": round(now, 3), "kind": kind, "text": text, "worker": worker})

    def _account(self, row: dict[str, Any]) -> None:
        self.lanes.add(row)
        self.stale = row.get("stale") or self.stale
        self._accounts.append(row)
        while len(self._accounts) > 2 and self._accounts[1]["now"] < row["now"] - WINDOW_SECONDS:
            self._accounts.popleft()
        while len(self._accounts) > 16:
            del self._accounts[len(self._accounts) // 2]

    def workers(self, whole: bool) -> tuple[list[WorkerStatus], float | None]:
        """Return each worker since the server started (`whole`) or lately, and the seconds covered."""
        if not self._accounts:
            return [], None
        last, first = self._accounts[-1], self._accounts[0]
        if whole or first is last or not any(last["steps"]):
            return workers_of(last), None
        return workers_of(last, first), round(last["now"] - first["now"], 3)

    def listed_events(self) -> tuple[list[dict[str, Any]], int]:
        """Return the listed events, and the number left out."""
        found = [*self._first_events, *self._last_events]
        return found, self._num_events - len(found)


def _column(rows: list[dict[str, Any]], name: str) -> Column:
    return np.array([number(row.get(name)) for row in rows], float)


def number(value: object) -> float:
    """Return the value as a float; NaN if it is not a number."""
    return float(value) if isinstance(value, int | float) else np.nan
