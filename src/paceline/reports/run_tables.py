"""Write one run or several as text, and list their figures for JSON and CSV."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from paceline.analysis.differences import differing, setting_text
from paceline.analysis.listing import Row, value_of
from paceline.analysis.naming import own_source
from paceline.analysis.scored_weights import KINDS, SHORT, comparable
from paceline.reports.status_table import MAX_LETTERS
from paceline.reports.tables import Column, FittedTable, fitted_table, left_out_lines, shortened
from paceline.settings.stopping import BestMetric, is_lower_better
from paceline.system.strict_json import is_number
from paceline.system.terminal import fold, printable

MAX_DIFFERENCES = 8  # settings with a column; the others are listed below the table
FIRST = ("strategy", "workers", "threads", "model", "rule", "lr", "average")  # settings that come first if they differ
DERIVED = ("rule", "warmup", "threads", "average", "scored_weights")  # settings with a default that depends on others
SHARED = (
    *("strategy", "workers", "model", "dataset", "rule", "optimizer", "lr", "epochs", "steps"),
    *("scored_weights", "seed"),
)
"""Settings that are named below the table if they are the same for all runs."""
MAX_METRICS = 4  # metrics of own code with a column
MAX_RUNS = 40  # of a table on a terminal
MAX_NAME = 32  # characters of a run's name
MAX_TIED = 3  # runs that share the best score and are named


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
TEST_LOSSES = _by_weights("test loss", "test_loss", ".4f", 3)
FIGURES = (
    FigureColumn("seconds", "train_seconds", ",.1f", 9),
    FigureColumn("samples/s", "samples_per_second", ",.0f", 7),
    *_by_weights("train %", "train_accuracy", ".2f", 4),
    *TEST_ACCURACIES,
    *TEST_LOSSES,
    FigureColumn("stale", "staleness_mean", ".2f", 2),
    FigureColumn("dropped", "dropped_pushes", ",.0f", 1),
)
LEGEND = "live: the weights that are trained; avg: their running average (--average)"


def no_runs(where: str, conditions: list[str]) -> str:
    """Return the line for a folder without a run that meets all conditions."""
    if conditions:
        chosen = " --where ".join(conditions)
        return f"none of the runs in {where} fits --where {chosen}: 'paceline list {where}' shows all"
    return f"there are no runs in {where}: 'paceline train --runs {where}' creates one"


def run_list(rows: list[Row], width: int, most: int | None = None) -> str:
    """Return one line per run, at most so many, then the problems of damaged runs."""
    shown = rows[:most]
    scored = any(row[one.key] is not None for one in TEST_ACCURACIES for row in shown)
    without = [row for row in shown if row["test_accuracy"] is None and row["test_loss"] is not None]
    figures = [*(TEST_ACCURACIES if scored else []), *(TEST_LOSSES if without else [])]
    preferred = _preferred(shown)
    metrics = metric_names(shown)[:MAX_METRICS]
    columns: list[tuple[Column, Callable[[Row], str]]] = [
        (Column("strategy", 5), lambda row: str(row["strategy"] or "-")),
        (Column("model", 3), lambda row: str(row["model"] or "-")),
        (Column("data", 2), lambda row: str(row["dataset"] or "-")),
        (Column("workers", 3), lambda row: str(row["workers"] or "-")),
        (Column("kind", 0), _kind),
        (Column("status", 0), _status),
        *(
            (Column(one.head, 4 + 2 * (one.key in preferred)), lambda row, one=one: _number(row[one.key], one.form))
            for one in figures
        ),
        *((Column(name, 3 if scored else 6), lambda row, name=name: _metric(row, name)) for name in metrics),
        (Column("changed", 1), lambda row: time.strftime("%Y-%m-%d %H:%M", time.localtime(row["changed"]))),
    ]
    if all(_kind(row) == "-" for row in shown):
        columns = [(column, cell) for column, cell in columns if cell is not _kind]
    cells = [[cell(row) for _, cell in columns] for row in shown]
    (text, left_out), _ = _named_table([column for column, _ in columns], cells, shown, width)
    lines = [text, *left_out_lines(left_out, width), *_cut(rows, shown, width), *_legend(text, shown, width)]
    return "\n".join([*lines, *_problems(shown, width)])


def compare(rows: list[Row], width: int, most: int | None = None) -> str:
    """Return a table for each data set or own task: settings that differ, results; then what is the same for all.

    Runs of different tasks are not compared. A table has at most `most` runs.
    """
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(_task_of(row), []).append(row)
    damaged = groups.pop(None, [])
    if not groups:
        return _group(damaged, width, most)
    if len(groups) == 1:
        return _group([*next(iter(groups.values())), *damaged], width, most)
    parts = [f"{printable(str(name))}:\n{_group(group, width, most)}" for name, group in groups.items()]
    return "\n\n".join([*parts, *([_group(damaged, width, most)] if damaged else [])])


def _task_of(row: Row) -> str | None:
    """Return what the runs that a run is compared with share: the data set, or the own task; None if damaged."""
    if row["strategy"] is None:
        return None
    return own_source(row) or str(row["dataset"])


def _group(rows: list[Row], width: int, most: int | None) -> str:
    sound = [row for row in rows if row["strategy"] is not None]
    differ = differing([row["compared"] for row in sound])
    ordered = sorted(differ, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    settings = ordered[:MAX_DIFFERENCES] if len(sound) > 1 else ["strategy", "workers"]
    shown = rows[:most]
    figures = [figure for figure in FIGURES if any(row[figure.key] is not None for row in shown)]
    if not any(row["dropped_pushes"] for row in shown):
        figures = [figure for figure in figures if figure.key != "dropped_pushes"]
    metrics = metric_names(shown)
    scored = any(row[one.key] is not None for one in TEST_ACCURACIES for row in shown)
    same_status = len(rows) > 1 and len({_status(row) for row in rows}) == 1 and bool(sound)
    columns = [Column(_flag(name), 10 if name == "strategy" else 6 if name in DERIVED else 8) for name in settings]
    preferred = _preferred(sound)
    columns += [
        Column(one.head, (9 if one in TEST_LOSSES and not scored else one.drop_order) + (one.key in preferred))
        for one in figures
    ]
    columns += [Column(name, 5 if scored else 9) for name in metrics[:MAX_METRICS]]
    columns += [] if same_status else [Column("status", 0)]
    cells = [
        [
            *(_short_rule(row, rows) if name == "rule" else _setting(row, name) for name in settings),
            *(_number(row[figure.key], figure.form) for figure in figures),
            *(_metric(row, name) for name in metrics[:MAX_METRICS]),
            *([] if same_status else [_status(row)]),
        ]
        for row in shown
    ]
    (text, left_out), names = _named_table(columns, cells, shown, width)
    lines = [text, *left_out_lines(left_out, width), *_cut(rows, shown, width)]
    if len(sound) > 1:
        told = {name: _setting(sound[0], name) for name in SHARED if name not in differ}
        same = [f"{_flag(name)} {_unqualified(value) if name == 'rule' else value}" for name, value in told.items()]
        same = [part for part in same if not part.endswith(" -")]
        same += [f"status {_status(rows[0])}"] if same_status else []
        lines += [fold(printable(f"same for all: {', '.join(same)}", MAX_LETTERS), width)] if same else []
    lines += _best_lines(sound, names, width) + _legend(text, rows, width) + _problems(shown, width)
    more = [*map(_flag, ordered[MAX_DIFFERENCES:]), *(f"metric {name}" for name in metrics[MAX_METRICS:])]
    if more:
        lines.append(fold(f"they also differ in {', '.join(more)}: --json has all", width))
    has_train = "train %" in text.partition("\n")[0]
    if has_train and (
        parts := {f"{row['train_total']:,} of {row['epoch_samples']:,}" for row in rows if _is_sampled(row)}
    ):
        lines.append(fold(f"train %: on {' or '.join(sorted(parts))} samples (--train-score)", width))
    ended = [row["run"] for row in rows if row["chosen_on"] == "test" and row["reason"]]
    if ended:
        named = ", ".join(names.get(run, run) for run in ended)
        lines.append(fold(f"ended by their score on the test set, which is therefore too good: {named}", width))
    return "\n".join(lines)


def _preferred(rows: list[Row]) -> set[str]:
    """Return the scores of the weights that runs scored and saved: their columns go last if space is short."""
    scores = ("test_accuracy", "test_loss")
    return {f"{row['weights']}_{score}" for row in rows for score in scores if row[score] is not None}


def _is_sampled(row: Row) -> bool:
    """Whether the train data was scored on a sample of it."""
    total, whole = row["train_total"], row["epoch_samples"]
    return is_number(total) and is_number(whole) and total < whole


def _best_lines(rows: list[Row], names: dict[str, str], width: int) -> list[str]:
    """Name the run with the best test accuracy or, without one, the lowest test loss and the metrics that tell."""
    score, lower, form = ("test_accuracy", False, ".2f")
    if all(row[score] is None for row in rows):
        score, lower, form = ("test_loss", True, ".4f")
    key = comparable(rows, score)
    what = f"{score.replace('_', ' ')}, {str(key).partition('_')[0]} weights"
    orders = [(BestMetric(key, lower), what, form)] if key else []
    if lower:
        known = [(name, is_lower_better(name)) for name in metric_names(rows)[:MAX_METRICS]]
        orders += [(BestMetric(name, lower), name, ".4g") for name, lower in known if lower is not None]
    lines = []
    for order, what, form in orders:
        found = {row["run"]: value_of(row, order.metric) for row in rows if row["status"] == "finished"}
        values = {name: value for name, value in found.items() if value is not None}
        if len(values) > 1:
            best = format((min if order.lower else max)(values.values()), form)
            tied = [names.get(name, name) for name, value in values.items() if format(value, form) == best]
            named = ", ".join(tied[:MAX_TIED]) + (f" and {len(tied) - MAX_TIED} more" if len(tied) > MAX_TIED else "")
            lines.append(fold(f"{'lowest' if order.lower else 'highest'} {what}: {named} ({best})", width))
    return lines


def _named_table(
    columns: list[Column], cells: list[list[str]], rows: list[Row], width: int
) -> tuple[FittedTable, dict[str, str]]:
    """Return a table with the runs' names in front, and those names: shortened only if the whole ones have no room."""
    whole = {row["run"]: row["run"] for row in rows}
    for names in (whole, _short_names(rows)):
        named = [[names[row["run"]], *line] for row, line in zip(rows, cells, strict=True)]
        fitted = fitted_table([Column("run", 0), *columns], named, width)
        if not fitted.left_out and all(name in fitted.text for name in names.values()):
            break
    return fitted, names


def _short_names(rows: list[Row]) -> dict[str, str]:
    """Return what to call each run: of long names only the parts that differ, and no two runs alike.

    >>> list(_short_names([{"run": f"strategy=async_batch_size=32_lr={lr}_seed=0"} for lr in (0.1, 0.2)]).values())
    ['…lr=0.1…', '…lr=0.2…']
    """
    full = [row["run"] for row in rows]
    if max(map(len, full), default=0) <= MAX_NAME:
        return dict(zip(full, full, strict=True))
    before = _shared(full)
    behind = _shared([name[before:][::-1] for name in full])
    parts = full if len(full) == 1 else [_inner(name, before, behind) for name in full]
    short = [shortened(name, MAX_NAME) for name in parts]
    return dict(zip(full, short if len(set(short)) == len(set(full)) else parts, strict=True))


def _shared(names: list[str]) -> int:
    """Return the length of the whole words that all names begin with."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return len(re.sub(r"[^_/-]*$", "", "".join(letters[0] for letters in alike)))


def _inner(name: str, before: int, behind: int) -> str:
    """Replace the first and the last characters by an ellipsis each, if that saves any."""
    start = f"…{name[before:]}" if before > 1 else name
    return f"{start[:-behind]}…" if behind > 1 else start


def _cut(rows: list[Row], shown: list[Row], width: int) -> list[str]:
    left = len(rows) - len(shown)
    return [fold(f"{left:,} more: --all shows them, --where and --sort choose", width)] if left else []


def metric_names(rows: list[Row]) -> list[str]:
    """Return the names of all metrics of the runs, in their order."""
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


def _kind(row: Row) -> str:
    """Say of a run that was not trained for real what it is."""
    if row["kind"] in (None, "real"):
        return "-"
    return "times only" if row["timing_only"] else str(row["kind"])


def _status(row: Row) -> str:
    done = f" {100 * row['fraction']:.0f} %" if is_number(row["fraction"]) else ""
    return f"{row['status']}{done}"


def _flag(name: str) -> str:
    return {"dataset": "data", "scored_weights": "scored weights"}.get(name, name.replace("_", "-"))


def _setting(row: Row, name: str) -> str:
    """Return a setting, as it was applied, as a cell. Runs in one table share their data, whose own name is known."""
    return str(row["dataset"]) if name == "dataset" else setting_text((row["compared"] or {}).get(name))


def _short_rule(row: Row, rows: list[Row]) -> str:
    """Return the rule without what is in parentheses, unless runs differ in nothing else."""
    whole, short = (
        {place: cut(_setting(one, "rule")) for place, one in enumerate(rows)} for cut in (str, _unqualified)
    )
    alike = len(set(whole.values())) == len(set(short.values()))
    return short[rows.index(row)] if alike else whole[rows.index(row)]


def _unqualified(rule: str) -> str:
    return rule.partition(" (")[0]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
