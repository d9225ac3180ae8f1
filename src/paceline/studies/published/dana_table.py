"""`paceline reproduce dana`: run the rows in the lab, in one call or in several, and show them by number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.statistics import FAILED, RunStatistics
from paceline.reports.console import Console
from paceline.reports.tables import as_csv, markdown_table
from paceline.studies.batch_runs import resolve_for_simulation, result_of, run_missing
from paceline.studies.published.dana import SPEEDS, DanaRow

NOTES = """Published: DANA paper (arXiv 1907.11612), second-hand figures, not checked against its text; those of `dana`
are of DANA-DC. Plain async is said to fail from 16 workers on. Ours: mean and spread over seeds; averaged weights
for `auto`, and in the next column its live ones."""
HEAD = ("row", "workers", "published", "ours", "difference", "ours, live", "runs", "failed", "staleness")


@dataclass(frozen=True)
class RepeatedRow:
    """A row and our runs of it, one per seed."""

    row: DanaRow
    ours: RunStatistics

    @property
    def difference(self) -> float | None:
        """Our test accuracy minus the published one, or None if one is missing."""
        ours, theirs = self.ours.mean("test_accuracy"), self.row.test_accuracy
        return None if ours is None or theirs is None else ours - theirs


@dataclass(frozen=True)
class RepeatOptions:
    """How to run the rows."""

    seeds: int
    epochs: float
    speeds: str
    device: str
    data_dir: str | None
    folder: Path
    pause_after: float | None  # seconds after which to keep the state of all runs and stop


def repeat(rows: list[DanaRow], options: RepeatOptions, console: Console) -> list[RepeatedRow]:
    """Run every row that has no result yet, and return all rows."""
    assert options.speeds in SPEEDS
    where = options.epochs, options.speeds, options.data_dir, str(options.folder)
    configs = {row: [resolve_for_simulation(row.config(seed, *where)) for seed in range(options.seeds)] for row in rows}
    everything = [config for several in configs.values() for config in several]
    run_missing(everything, options.device, console, options.pause_after)
    return [RepeatedRow(row, RunStatistics([result_of(config) for config in configs[row]])) for row in rows]


def rows_of(found: list[RepeatedRow]) -> list[dict[str, Any]]:
    """Return the published figures and ours, one row each."""
    return [
        {
            "row": one.row.name,
            "workers": one.row.workers,
            "published_test_accuracy": one.row.test_accuracy,
            **{f"test_accuracy_{what}": getattr(one.ours, what)("test_accuracy") for what in ("mean", "spread")},
            "difference": one.difference,
            "live_test_accuracy_mean": one.ours.mean("live_test_accuracy"),
            "runs": len(one.ours.results),
            **{status: one.ours.count(status) for status in FAILED},
        }
        for one in found
    ]


def table_csv(found: list[RepeatedRow]) -> str:
    return as_csv(rows_of(found))


def markdown(found: list[RepeatedRow]) -> str:
    lines = []
    for one in found:
        theirs = "" if one.row.test_accuracy is None else f"{one.row.test_accuracy:.2f}"
        difference = "" if one.difference is None else f"{one.difference:+.2f}"
        failed = f"{one.ours.num_failed}" if one.ours.num_failed else ""
        staleness = one.ours.results[0]["staleness"]["mean"]
        live = one.ours.text("live_test_accuracy")
        cells = [one.row.method, f"{one.row.workers}", theirs, one.ours.text("test_accuracy"), difference, live]
        lines.append([*cells, f"{len(one.ours.results)}", failed, f"{staleness:.1f}"])
    return "\n".join([*markdown_table(HEAD, lines), "", NOTES, ""])
