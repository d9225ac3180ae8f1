"""Scaling as a table and a figure: samples/s by worker count, the ideal, and the workers' time shares."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.reports.charts import Point, Series, draw_lines
from paceline.reports.tables import Column, fit_table, markdown_table
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.system.terminal import UNLIMITED_WIDTH, fold

HEAD = ("workers", "batch", "samples/s", "ideal", "speed-up", "efficiency", "compute %", "exchange %", "wait %", "runs")


@dataclass(frozen=True)
class WorkerTimeShares:
    """Mean shares of the workers' time; they add up to 1."""

    compute: float
    exchange: float
    wait: float


@dataclass(frozen=True)
class WorkerCount:
    """Results of one number of workers; `rates` has the samples per second of each run."""

    workers: int
    batch: int
    rates: list[float]
    ideal: float
    speedup: float
    efficiency: float
    split: WorkerTimeShares | None
    unfinished: int

    @property
    def rate(self) -> float:
        return statistics.median(self.rates) if self.rates else 0.0


@dataclass(frozen=True)
class ScalingTable:
    """All worker counts of one measurement; the first is the baseline."""

    kind: str
    strategy: str
    model: str
    counts: list[WorkerCount]


def split_of(result: dict[str, Any], timing: dict[str, Any] | None) -> WorkerTimeShares | None:
    """Split the waiting time: its 10th percentile per worker is the exchange, the rest is waiting for other workers.

    >>> timing = {"workers": {"0": {"wall": 0.03, "waited_least": 0.002}}}
    >>> split_of({"utilisation": [{"computing": 0.75, "waiting": 0.25}]}, timing)
    WorkerTimeShares(compute=0.75, exchange=0.05, wait=0.2)
    """
    shares, workers = result.get("utilisation"), (timing or {}).get("workers", {}).values()
    timed = [row for row in workers if "waited_least" in row and row["wall"] > 0]
    if not shares or not timed:
        return None
    compute, waiting = (statistics.fmean(share[name] for share in shares) for name in ("computing", "waiting"))
    least = statistics.fmean(row["waited_least"] / row["wall"] for row in timed)
    exchange = min(waiting, compute * least)
    return WorkerTimeShares(round(compute, 4), round(exchange, 4), round(waiting - exchange, 4))


def gather(
    kind: str, strategy: str, model: str, ideals: dict[int, int], rows: list[tuple[int, int, Path, dict[str, Any]]]
) -> ScalingTable:
    """Build the table from `rows` (workers, batch, folder, result) and `ideals` (ideal speed-up per count)."""
    counts: list[WorkerCount] = []
    for workers, ideal in ideals.items():
        mine = [row for row in rows if row[0] == workers]
        finished = [(folder, result) for _, _, folder, result in mine if result["status"] == "finished"]
        rates = [float(result["samples_per_second"]) for _, result in finished]
        rate = statistics.median(rates) if rates else 0.0
        base_rate, base_ideal = (counts[0].rate, next(iter(ideals.values()))) if counts else (rate, ideal)
        speedup = rate / base_rate if base_rate else 0.0
        splits = [found for folder, result in finished if (found := split_of(result, _timing(folder))) is not None]
        figures = rates, base_rate * ideal / base_ideal, speedup, speedup * base_ideal / ideal
        counts.append(WorkerCount(workers, mine[0][1], *figures, _mean(splits), len(mine) - len(finished)))
    return ScalingTable(kind, strategy, model, counts)


def _timing(path: Path) -> dict[str, Any] | None:
    rows = [row for row in read_events(RunFolder(path).events_file) if row.get("kind") == "timing"]
    return rows[-1] if rows else None


def _mean(splits: list[WorkerTimeShares]) -> WorkerTimeShares | None:
    if not splits:
        return None
    shares = [[getattr(split, name) for split in splits] for name in ("compute", "exchange", "wait")]
    return WorkerTimeShares(*(statistics.fmean(values) for values in shares))


def cells(scaling: ScalingTable) -> list[list[str]]:
    rows = []
    for count in scaling.counts:
        split = count.split
        shares = [f"{100 * part:.1f}" for part in (split.compute, split.exchange, split.wait)] if split else ["-"] * 3
        lost = f" ({count.unfinished} did not finish)" if count.unfinished else ""
        figures = [f"{count.rate:,.0f}", f"{count.ideal:,.0f}", f"{count.speedup:.2f}", f"{count.efficiency:.2f}"]
        rows.append([str(count.workers), str(count.batch), *figures, *shares, f"{len(count.rates)}{lost}"])
    return rows


def title(scaling: ScalingTable) -> str:
    batch = "one batch shared by all" if scaling.kind == "strong" else "a batch each"
    return f"{scaling.kind} scaling ({batch}): {scaling.model}, {scaling.strategy}"


DROP_ORDER = {"runs": 1, "batch": 2, "ideal": 3, "exchange %": 4, "wait %": 5, "compute %": 6, "speed-up": 7}
"""Columns left out of a narrow table, lowest number first."""


def plain(scaling: ScalingTable, width: int = UNLIMITED_WIDTH) -> str:
    """Return the table for a terminal."""
    columns = [Column(name, DROP_ORDER.get(name, 0)) for name in HEAD]
    return fold(title(scaling), width) + "\n" + fit_table(columns, cells(scaling), width, keep_empty=True)


def markdown(scaling: ScalingTable) -> str:
    lines = markdown_table(HEAD, cells(scaling))
    first = scaling.counts[0]
    legend = (
        f"Samples/s: median of the runs. Speed-up and efficiency against {first.workers} worker"
        f"{'s' if first.workers > 1 else ''}; the ideal grows with the workers until every core is used. "
        "Exchange: the time of a push and its reply without waiting for other workers; wait: the rest."
    )
    return "\n".join([f"# {title(scaling)}", "", *lines, "", legend, ""])


def rows_of(scaling: ScalingTable) -> list[dict[str, Any]]:
    """Return the rows of `table.csv` and `--json`."""
    rows = []
    for count in scaling.counts:
        row: dict[str, Any] = {"workers": count.workers, "batch_size": count.batch, "samples_per_second": count.rate}
        row |= {"ideal": round(count.ideal, 3), "speedup": round(count.speedup, 4)}
        row |= {"efficiency": round(count.efficiency, 4), "compute": None, "exchange": None, "wait": None}
        row |= asdict(count.split) if count.split is not None else {}
        rows.append({**row, "runs": len(count.rates), "unfinished": count.unfinished})
    return rows


def draw(scaling: ScalingTable, path: Path) -> str | None:
    """Draw samples/s over workers and the ideal line; return why no figure was drawn, or None."""
    counts = scaling.counts
    measured = []
    for count in counts:
        spread = statistics.stdev(count.rates) if len(count.rates) > 1 else None
        measured.append(Point(count.rate if count.rates else None, spread, count.unfinished > 0))
    series = [Series("ideal", [Point(count.ideal) for count in counts]), Series(scaling.strategy, measured)]
    return draw_lines(path, title(scaling), "samples/s", "workers", [count.workers for count in counts], series)
