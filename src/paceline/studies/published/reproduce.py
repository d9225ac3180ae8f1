"""`paceline reproduce`: run the rows of a published table in the lab and compare the figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.scored_weights import KINDS
from paceline.analysis.statistics import FAILED, RunStatistics
from paceline.config import RunConfig
from paceline.reports import tables
from paceline.reports.charts import Point, Series, draw_rows
from paceline.reports.console import Console
from paceline.studies.batch_runs import note_sample, resolve_for_simulation, result_of, run_missing
from paceline.studies.published.optml import PublishedRow, automatic, published_rows

FIGURES = ("train_accuracy", "train_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class ReproducedRow:
    """One published row, our runs of it (one per seed), and optionally runs with automatic settings.

    The published figures are of live weights, and so are ours. Automatic runs average, and score both.
    """

    published: PublishedRow
    ours: RunStatistics
    automatic: RunStatistics | None = None

    @property
    def difference(self) -> float | None:
        """Our test accuracy minus the published one, or None if one is missing."""
        ours, theirs = self.ours.mean("test_accuracy"), self.published.test_accuracy
        return ours - theirs if ours is not None and theirs is not None else None

    @property
    def lab_seconds(self) -> float:
        """Seconds until the last of the row's runs ended, with all rows in one lab batch."""
        return max(float(result["lab_seconds"]) for result in self.ours.results)


def reproduce(
    rows: list[PublishedRow],
    seeds: int,
    epochs: float,
    device: str,
    data_dir: str | None,
    folder: Path,
    console: Console,
    with_automatic: bool = False,
) -> list[ReproducedRow]:
    """Run every row that has no result yet, and return all rows."""
    where = (epochs, data_dir, str(folder))
    requested = {row: [row.config(seed, *where) for seed in range(seeds)] for row in rows}
    auto = {row: [automatic(row, seed, *where) for seed in range(seeds)] for row in rows if with_automatic}
    named = {config.name: config for configs in (*requested.values(), *auto.values()) for config in configs}
    resolved = {name: resolve_for_simulation(config) for name, config in named.items()}
    note_sample(list(named.values()), list(resolved.values()), console)
    run_missing(list(resolved.values()), device, console)

    def several(configs: list[RunConfig]) -> RunStatistics:
        return RunStatistics([result_of(resolved[config.name]) for config in configs])

    return [ReproducedRow(row, several(requested[row]), several(auto[row]) if with_automatic else None) for row in rows]


HEAD = (
    *("row", "train %", "ours", "test %", "ours", "difference", "automatic, live", "automatic, avg"),
    *("train loss", "ours", "test loss", "ours", "their seconds", "in our lab"),
)


def markdown(found: list[ReproducedRow]) -> str:
    """Return the table: published figures, ours, and the difference in test accuracy."""
    rows = []
    for one in found:
        theirs, ours = one.published, one.ours
        accuracies = [_cell(theirs.train_accuracy), ours.text("train_accuracy")]
        accuracies += ["NaN" if theirs.diverged else _cell(theirs.test_accuracy), _accuracy(ours)]
        accuracies.append(_cell(one.difference, "+.2f"))
        accuracies += [
            _accuracy(one.automatic, f"{kind}_test_accuracy") if one.automatic is not None else "-" for kind in KINDS
        ]
        losses = []
        for name in ("train_loss", "test_loss"):
            published = "" if theirs.diverged else _cell(getattr(theirs, name), ".4f")
            losses += [published, ours.text(name, ".4f")]
        rows.append([theirs.name, *accuracies, *losses, _cell(theirs.seconds, ",.0f"), f"{one.lab_seconds:,.0f}"])
    return "\n".join(tables.markdown_table(HEAD, rows)) + "\n"


def _cell(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _accuracy(runs: RunStatistics, figure: str = "test_accuracy") -> str:
    """Return mean and spread of the test accuracy and the number of failed runs; NaN if all diverged."""
    total, diverged, collapsed = len(runs.results), runs.count("diverged"), runs.count("collapsed")
    if diverged == total:
        return "NaN"
    failed = [f"{count} of {total} {what}" for count, what in ((diverged, "NaN"), (collapsed, "collapsed")) if count]
    return runs.text(figure) + (f" ({', '.join(failed)})" if failed else "")


def as_csv(found: list[ReproducedRow]) -> str:
    """Return one CSV line per row: the published figures, our means and spreads."""
    rows = []
    for one in found:
        row: dict[str, Any] = {"row": one.published.name}
        row |= {f"published_{name}": getattr(one.published, name) for name in (*FIGURES, "seconds")}
        for name in FIGURES:
            row |= {f"{name}_mean": one.ours.mean(name), f"{name}_spread": one.ours.spread(name)}
        row |= {"runs": len(one.ours.results), **{status: one.ours.count(status) for status in FAILED}}
        for figure in (f"{kind}_test_accuracy" for kind in KINDS):
            row[f"automatic_{figure}_mean"] = one.automatic.mean(figure) if one.automatic is not None else None
        rows.append({**row, "lab_seconds": one.lab_seconds})
    return tables.as_csv(rows)


def runs_as_csv(found: list[ReproducedRow]) -> str:
    """Return one CSV line per run."""
    names = ("seed", *FIGURES, "status", "updates", "lab_seconds")
    results = [(one.published.name, result) for one in found for result in one.ours.results]
    return tables.as_csv([{"row": row} | {name: result[name] for name in names} for row, result in results])


def draw(found: list[ReproducedRow], path: Path) -> str | None:
    """Draw test accuracy by row, published and ours; return why no figure was drawn, or None."""
    published = [
        Point(None if one.published.diverged else one.published.test_accuracy, None, one.published.diverged)
        for one in found
    ]
    series = [Series("published", published), Series("ours", [_point(one.ours) for one in found])]
    if any(one.automatic is not None for one in found):
        for kind in KINDS:
            points = [_point(one.automatic, f"{kind}_test_accuracy") if one.automatic else Point(None) for one in found]
            series.append(Series(f"ours, automatic, {kind} weights", points))
    seeds = max(len(one.ours.results) for one in found)
    title = "Published table, reproduced" + (f" ({seeds} seeds, bars: standard deviation)" if seeds > 1 else "")
    return draw_rows(path, title, "test accuracy, %", [one.published.name for one in found], series)


def _point(runs: RunStatistics, figure: str = "test_accuracy") -> Point:
    return Point(runs.mean(figure), runs.spread(figure), runs.num_failed > 0)


def summary(found: list[ReproducedRow]) -> list[str]:
    """Return per strategy how many rows agree with the published accuracy."""
    lines = []
    for mode, within in (("classic", 1.0), ("sync", 1.0), ("async", 2.0)):
        rows = [one for one in found if one.published.mode == mode and one.published.test_accuracy is not None]
        same = [one for one in rows if not one.published.diverged]
        near = [one for one in same if one.difference is not None and abs(one.difference) <= within]
        both = sum(one.published.diverged and bool(one.ours.num_failed) for one in rows)
        if rows:
            nan = f"; {both} diverged in both" if both else ""
            lines.append(f"{mode}: {len(near)} of {len(same)} rows within {within:g} of the published accuracy{nan}")
    return [*lines, *_automatic_summary(found)]


def _automatic_summary(found: list[ReproducedRow]) -> list[str]:
    """Compare automatic runs of async rows with the published sync row of the same workers, data and model.

    The published figures are of live weights, so only the live weights of our runs are compared with them.
    """
    sync = {(row.workers, row.split, row.model): row.test_accuracy for row in published_rows() if row.mode == "sync"}
    total = above = failed = scored = 0
    for one in found:
        row = one.published
        target = sync.get((row.workers, row.split, row.model))
        if one.automatic is None or row.mode != "async" or target is None:
            continue
        total += 1
        failed += one.automatic.num_failed > 0
        live = one.automatic.mean("live_test_accuracy")
        scored += live is not None
        above += live is not None and live >= target
    if not total:
        return []
    if not scored and failed < total:
        return [f"automatic: averaged weights only, the published rows are of live ones; {failed} of {total} failed"]
    above_sync = f"{above} of {total} async rows at or above the published sync row of their data, on live weights"
    return [f"automatic: {above_sync}; {failed} failed"]
