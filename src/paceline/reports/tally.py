"""What the rows and records of a run add up to, taken in as they come: all that a digest is made of."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.analysis.status import STARTS, WINDOW_SECONDS, WorkerStatus, is_whole, workers_of
from paceline.analysis.tail import Records
from paceline.reports.sentences import happening
from paceline.reports.time_series import Column, Course
from paceline.reports.worker_lanes import Lanes
from paceline.runs.arrival_log import PUSH_KIND

PROGRESS = ("samples", "loss", "staleness", "live", "lr", "norm", "bytes_pushed", "bytes_pulled")
SCORES = ("samples", "test_accuracy", "test_loss", "train_accuracy", "train_loss")
TAKEN = 0
"""The verdict on a push that counts."""
FIRST_TOLD, LAST_TOLD = 40, 160
"""Happenings that are told one by one; those between are counted."""


class Tally:
    """One run, so far."""

    def __init__(self, places: int) -> None:
        self.pushes = Course("samples", "loss")
        self.num_pushes = 0
        self.progress = Course(*PROGRESS)
        self.scores = Course(*SCORES)
        self.lanes = Lanes(places)
        self.latest: deque[dict[str, Any]] = deque(maxlen=64)
        """Progress rows of the server that serves now."""
        self.started = False
        self.last_kind: str | None = None
        self.now = 0.0
        self.counts: dict[str, int] = {}
        self.stale: list[list[int]] | None = None
        self._accounts: deque[dict[str, Any]] = deque()
        self._first_told: list[dict[str, Any]] = []
        self._last_told: deque[dict[str, Any]] = deque(maxlen=LAST_TOLD)
        self._num_told = 0

    def take_pushes(self, records: Records) -> None:
        """New records of the log."""
        kept = records[(records["kind"] == PUSH_KIND) & (records["verdict"] == TAKEN)]
        self.num_pushes += len(kept)
        values = {"samples": kept["samples"].astype(float), "loss": kept["loss"].astype(float)}
        self.pushes.add(kept["now"], values)
        if len(records):
            self.now = max(self.now, float(np.nanmax(records["now"])))

    def forget_pushes(self) -> None:
        """What was taken no longer stands: all of it comes again."""
        self.pushes, self.num_pushes = Course("samples", "loss"), 0

    def take_rows(self, rows: list[dict[str, Any]]) -> None:
        """New rows of events."""
        progress, scores = [], []
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
        self.progress.add(_column(progress, "now"), {name: _column(progress, name) for name in PROGRESS})
        self.scores.add(_column(scores, "now"), {name: _column(scores, name) for name in SCORES})

    def _take(self, kind: str, row: dict[str, Any]) -> None:
        now, worker = float(row["now"]), row.get("worker")
        if kind in STARTS:
            self.started = True
            self.latest.clear()
            self._accounts.clear()
            self.lanes.begin(now)
        elif kind == "workers":
            self._account(row)
        elif kind == "worker_joined" and isinstance(worker, int):
            self.lanes.joined(worker, now)
        elif kind in ("worker_lost", "worker_left") and isinstance(worker, int):
            self.lanes.left(worker, now)
        text = happening(row)
        if text is not None:
            self._tell({"t": round(now, 3), "kind": kind, "text": text, "worker": worker})

    def _account(self, row: dict[str, Any]) -> None:
        if not is_whole(row):
            return
        self.lanes.add(row)
        self.stale = row.get("stale") or self.stale
        self._accounts.append(row)
        while len(self._accounts) > 2 and self._accounts[1]["now"] < row["now"] - WINDOW_SECONDS:
            self._accounts.popleft()
        while len(self._accounts) > 16:
            del self._accounts[len(self._accounts) // 2]

    def workers(self, whole: bool) -> tuple[list[WorkerStatus], float | None]:
        """Each worker since the server began, or lately; and how long that is."""
        if not self._accounts:
            return [], None
        last, first = self._accounts[-1], self._accounts[0]
        if whole or first is last or not any(last["steps"]):
            return workers_of(last), None
        return workers_of(last, first), round(last["now"] - first["now"], 3)

    def _tell(self, told: dict[str, Any]) -> None:
        self._num_told += 1
        if len(self._first_told) < FIRST_TOLD:
            self._first_told.append(told)
        else:
            self._last_told.append(told)

    def told(self) -> tuple[list[dict[str, Any]], int]:
        """What happened, and how much of it is left out."""
        found = [*self._first_told, *self._last_told]
        return found, self._num_told - len(found)


def _column(rows: list[dict[str, Any]], name: str) -> Column:
    return np.array([_number(row.get(name)) for row in rows], float)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
