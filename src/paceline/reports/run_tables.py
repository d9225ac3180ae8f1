"""Write one run or several as text, and list their figures for JSON and CSV."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.analysis.listing import SETTINGS, Row
from paceline.analysis.scored_weights import KINDS, SHORT
from paceline.reports.status_table import MAX_LETTERS
from paceline.reports.tables import Column, fit_table
from paceline.system.strict_json import is_number
from paceline.system.terminal import fold, printable

MAX_DIFFERENCES = 6  # settings with a column; the others are listed below the table
IGNORED_SETTINGS = (
    *("data_dir", "track", "keep", "checkpoint_every", "restart", "restart_workers", "recovery", "durable", "threads"),
    *("model", "like", "mirror", "keep_going"),
)
"""Settings that do not affect how runs compare, or that have a column anyway."""
COMPARED = [name for name in SETTINGS if name not in IGNORED_SETTINGS]


class FigureColumn(NamedTuple):
    """A column of figures: its heading, key, number format, and when it is dropped if space is short."""

    head: str
    key: str
    form: str
    drop_order: int


def _by_weights(head: str, score: str, form: str, drop_order: int) -> list[FigureColumn]:
    """Return a column for the scores of live weights and one for those of averaged ones."""
    return [FigureColumn(f"{head} {SHORT[kind]}", f"{kind}_{score}", form, drop_order) for kind in KINDS]


TEST_ACCURACIES = _by_weights("test %", "test_accuracy", ".2f", 9)
FIGURES = (
    FigureColumn("seconds", "train_seconds", ",.1f", 7),
    FigureColumn("samples/s", "samples_per_second", ",.0f", 6),
    *_by_weights("train %", "train_accuracy", ".2f", 4),
    *TEST_ACCURACIES,
    *_by_weights("test loss", "test_loss", ".4f", 3),
    FigureColumn("stale", "staleness_mean", ".2f", 2),
    FigureColumn("dropped", "dropped_pushes", ",.0f", 1),
)
LEGEND = "live: the weights that are trained; avg: their running average (--average)"


def run_list(rows: list[Row], where: str, width: int) -> str:
    """Return one line per run, then the problems of damaged runs."""
    if not rows:
        return f"no runs in {where} match: 'paceline list {where}' shows all, 'paceline train' creates one"
    columns: list[tuple[Column, Callable[[Row], str]]] = [
        (Column("run", 0), lambda row: row["run"]),
        (Column("strategy", 5), lambda row: str(row["strategy"] or "-")),
        (Column("model", 2), lambda row: str(row["model"] or "-")),
        (Column("workers", 3), lambda row: str(row["workers"] or "-")),
        (Column("status", 0), _status),
        *((Column(one.head, 4), lambda row, one=one: _number(row[one.key], one.form)) for one in TEST_ACCURACIES),
        *((Column(name, 2), lambda row, name=name: _metric(row, name)) for name in _metric_names(rows)),
        (Column("changed", 1), lambda row: time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed"]))),
    ]
    text = fit_table([column for column, _ in columns], [[cell(row) for _, cell in columns] for row in rows], width)
    return "\n".join([text, *_legend(text, rows, width), *_problems(rows, width)])


def compare(rows: list[Row], width: int) -> str:
    """Return one line per run with differing settings and results; then problems and further differences."""
    sound = [row for row in rows if row["strategy"] is not None]
    differing = [name for name in COMPARED if len({str(row[name]) for row in sound}) > 1]
    shown = list(dict.fromkeys(["strategy", "workers", *differing]))[:MAX_DIFFERENCES]
    figures = [figure for figure in FIGURES if any(row[figure.key] is not None for row in rows)]
    if not any(row["dropped_pushes"] for row in rows):
        figures = [figure for figure in figures if figure.key != "dropped_pushes"]
    telling = {name: 5 if name not in differing else 10 if name == "strategy" else 8 for name in shown}
    columns = [Column("run", 0), *(Column(name.replace("_", "-"), drop_order) for name, drop_order in telling.items())]
    metrics = _metric_names(rows)
    columns += [*(Column(figure.head, figure.drop_order) for figure in figures), *(Column(name, 5) for name in metrics)]
    columns.append(Column("status", 0))
    cells = [
        [
            row["run"],
            *(_setting(row[name]) for name in shown),
            *(_number(row[figure.key], figure.form) for figure in figures),
            *(_metric(row, name) for name in metrics),
            _status(row),
        ]
        for row in rows
    ]
    text = fit_table(columns, cells, width)
    lines = [text, *_legend(text, rows, width), *_problems(rows, width)]
    more = [name.replace("_", "-") for name in differing if name not in shown]
    if more:
        lines.append(fold(f"they also differ in {', '.join(more)}: --csv has all", width))
    if parts := {f"{row['train_total']:,} of {row['epoch_samples']:,}" for row in rows if _is_sampled(row)}:
        lines.append(fold(f"train %: on {' or '.join(sorted(parts))} samples (--train-score)", width))
    if on_test := [row["run"] for row in rows if row["chosen_on"] == "test"]:
        lines.append(fold(f"best weights or end chosen on the test set: {', '.join(on_test)}", width))
    return "\n".join(lines)


def _is_sampled(row: Row) -> bool:
    """Whether the train data was scored on a sample of it."""
    total, whole = row["train_total"], row["epoch_samples"]
    return is_number(total) and is_number(whole) and total < whole


def _metric_names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["metrics"] or {}))


def _metric(row: Row, name: str) -> str:
    return _number((row["metrics"] or {}).get(name), ".4g")


def _legend(text: str, rows: list[Row], width: int) -> list[str]:
    """Explain the two kinds of weights if the table has both, and say whose report a metric of an own loop is."""
    head = text.partition("\n")[0].split()
    lines = [LEGEND] if set(SHORT.values()) <= set(head) else []
    for name in head:
        workers = {row["reported_by"][name] for row in rows if row["reported_by"] and name in row["reported_by"]}
        lines += [f"{name}: as reported by worker {', '.join(map(str, sorted(workers)))}"] if workers else []
    return [fold(line, width) for line in lines]


def _problems(rows: list[Row], width: int) -> list[str]:
    found = [f"{row['run']}: {row['problem']}" for row in rows if row["problem"]]
    return [fold(printable(line, MAX_LETTERS), width) for line in found]


def _status(row: Row) -> str:
    done = f" {100 * row['fraction']:.0f} %" if is_number(row["fraction"]) else ""
    return f"{row['status']}{done}"


def _setting(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
