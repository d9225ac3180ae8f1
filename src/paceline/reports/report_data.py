"""The data of a report on one run, read from its folder and bounded in size for any length of run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.differences import compared_settings
from paceline.analysis.naming import NO_DATA, model_name, own_source, read_named_settings, subject
from paceline.analysis.reported import read_reported
from paceline.analysis.scored_weights import SCORES as FINAL_SCORES
from paceline.analysis.scored_weights import by_weights, kind_of
from paceline.analysis.status import UNDER_WAY, RunStatus, seconds_left, status_without_result, workers_of_result
from paceline.analysis.stragglers import stragglers
from paceline.analysis.tail import ArrivalFollower, EventFollower
from paceline.config import RunConfig, is_simulated, max_workers_of
from paceline.errors import UserError
from paceline.reports.aggregates import EVALUATED, SCORES, Aggregates, number
from paceline.reports.sentences import class_names, closing, outcome_sentence
from paceline.reports.status_table import MAX_WORKERS, findings
from paceline.reports.time_series import TimeSeries, plain, rates
from paceline.runs.folder import RunFolder
from paceline.settings.strategies import moves_bytes

MAX_BARS = 48  # bars of a histogram
FIGURES = (
    *("samples", "updates", "reason", "dropped_pushes", "late_pushes", "lost_pushes", "bytes_pushed", "bytes_pulled"),
)


class RunReader:
    """Follows one run folder: each `refresh` reads what is new, `digest` returns the report data."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.open(path)
        self._begin()

    def _begin(self) -> None:
        self._problems: list[str] = []
        self._config = self._read_config()
        self._result: dict[str, Any] | None = None
        self._events = EventFollower(self.folder.events_file)
        self._arrivals = ArrivalFollower(self.folder.arrivals_file)
        self._aggregates = Aggregates(max_workers_of(self._config) if self._config is not None else 1)
        self._states: dict[str, tuple[int, ...]] = {}
        self._status: str | None = None

    def _read_config(self) -> RunConfig | None:
        try:
            return self.folder.config()
        except UserError as error:
            self._problems.append(str(error))
            return None

    def refresh(self) -> bool:
        """Read new data; return whether anything changed."""
        files = (self.folder.config_file, self.folder.events_file, self.folder.arrivals_file, self.folder.result_file)
        states = {file.name: _file_state(file) for file in files}
        if self._was_replaced(states):
            self._begin()
        if states != self._states:
            self._states = states
            self._result = self._read_result()
            self._aggregates.add_events(self._events.read())
            self._arrivals.read(self._aggregates.add_pushes, self._aggregates.reset_pushes)
            self._status = self._current_status()
            return True
        before, self._status = self._status, self._current_status()
        return before != self._status

    def _was_replaced(self, states: dict[str, tuple[int, ...]]) -> bool:
        """Return whether an append-only file was replaced or the settings changed."""
        config = self.folder.config_file.name
        for name, old in self._states.items():
            new = states[name]
            if name != self.folder.result_file.name and old and (old[:1] != new[:1] or old[1] > new[1]):
                return True
        return bool(self._states) and self._states[config] != states[config]

    def _read_result(self) -> dict[str, Any] | None:
        try:
            found = self.folder.result()
        except UserError as error:
            self._problems = [*(one for one in self._problems if one != str(error)), str(error)]
            return None
        return found if isinstance(found, dict) else None

    def _current_status(self) -> str:
        if self._config is None:
            return "damaged"
        if self._result is not None:
            return str(self._result.get("status", "damaged"))
        return status_without_result(self.folder, len(self._aggregates.latest) > 0, self._aggregates.last_kind)

    def digest(self) -> dict[str, Any]:
        """Return the report data as JSON values."""
        status, aggregates, config = self._status or self._current_status(), self._aggregates, self._config
        settings = read_named_settings(self.folder, config, self._result) if config is not None else {}
        figures, going_on, classes = self._figures(status), status in UNDER_WAY, class_names(settings)
        happenings, left_out = aggregates.listed_events()
        resume_hint = self.folder.resume_hint(config) if status in ("stopped", "killed") and config else None
        workers, workers_left_out, findings_found = self._workers(status)
        origin, result = self.folder.origin(), self._result or {}
        return {
            "id": str(self.folder.path),
            "name": self.folder.path.name,
            "status": status,
            "going_on": going_on,
            **run_names(settings),
            "verdict": outcome_sentence(status, figures, resume_hint),
            "closing": closing(self._result, classes, str(self.folder.path), self._shares()),
            "notes": self._notes(going_on),
            "figures": figures,
            "course": _loss(aggregates),
            "rate": _rate(aggregates),
            "progress": _progress(aggregates.progress, config is None or moves_bytes(config)),
            "scores": self._scores(),
            "reported": {name: _reported(course) for name, (_, course) in aggregates.curves.items()},
            "per_class": _per_class(self._result, classes),
            "staleness": self._staleness(),
            "timeline": aggregates.lanes.digest(aggregates.now),
            "workers": workers,
            "workers_left_out": workers_left_out,
            "findings": findings_found,
            "happenings": happenings,
            "happenings_left_out": left_out,
            "settings": settings,
            "compared": compared_settings(config, self._result, settings) if config is not None else {},
            "machine": result.get("environment") or {},
            **{name: origin.get(name) for name in ("command", "made")},
            **{name: result.get(name) for name in ("git", "weights_sha256", "data_origin")},
        }

    def _figures(self, status: str) -> dict[str, Any]:
        """Return the figures of the result, or those in the events so far."""
        result, aggregates, config = self._result or {}, self._aggregates, self._config
        last = aggregates.latest[-1] if aggregates.latest else {}
        row = {**last, **result}
        simulated = config is not None and is_simulated(config) and not result.get("lab")
        found: dict[str, Any] = {name: row.get(name) for name in FIGURES}
        if config is not None and not moves_bytes(config):  # older folders counted what stayed in the process
            found |= {"bytes_pushed": 0, "bytes_pulled": 0}
        scores = {name: row.get(name) for name in (*FINAL_SCORES, *EVALUATED)}
        early = {name: _last(aggregates.scores, name) for name in EVALUATED}
        is_early = all(scores[name] is None for name in EVALUATED) and any(one is not None for one in early.values())
        scores |= {**(early if is_early else {}), "weights": kind_of(result, config)}
        found |= {**scores, **by_weights(scores), "scored_early": is_early, "metrics": self._metrics()}
        over = status == "finished" and not result.get("reason")
        under_way = status in ("running", "evaluating") and last.get("fraction") != 1.0
        timed = under_way and not simulated and bool(aggregates.latest)
        return found | {
            "seconds": result.get("train_seconds") or aggregates.now or None,
            "rate": result.get("samples_per_second") or last.get("rate"),
            "loss": last.get("loss"),
            "fraction": 1.0 if over else last.get("fraction"),
            "seconds_left": seconds_left(aggregates.latest) if timed else None,
            "workers": config.workers if config is not None else result.get("workers"),
            "unit": result.get("unit"),
            "live": last.get("live"),
            "simulated": simulated,
            "lab": bool(result.get("lab")),
            "rule": str(result.get("rule_applied") or "").replace(" (averaged)", "") or None,
            "staleness": result.get("staleness"),
            "num_parameters": result.get("num_parameters"),
            "pushes": aggregates.num_pushes or None,
            "checkpoints": aggregates.counts.get("checkpoint", 0),
            "lost_workers": len(result.get("lost_workers") or ()) or aggregates.counts.get("worker_lost", 0),
            "resumes": aggregates.counts.get("run_resumed", 0),
        }

    def _metrics(self) -> dict[str, float | None]:
        """Return the metrics of an own loop: the values that hold."""
        so_far = self._aggregates.reported.values(self._aggregates.lost)
        found = read_reported(self._result) if self._result is not None else so_far
        return {name: one.value for name, one in found.items()}

    def _notes(self, going_on: bool) -> list[str]:
        notes = [*self._problems, *self._events.notes(going_on), *self._arrivals.notes(going_on)]
        if not self._aggregates.started and not going_on:
            if (self._result or {}).get("lab"):
                notes.append("computed in the lab, many runs at once: only the end was recorded, no curves")
            elif not (file := self.folder.events_file).exists():
                notes.append(f"{file.name} is missing: the run never started, or its events are lost")
        return notes

    def _scores(self) -> dict[str, list[float | None]]:
        """Return the evaluations during the run and the final one."""
        course, result = self._aggregates.scores, self._result or {}
        columns, times = {name: course.last(name) for name in SCORES}, course.times
        end = [result.get(name) for name in SCORES]
        if any(value is not None for value in end[1:]):
            times = np.append(times, float(result.get("train_seconds") or self._aggregates.now))
            columns = {name: np.append(columns[name], number(value)) for name, value in zip(SCORES, end, strict=True)}
        return {"t": plain(times), **{name: plain(column, 7) for name, column in columns.items()}}

    def _staleness(self) -> list[list[int]]:
        """Return a histogram as rows of first value, last value and number of pushes."""
        counted = (self._result or {}).get("staleness_histogram")
        pairs = [[int(value), int(count)] for value, count in counted.items()] if isinstance(counted, dict) else None
        return bars(pairs if pairs is not None else self._aggregates.stale or [])

    def _shares(self) -> list[Mapping[str, float]]:
        """Return the shares of each worker's time, as `status` has them."""
        return [one.shares for one in self._aggregates.workers(whole=True)[0] or workers_of_result(self._result)]

    def _workers(self, status: str) -> tuple[list[dict[str, Any]], int, list[str]]:
        """Return a row per worker, stragglers first if there are many, the number left out, and sentences on them."""
        simulated = self._config is not None and is_simulated(self._config)
        workers, span = self._aggregates.workers(whole=simulated or status not in UNDER_WAY)
        found = stragglers(workers)
        slow = {one.worker: one.cause for one in found}
        shown = workers if len(workers) <= MAX_WORKERS else sorted(workers, key=lambda one: one.worker not in slow)
        count = self._config.workers or 1 if self._config is not None else 1
        about = RunStatus("", "", "", count, status, simulated=simulated, span=span, workers=tuple(workers))
        rows = [{**dataclasses.asdict(one), "slow": slow.get(one.worker)} for one in shown[:MAX_WORKERS]]
        return rows, len(workers) - len(rows), findings(about, found)


def run_names(settings: dict[str, Any]) -> dict[str, str | None]:
    """Return strategy, model and data set as the page shows them, and the headline of the three.

    A task of one's own has its own model and data, and both are named by the script or the function that makes them.

    >>> run_names({"strategy": "bounded:2", "task": "tasks/spirals.py:build", "dataset": "fashion-mnist"})["title"]
    'bounded:2, spirals:build'
    >>> run_names({"strategy": "backup:1", "timing_only": True, "parameters": "62k", "model": "lenet5"})["title"]
    'backup:1, 62k parameters, times only'
    >>> run_names({"strategy": "backup:1", "model": "lenet5", "dataset": "fashion-mnist"})["title"]
    'backup:1, lenet5 on fashion-mnist'
    """
    strategy, own = settings.get("strategy"), own_source(settings)
    if own is None:
        model, dataset = settings.get("model"), settings.get("dataset")
        what = f"{model} on {dataset}" if model and dataset else None
    else:
        model, dataset, what = own, own, own
    if settings.get("timing_only"):
        model, dataset, what = model_name(settings), NO_DATA, subject(settings)
    title = ", ".join(str(one) for one in (strategy, what) if one)
    return {"strategy": strategy, "model": model, "dataset": dataset, "title": title or None}


def _file_state(file: Path) -> tuple[int, ...]:
    """Return a value that changes with the file; empty if it does not exist."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _last(course: TimeSeries, name: str) -> float | None:
    values = course.carried(name)
    return plain(values[-1:], 7)[0] if len(values) else None


def _loss(aggregates: Aggregates) -> dict[str, list[float | None]]:
    """Return the training loss, from every push in the log, or else from the progress rows."""
    course = aggregates.pushes if aggregates.num_pushes else aggregates.progress
    samples = np.cumsum(course.total("samples")) if aggregates.num_pushes else course.carried("samples")
    found = {
        "t": plain(course.times),
        "samples": plain(samples, 7),
        "loss": plain(course.mean("loss")),
        "low": plain(course.least("loss")),
        "high": plain(course.greatest("loss")),
        "count": plain(course.count[course.seen]),
    }
    if (first := aggregates.first_push) and (found["count"][0] or 0) > 1:  # the loss may explode within a span
        values = np.array([first["now"], first["samples"], *(first["loss"],) * 3, 1.0])
        found = {name: [*plain(values[row : row + 1]), *found[name]] for row, name in enumerate(found)}
    return found


def _rate(aggregates: Aggregates) -> dict[str, list[float | None]]:
    course = aggregates.pushes if aggregates.num_pushes else aggregates.progress
    amounts = course.total("samples") if aggregates.num_pushes else np.diff(course.carried("samples"), prepend=0.0)
    times, values = rates(course.times, amounts)
    return {"t": plain(times), "rate": plain(values)}


def _reported(course: TimeSeries) -> dict[str, list[float | None]]:
    values = {name: plain(course.last(name), 7) for name in course.names}
    return {"t": plain(course.times), **values}


def _progress(course: TimeSeries, with_bytes: bool) -> dict[str, list[float | None]]:
    found = {"t": plain(course.times), "samples": plain(course.carried("samples"), 7)}
    found["live_low"] = plain(course.least("live"))
    for name in (
        "staleness",
        "live",
        "lr",
        "step_factor",
        "norm",
        *(("bytes_pushed", "bytes_pulled") if with_bytes else ()),
    ):
        values = course.last(name)
        if np.isfinite(values).any():
            found[name] = plain(values, 7 if name.startswith("bytes") else 5)
    return found


def _per_class(result: dict[str, Any] | None, classes: tuple[str, ...] | None) -> list[list[Any]]:
    scores = (result or {}).get("per_class_accuracy") or []
    names = classes if classes is not None and len(classes) == len(scores) else tuple(map(str, range(len(scores))))
    return [[name, value] for name, value in zip(names, scores, strict=True)]


def bars(counted: list[list[int]]) -> list[list[int]]:
    """Return counts by value as a histogram of at most MAX_BARS equal bars: first value, last value, count.

    >>> bars([[0, 5], [2, 1]])
    [[0, 0, 5], [1, 1, 0], [2, 2, 1]]
    """
    if not counted:
        return []
    least, most = min(value for value, _ in counted), max(value for value, _ in counted)
    start = least if 2 * least > most else 0
    width = (most - start) // MAX_BARS + 1
    found = [0] * ((most - start) // width + 1)
    for value, count in counted:
        found[(value - start) // width] += count
    return [[start + place * width, start + place * width + width - 1, count] for place, count in enumerate(found)]
