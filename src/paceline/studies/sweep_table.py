"""Results of a sweep, best setting first, as a table, as CSV and as a figure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.scored_weights import KINDS, SCORES, SHORT, by_weights, comparable, kind_of
from paceline.analysis.statistics import FAILED, RunStatistics
from paceline.config import RunConfig
from paceline.reports.charts import Point, Series, draw_lines, draw_rows
from paceline.reports.tables import Column, as_csv, fit_table, markdown_table
from paceline.studies.sweep_file import SweepGrid, describe, value_text
from paceline.system.strict_json import to_json
from paceline.system.terminal import UNLIMITED_WIDTH

LIVE_SCORES = tuple(f"live_{score}" for score in SCORES if not score.startswith("train"))  # of a run that averages
MAX_LINES, MAX_ROWS = 8, 60  # limits of a legible figure


@dataclass(frozen=True)
class SweepPoint:
    """One combination of the grid and its runs: one per seed and fold."""

    values: dict[str, Any]
    runs: RunStatistics


@dataclass(frozen=True)
class SweepResult:
    """All combinations, best first: those without a failed run by their mean, then the others."""

    settings: list[SweepPoint]
    part: str  # validation or test
    measure: str  # accuracy, or loss if the task has no accuracy
    weights: str | None  # live or averaged: what all runs were scored on; None if there is nothing that all have

    @property
    def score(self) -> str | None:
        return f"{self.weights}_{self.part}_{self.measure}" if self.weights is not None else None

    @property
    def best(self) -> SweepPoint | None:
        first = self.settings[0]
        return first if self.weights is not None and not first.runs.unfinished else None


def gather(grid: SweepGrid, results: list[dict[str, Any]]) -> SweepResult:
    """Group results, given in the order of the grid's configs, by setting, best first.

    They are compared on the weights that all of them scored: the averaged ones only if every run averages.
    """
    combined: dict[str, SweepPoint] = {}
    for number, values in enumerate(itertools.product(*grid.axes.values())):
        chosen = {name: value for name, value in zip(grid.axes, values, strict=True) if name != "seed"}
        setting = combined.setdefault(to_json(chosen), SweepPoint(chosen, RunStatistics([])))
        folds = grid.folds or 1
        setting.runs.results.extend(results[number * folds : (number + 1) * folds])
    finished = [result for result in results if result["status"] == "finished"]
    held_out = bool(finished) and all(result.get("validation_total") for result in finished)
    part = "validation" if grid.folds is not None or held_out else "test"
    measure = "accuracy" if all(r[f"{part}_accuracy"] is not None for r in finished) else "loss"
    sign = -1.0 if measure == "accuracy" else 1.0
    key = comparable(finished, f"{part}_{measure}")

    def rank(setting: SweepPoint) -> tuple[bool, bool, float]:
        mean = setting.runs.mean(key) if key is not None else 0.0
        return bool(setting.runs.unfinished), mean is None, sign * (mean or 0.0)

    weights = key.partition("_")[0] if key is not None else None
    return SweepResult(sorted(combined.values(), key=rank), part, measure, weights)


def disposition(swept: SweepResult) -> str:
    """Return the last line: the best setting, and whether the second differs by more than the spread."""
    best, score = swept.best, swept.score
    if score is None:
        why = "some runs were scored on averaged weights only, others on live ones only"
        return f'no best setting: {why}: write average = "on" under [run]'
    if best is None:
        return "no best setting: each has a run that diverged or collapsed (try a lower lr) or was stopped"
    unit = f"% {swept.part} accuracy" if swept.measure == "accuracy" else f"{swept.part} loss"
    form = ".2f" if swept.measure == "accuracy" else ".4f"
    line = f"best: {describe(best.values)}: {best.runs.text(score, form)} {unit}, {swept.weights} weights"
    if len(swept.settings) > 1 and not swept.settings[1].runs.unfinished:
        second = swept.settings[1]
        ours, theirs = best.runs.mean(score), second.runs.mean(score)
        spread = max(best.runs.spread(score) or 0.0, second.runs.spread(score) or 0.0)
        if ours is not None and theirs is not None and abs(ours - theirs) <= spread:
            line += f"; the next, {describe(second.values)}, is within the spread"
    return line + ("; chosen on the test set" if swept.part == "test" else "")


def columns(swept: SweepResult) -> list[tuple[str, str, str]]:
    """Return heading, result key and format of each column of figures; what the settings are compared on comes first.

    A score of live weights and one of averaged weights are two columns.
    """
    results = [result for setting in swept.settings for result in setting.runs.results]
    scored = {kind_of(result) for result in results if result["status"] == "finished"}
    kinds = sorted(KINDS, key=lambda kind: (kind != swept.weights, kind not in scored))
    measures = [("%", "accuracy", ".2f")] if swept.measure == "accuracy" else []
    found = [
        (f"{part} {unit} {SHORT[kind]}", f"{kind}_{part}_{what}", form)
        for unit, what, form in [*measures, ("loss", "loss", ".4f")]
        for part in (swept.part, "train")
        for kind in kinds
    ]
    has = {key for result in results for key, value in by_weights(result).items() if value is not None}
    return [column for column in found if column[1] in has or column[1] == swept.score]


def cells(swept: SweepResult) -> tuple[list[str], list[list[str]]]:
    """Return the table's head and rows, best first."""
    axes = list(swept.settings[0].values) or ["setting"]
    shown = columns(swept)
    head = [*axes, *(title for title, _, _ in shown), "runs", "failed"]
    rows = []
    for setting in swept.settings:
        values = [value_text(value) for value in setting.values.values()] or ["the only one"]
        figures = [setting.runs.text(figure, form) for _, figure, form in shown]
        rows.append([*values, *figures, str(len(setting.runs.results)), setting.runs.unfinished or "-"])
    return head, rows


def markdown(swept: SweepResult) -> str:
    head, rows = cells(swept)
    return "\n".join([*markdown_table(head, rows), "", disposition(swept), ""])


DROP_ORDER = {"train loss": 1, "test loss": 2, "validation loss": 2, "train %": 3, "runs": 4, "failed": 5}
DROP_ORDER |= {"test %": 6, "validation %": 6}
"""Columns left out of a narrow table, lowest number first; the settings and the score always stay."""


def plain(swept: SweepResult, width: int = UNLIMITED_WIDTH) -> str:
    """Return the table for a terminal."""
    head, rows = cells(swept)
    judged = next((title for title, key, _ in columns(swept) if key == swept.score), None)
    kinds = tuple(f" {short}" for short in SHORT.values())
    plain_names = [name.rpartition(" ")[0] if name.endswith(kinds) else name for name in head]
    orders = [0 if name == judged else DROP_ORDER.get(word, 0) for name, word in zip(head, plain_names, strict=True)]
    shown_as = [Column(*column) for column in zip(head, orders, strict=True)]
    return fit_table(shown_as, rows, width, keep_empty=True)


def rows_of(swept: SweepResult) -> list[dict[str, Any]]:
    """Return every setting with its means and spreads, for `table.csv` and `--json`."""
    rows = []
    for setting in swept.settings:
        row = {name: value_text(value) if isinstance(value, list) else value for name, value in setting.values.items()}
        for _, figure, _ in columns(swept):
            row |= {f"{figure}_mean": setting.runs.mean(figure), f"{figure}_spread": setting.runs.spread(figure)}
        row |= {"runs": len(setting.runs.results), **{status: setting.runs.count(status) for status in FAILED}}
        rows.append(row)
    return rows


def runs_as_csv(grid: SweepGrid, configs: list[RunConfig], results: list[dict[str, Any]]) -> str:
    """Return one CSV line per run."""
    rows = []
    for config, result in zip(configs, results, strict=True):
        values = {name: value_text(getattr(config, name)) for name in (*grid.axes, *(["fold"] if grid.folds else []))}
        figures = {name: result[name] for name in (*SCORES, "status", "updates")}
        figures |= {"weights": kind_of(result)} | {name: result.get(name) for name in LIVE_SCORES}
        rows.append({"run": config.name, **values, **figures, "in_lab": bool(result.get("lab"))})
    return as_csv(rows)


def draw(grid: SweepGrid, swept: SweepResult, path: Path) -> str | None:
    """Draw lines over the longest numeric list, or one row per setting, best on top, if that takes too many lines.

    Return why no figure was drawn, or None.
    """
    unit = f"{swept.part} accuracy, %" if swept.measure == "accuracy" else f"{swept.part} loss"
    score = swept.score
    if score is None:
        return "no figure: the settings were scored on different weights"
    unit += f" ({swept.weights} weights)"
    repeated = max(len(setting.runs.results) for setting in swept.settings)
    title = grid.name + (f": {repeated} runs a setting, bars: standard deviation" if repeated > 1 else "")
    numeric = [name for name, values in grid.axes.items() if name != "seed" and _is_scale(values)]
    along = max(numeric, key=lambda name: len(grid.axes[name]), default=None)
    lines: dict[str, dict[float, SweepPoint]] = {}
    for setting in swept.settings:
        rest = {name: value for name, value in setting.values.items() if name != along}
        lines.setdefault(describe(rest), {})[setting.values.get(along or "", 0.0)] = setting
    if along is None or len(lines) > MAX_LINES:
        best = swept.settings[:MAX_ROWS]
        if len(best) < len(swept.settings):
            title += f" (the best {MAX_ROWS} of {len(swept.settings)})"
        points = [_point(setting, score) for setting in best]
        return draw_rows(path, title, unit, [describe(setting.values) for setting in best], [Series("mean", points)])
    values = sorted(grid.axes[along])
    series = [Series(name, [_point(found[value], score) for value in values]) for name, found in sorted(lines.items())]
    return draw_lines(path, title, unit, along, values, series)


def _is_scale(values: list[Any]) -> bool:
    return len(values) > 2 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _point(setting: SweepPoint, score: str) -> Point:
    return Point(setting.runs.mean(score), setting.runs.spread(score), setting.runs.num_failed > 0)
