"""The worker timeline of a report: presence and use of time per lane; in large runs workers share a lane."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.status import PARTS

MAX_LANES = 48
MAX_SEGMENTS = 1600  # over all lanes
MAX_STAYS = 64  # per worker
AWAY = ("lost", "awaited")
Row = tuple[int, float, NDArray[np.float64], NDArray[np.float64]]


class WorkerLanes:
    """Collects `workers` events and joins and departures of workers, per lane."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = max(1, num_workers)
        self.count = min(self.num_workers, MAX_LANES)
        self._of = np.arange(self.num_workers) * self.count // self.num_workers
        self._sizes = np.bincount(self._of, minlength=self.count).astype(float)
        self._most = max(12, MAX_SEGMENTS // self.count)
        self._rows: list[Row] = []
        self._server_number = 0
        self._here: dict[int, float] = {}
        self._stays: dict[int, list[tuple[float, float]]] = {}

    def begin(self, now: float) -> None:
        """A new server started: its accounts begin at zero, and every worker joins again."""
        self._server_number += 1
        if self._server_number == 1:  # a large simulation gives but one account, at its end
            self._rows.append((1, now, np.zeros((len(PARTS), self.count)), np.zeros(self.count)))
        for worker in list(self._here):
            self.left(worker, now)

    def joined(self, worker: int, now: float) -> None:
        self.left(worker, now)
        self._here[worker] = now

    def left(self, worker: int, now: float) -> None:
        began = self._here.pop(worker, None)
        if began is not None:
            stays = self._stays.setdefault(worker, [])
            stays.append((began, now))
            del stays[:-MAX_STAYS]

    def add(self, row: dict[str, Any]) -> None:
        """Add a `workers` event with complete columns."""
        lanes = self._of[[worker for worker in row["worker"] if worker < self.num_workers]]
        known = len(lanes)
        sums = np.zeros((len(PARTS), self.count))
        for place, part in enumerate(PARTS):
            if part in row:
                sums[place] = np.bincount(lanes, np.array(row[part][:known], float), self.count)
        gone = np.array([state in AWAY for state in row["state"][:known]], float)
        away = np.bincount(lanes, gone, self.count).astype(float)
        self._rows.append((self._server_number, row["now"], sums, away))
        if len(self._rows) > 2 * self._most:
            self._thin()

    def _thin(self) -> None:
        """Drop every second row, except the first and last of a server: rows are running sums, so none is lost."""
        rows, kept = self._rows, []
        for place, row in enumerate(rows):
            at_edge = place in (0, len(rows) - 1) or rows[place - 1][0] != row[0] or rows[place + 1][0] != row[0]
            if at_edge or place % 2 == 0:
                kept.append(row)
        self._rows = kept

    def digest(self, now: float) -> dict[str, Any]:
        """Return each lane's stays, and its segments: begin, end, then the percentage of each part and of absence."""
        segments = self._segments()
        lanes = []
        for lane in range(self.count):
            members = np.flatnonzero(self._of == lane)
            name = str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}"
            here = self._spans(members.tolist(), now)
            lanes.append({"name": name, "size": len(members), "here": here, "segments": segments[lane]})
        return {"parts": [*PARTS, "away"], "lanes": lanes, "grouped": self.count < self.num_workers}

    def _spans(self, members: Iterable[int], now: float) -> list[list[float]]:
        """Return the intervals in which any worker of a lane was present."""
        stays = [stay for worker in members for stay in self._stays.get(worker, ())]
        stays += [(self._here[worker], now) for worker in members if worker in self._here]
        joined: list[list[float]] = []
        for begin, end in sorted(stays):
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        return [[round(begin, 4), round(end, 4)] for begin, end in joined[-MAX_STAYS:]]

    def _segments(self) -> list[list[list[float]]]:
        while len(self._rows) > self._most + 1:
            before = len(self._rows)
            self._thin()
            if len(self._rows) == before:
                break
        found: list[list[list[float]]] = [[] for _ in range(self.count)]
        for earlier, later in zip(self._rows, self._rows[1:], strict=False):
            if earlier[0] != later[0] or later[1] <= earlier[1]:
                continue
            whole = (later[1] - earlier[1]) * self._sizes
            away = (earlier[3] + later[3]) / 2 / self._sizes if self.count < self.num_workers else np.zeros(self.count)
            shares = np.vstack([np.maximum(0.0, later[2] - earlier[2]) / whole, away])
            shares = np.round(100 * shares / np.maximum(1.0, shares.sum(0))).astype(int)
            for lane in np.flatnonzero(shares.sum(0)):
                found[lane].append([round(earlier[1], 4), round(later[1], 4), *shares[:, lane].tolist()])
        return found
