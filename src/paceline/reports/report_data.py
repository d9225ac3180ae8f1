"""What a report shows of one run, read from its folder alone and bounded in size, whatever the run's length.

`RunReader` follows a folder: each `refresh` reads what is new, `digest` says what it all comes to.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.status import UNDER_WAY, RunStatus, seconds_left, status_without_result
from paceline.analysis.stragglers import stragglers
from paceline.analysis.tail import ArrivalFollower, EventFollower
from paceline.config import RunConfig, is_simulated, places_of, to_dict
from paceline.errors import UserError
from paceline.reports.sentences import class_names, closing, verdict
from paceline.reports.status_table import MOST_WORKERS, findings
from paceline.reports.tally import SCORES, Tally
from paceline.reports.time_series import Course, plain, rates
from paceline.runs.folder import RunFolder

MOST_BARS = 48
"""Of a histogram."""
FIGURES = (
    "samples",
    "updates",
    "reason",
    "dropped_pushes",
    "late_pushes",
    "lost_pushes",
    "bytes_pushed",
    "bytes_pulled",
)
PARTS = ("train", "validation", "test")


class RunReader:
    """Follows one run's folder from where it stopped reading."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.open(path)
        self._begin()

    def _begin(self) -> None:
        self._problems: list[str] = []
        self._config = self._read_config()
        self._result: dict[str, Any] | None = None
        self._events = EventFollower(self.folder.events_file)
        self._arrivals = ArrivalFollower(self.folder.arrivals_file)
        self._tally = Tally(places_of(self._config) if self._config is not None else 1)
        self._signs: dict[str, tuple[int, ...]] = {}
        self._status: str | None = None

    def _read_config(self) -> RunConfig | None:
        try:
            return self.folder.config()
        except UserError as error:
            self._problems.append(str(error))
            return None

    def refresh(self) -> bool:
        """Read what is new; whether anything changed."""
        files = (self.folder.config_file, self.folder.events_file, self.folder.arrivals_file, self.folder.result_file)
        signs = {file.name: _sign(file) for file in files}
        if self._is_another(signs):
            self._begin()
        if signs != self._signs:
            self._signs = signs
            self._result = self._read_result()
            self._tally.take_rows(self._events.read())
            self._arrivals.read(self._tally.take_pushes, self._tally.forget_pushes)
            self._status = self._stand()
            return True
        before, self._status = self._status, self._stand()
        return before != self._status

    def _is_another(self, signs: dict[str, tuple[int, ...]]) -> bool:
        """Whether a file that only grows is another one now, or the settings are."""
        config = self.folder.config_file.name
        for name, old in self._signs.items():
            if name != self.folder.result_file.name and old and (old[:1] != signs[name][:1] or old[1] > signs[name][1]):
                return True
        return bool(self._signs) and self._signs[config] != signs[config]

    def _read_result(self) -> dict[str, Any] | None:
        try:
            found = self.folder.result()
        except UserError as error:
            self._problems = [*(one for one in self._problems if one != str(error)), str(error)]
            return None
        return found if isinstance(found, dict) else None

    def _stand(self) -> str:
        if self._config is None:
            return "damaged"
        if self._result is not None:
            return str(self._result.get("status", "damaged"))
        return status_without_result(self.folder, len(self._tally.latest) > 0, self._tally.last_kind)

    def digest(self) -> dict[str, Any]:
        """Everything a page shows, as JSON values."""
        status, tally = self._status or self._stand(), self._tally
        settings = to_dict(self._config) if self._config is not None else {}
        figures = self._figures(status)
        going_on = status in UNDER_WAY
        happenings, left_out = tally.told()
        classes = class_names(settings)
        lines = closing(self._result, classes, str(self.folder.path))
        stop = status in ("stopped", "killed") and self._config is not None
        workers, findings_found = self._workers(status)
        return {
            "id": str(self.folder.path),
            "name": self.folder.path.name,
            "status": status,
            "going_on": going_on,
            "verdict": verdict(status, figures, self.folder.way_on(self._config) if stop and self._config else None),
            "closing": lines,
            "notes": self._notes(going_on),
            "figures": figures,
            "course": _loss(tally),
            "rate": _rate(tally),
            "progress": _progress(tally.progress),
            "scores": self._scores(),
            "per_class": _per_class(self._result, classes),
            "staleness": self._staleness(),
            "timeline": tally.lanes.digest(tally.now),
            "workers": workers,
            "findings": findings_found,
            "happenings": happenings,
            "happenings_left_out": left_out,
            "settings": settings,
            "machine": (self._result or {}).get("environment") or {},
            **self._origin(),
        }

    def _origin(self) -> dict[str, Any]:
        origin, result = self.folder.origin(), self._result or {}
        return {
            "command": origin.get("command"),
            "made": origin.get("made"),
            "git": result.get("git"),
            "weights_sha256": result.get("weights_sha256"),
            "data_origin": result.get("data_origin"),
        }

    def _figures(self, status: str) -> dict[str, Any]:
        """What stands in the result, or as far as the events have it."""
        result, tally, config = self._result or {}, self._tally, self._config
        last = tally.latest[-1] if tally.latest else {}
        row = {**last, **result}
        simulated = config is not None and is_simulated(config) and not result.get("lab")
        found: dict[str, Any] = {name: row.get(name) for name in FIGURES}
        found |= {f"{part}_{what}": row.get(f"{part}_{what}") for part in PARTS for what in ("accuracy", "loss")}
        found["scored_early"] = False
        if all(found[name] is None for name in SCORES[1:]):
            found |= {name: _last(tally.scores, name) for name in SCORES[1:]}
            found["scored_early"] = any(found[name] is not None for name in SCORES[1:])
        over = status == "finished" and not result.get("reason")
        return found | {
            "seconds": result.get("train_seconds") or tally.now or None,
            "rate": result.get("samples_per_second") or last.get("rate"),
            "loss": last.get("loss"),
            "fraction": 1.0 if over else last.get("fraction"),
            "seconds_left": seconds_left(tally.latest)
            if status == "running" and not simulated and tally.latest
            else None,
            "workers": config.workers if config is not None else result.get("workers"),
            "live": last.get("live"),
            "simulated": simulated,
            "lab": bool(result.get("lab")),
            "staleness": result.get("staleness"),
            "num_parameters": result.get("num_parameters"),
            "pushes": tally.num_pushes or None,
            "checkpoints": tally.counts.get("checkpoint", 0),
            "lost_workers": len(result.get("lost_workers") or ()) or tally.counts.get("worker_lost", 0),
            "resumes": tally.counts.get("run_resumed", 0),
        }

    def _notes(self, going_on: bool) -> list[str]:
        notes = [*self._problems, *self._events.notes(going_on), *self._arrivals.notes(going_on)]
        if not self._tally.started and not going_on:
            if (self._result or {}).get("lab"):
                notes.append("this run was made in the lab, which keeps no course: its end is all there is to show")
            elif not self.folder.events_file.exists():
                notes.append(
                    f"{self.folder.events_file.name} is missing: the run never started, or its events were lost"
                )
        return notes

    def _scores(self) -> dict[str, list[float | None]]:
        """Evaluations on the way, and the one at the end."""
        course, result = self._tally.scores, self._result or {}
        columns = {name: course.last(name) for name in SCORES}
        times = course.times
        end = [result.get(name) for name in SCORES]
        if any(value is not None for value in end[1:]):
            times = np.append(times, float(result.get("train_seconds") or self._tally.now))
            columns = {name: np.append(columns[name], _or_nan(value)) for name, value in zip(SCORES, end, strict=True)}
        return {"t": plain(times), **{name: plain(column, 7) for name, column in columns.items()}}

    def _staleness(self) -> list[list[int]]:
        """A histogram: from, to, pushes."""
        counted = (self._result or {}).get("staleness_histogram")
        pairs = [[int(value), int(count)] for value, count in counted.items()] if isinstance(counted, dict) else None
        return bars(pairs if pairs is not None else self._tally.stale or [])

    def _workers(self, status: str) -> tuple[list[dict[str, Any]], list[str]]:
        """The worst first where there are many; and who is slow and why."""
        simulated = self._config is not None and is_simulated(self._config)
        workers, span = self._tally.workers(whole=simulated or status not in UNDER_WAY)
        found = stragglers(workers)
        slow = {one.worker: one.cause for one in found}
        shown = workers if len(workers) <= MOST_WORKERS else sorted(workers, key=lambda one: one.worker not in slow)
        count = self._config.workers or 1 if self._config is not None else 1
        about = RunStatus("", "", "", count, status, simulated=simulated, span=span, workers=tuple(workers))
        rows = [{**dataclasses.asdict(one), "slow": slow.get(one.worker)} for one in shown[:MOST_WORKERS]]
        return rows, findings(about, found)


def _sign(file: Path) -> tuple[int, ...]:
    """By which a change is seen; empty where there is no file."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _last(course: Course, name: str) -> float | None:
    values = course.carried(name)
    return plain(values[-1:], 7)[0] if len(values) else None


def _loss(tally: Tally) -> dict[str, list[float | None]]:
    """The train loss, from every push where the log has them, else from the progress rows."""
    course = tally.pushes if tally.num_pushes else tally.progress
    samples = np.cumsum(course.total("samples")) if tally.num_pushes else course.carried("samples")
    return {
        "t": plain(course.times),
        "samples": plain(samples, 7),
        "loss": plain(course.mean("loss")),
        "low": plain(course.least("loss")),
        "high": plain(course.greatest("loss")),
        "count": plain(course.count[course.seen]),
    }


def _rate(tally: Tally) -> dict[str, list[float | None]]:
    """Samples a second over time."""
    course = tally.pushes if tally.num_pushes else tally.progress
    amounts = course.total("samples") if tally.num_pushes else np.diff(course.carried("samples"), prepend=0.0)
    times, values = rates(course.times, amounts)
    return {"t": plain(times), "rate": plain(values)}


def _progress(course: Course) -> dict[str, list[float | None]]:
    found = {"t": plain(course.times), "samples": plain(course.carried("samples"), 7)}
    found["live_low"] = plain(course.least("live"))
    for name in ("staleness", "live", "lr", "norm", "bytes_pushed", "bytes_pulled"):
        values = course.last(name)
        if np.isfinite(values).any():
            found[name] = plain(values, 7 if name.startswith("bytes") else 5)
    return found


def _per_class(result: dict[str, Any] | None, classes: tuple[str, ...] | None) -> list[list[Any]]:
    scores = (result or {}).get("per_class_accuracy") or []
    names = classes if classes is not None and len(classes) == len(scores) else tuple(map(str, range(len(scores))))
    return [[name, value] for name, value in zip(names, scores, strict=True)]


def bars(counted: list[list[int]]) -> list[list[int]]:
    """Counts by value as a histogram of at most MOST_BARS bars of equal width: from, to, count.

    >>> bars([[0, 5], [2, 1]])
    [[0, 0, 5], [1, 1, 0], [2, 2, 1]]
    """
    if not counted:
        return []
    least, most = min(value for value, _ in counted), max(value for value, _ in counted)
    start = least if 2 * least > most else 0
    width = (most - start) // MOST_BARS + 1
    found = [0] * ((most - start) // width + 1)
    for value, count in counted:
        found[(value - start) // width] += count
    return [[start + place * width, start + place * width + width - 1, count] for place, count in enumerate(found)]
