"""Lists the runs of a folder, one row each, from their files; filters and sorts the rows."""

from __future__ import annotations

import contextlib
import fnmatch
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paceline.analysis.differences import compared_settings
from paceline.analysis.naming import dataset_name, model_name, read_named_settings
from paceline.analysis.reported import read_reported, reported_so_far
from paceline.analysis.scored_weights import BY_WEIGHTS, SCORES, by_weights, comparable
from paceline.config import ALIASES, FIELDS, is_simulated
from paceline.errors import UserError, nearest_names, unknown_name
from paceline.runs.events import RowParser, read_tail
from paceline.runs.folder import RunFolder
from paceline.settings.stopping import BestMetric, is_lower_better
from paceline.system.sealed_weights import check_weights
from paceline.system.strict_json import is_number

Row = dict[str, Any]
FIGURES = (
    *("updates", "samples", "train_seconds", "samples_per_second", *SCORES, *BY_WEIGHTS),
    *("train_total", "epoch_samples", "staleness_mean", "staleness_max"),
    *("dropped_pushes", "late_pushes", "lost_pushes", "bytes_pushed", "bytes_pulled", "num_parameters", "resumes"),
)
ABOUT = (
    *("run", "path", "kind", "status", "fraction", "reason", "problem", "changed", "metrics", "reported_by"),
    *("weights", "chosen_on", "rule_applied"),
)
SETTINGS = tuple(name for name in FIELDS if name not in ("name", "runs", "path"))
KEYS = (*ABOUT, *SETTINGS, *FIGURES)  # the keys of a row, which `--where` and `--sort` accept
TAIL_BYTES = 1 << 16
MAX_CHECKED_NBYTES = 256 << 20  # a list compares weights of at most this size with their checksums; `replay` all
DESCENDING = re.compile("accuracy|per_second|changed|fraction")  # fields that sort in descending order by default


def runs_in(path: Path) -> list[Row]:
    """Return a row per run in `path` and three folders below it, as a sweep or the demo leave them, newest first.

    A run with unreadable files is listed as damaged, with the problem.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: give the folder of your runs, as in 'paceline list runs'")
    rows = [_row(folder, _name(folder, path)) for folder in _folders_in(path)]
    return sorted(rows, key=lambda row: (-row["changed"], row["run"]))


def newest_folders(path: Path) -> list[Path]:
    """Return the folders of `runs_in`, without reading their files."""
    return [folder.path for folder in sorted(_folders_in(path), key=lambda folder: (-_changed(folder), folder.path))]


def _changed(folder: RunFolder) -> float:
    """Return when the run last wrote to its config or events; 0 if both are gone."""
    dates = []
    for file in (folder.config_file, folder.events_file):
        with contextlib.suppress(FileNotFoundError):
            dates.append(file.stat().st_mtime)
    return max(dates, default=0.0)


def runs_of(paths: list[Path]) -> tuple[list[Row], list[str]]:
    """Return a row for each of `named_folders`, and a sentence per ignored path."""
    found, others = named_folders(paths)
    return [_row(folder, name) for name, folder in found], others


def run_folders(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Return the folders of `named_folders`, and a sentence per ignored path."""
    found, others = named_folders(paths)
    return [folder.path for _, folder in found], others


def named_folders(paths: list[Path]) -> tuple[list[tuple[str, RunFolder]], list[str]]:
    """Return the run folders among `paths` and in folders of runs, in this order, and a sentence per ignored path.

    Each has a unique name: its folder's name, or the whole path if several folders share it.
    """
    found: dict[Path, tuple[str, RunFolder]] = {}
    others = []
    for path in paths:
        if not path.exists() or (path / "config.toml").is_file():
            found.setdefault(path.resolve(), (path.name or path.resolve().name, RunFolder.open(path)))
            continue
        below = _folders_in(path) if path.is_dir() else []
        for folder in below:
            found.setdefault(folder.path.resolve(), (_name(folder, path), folder))
        if not below:
            others.append(f"{path} is not a run folder and contains none: ignored")
    if not found:
        raise UserError(f"{paths[0]} is not a run folder and contains none: 'paceline train' creates one")
    count = Counter(name for name, _ in found.values())
    return [(name if count[name] == 1 else str(folder.path), folder) for name, folder in found.values()], others


def _folders_in(path: Path) -> list[RunFolder]:
    configs = sorted({config for folder in (".", "*", "*/*", "*/*/*") for config in path.glob(f"{folder}/config.toml")})
    return [RunFolder(config.parent) for config in configs]


def _name(folder: RunFolder, above: Path) -> str:
    return str(folder.path.relative_to(above)) if folder.path != above else folder.path.resolve().name


def _row(folder: RunFolder, name: str) -> Row:
    row: Row = {
        **dict.fromkeys((*KEYS, "compared")),
        "run": name,
        "path": str(folder.path),
        "status": "damaged",
        "changed": 0.0,
    }
    try:
        row["changed"] = _changed(folder)
        config = folder.config()
        result = folder.result()
        settings = read_named_settings(folder, config, result)
        row |= {setting: settings[setting] for setting in SETTINGS}
        row |= {"kind": "simulated" if is_simulated(config) else "real"}
        row |= {"model": model_name(settings), "dataset": dataset_name(settings)}
        row["compared"] = compared_settings(config, result, settings)
        row |= {"average": row["compared"]["average"], "weights": row["compared"]["scored_weights"]}
        if result is None:
            return row | _so_far(folder)
        return row | _ended(result, row["weights"]) | {"problem": weights_problem(folder, result, MAX_CHECKED_NBYTES)}
    except (UserError, OSError) as error:
        return row | {"problem": str(error).replace(f"{folder.path}/", "")}


def _ended(result: dict[str, Any], weights: str) -> Row:
    staleness = result.get("staleness")
    if isinstance(staleness, dict):
        result = {**result, "staleness_mean": staleness.get("mean"), "staleness_max": staleness.get("max")}
    result = {**result, **by_weights({**result, "weights": weights})}
    figures = {name: result.get(name) if is_number(result.get(name)) else None for name in FIGURES}
    kind = {"kind": "lab"} if result.get("lab") else {}
    workers = {name: one.worker for name, one in read_reported(result).items()}
    about = {name: result.get(name) for name in ("status", "reason", "chosen_on", "rule_applied")}
    return {**figures, **kind, **about, "metrics": _metrics(result), "reported_by": workers or None}


def _metrics(result: dict[str, Any]) -> dict[str, float] | None:
    """Return what a task measured on its test data, or a loop reported, except losses and accuracies."""
    measured = result.get("test_metrics")
    named: dict[str, Any] = {name: one.value for name, one in read_reported(result).items()}
    named |= measured if isinstance(measured, dict) else {}
    return {name: value for name, value in named.items() if is_number(value)} or None


def _so_far(folder: RunFolder) -> Row:
    """Return the progress of a run without a result."""
    row: Row = {"status": "running" if folder.is_locked() else "killed"}
    parser = RowParser(folder.events_file)
    events = read_tail(folder.events_file, TAIL_BYTES, parser) if folder.events_file.exists() else []
    progress = [event for event in events if event.get("kind") == "progress"]
    if progress:
        row |= {name: progress[-1].get(name) for name in ("updates", "samples", "fraction")}
        row["train_seconds"] = progress[-1].get("now")
    if reported := reported_so_far(events):
        row["metrics"] = {name: one.value for name, one in reported.items() if is_number(one.value)} or None
        row["reported_by"] = {name: one.worker for name, one in reported.items()}
    return row | {"problem": "; ".join(parser.notes()) or weights_problem(folder, {}, MAX_CHECKED_NBYTES)}


def weights_problem(folder: RunFolder, result: Row, most: float = float("inf")) -> str | None:
    """Return which weights in a run folder, of files of at most `most` bytes, are missing or not those of the run."""
    is_missing = result.get("weights_sha256") is not None and not folder.weights_file.exists()
    problems = [f"{folder.weights_file.name} is missing"] * is_missing
    for file in (folder.weights_file, folder.live_weights_file, folder.best_file):
        try:
            if file.is_file() and file.stat().st_size <= most:
                check_weights(file, result.get("weights_sha256") if file == folder.weights_file else None)
        except (OSError, ValueError) as error:
            problems.append(f"{file.name} is damaged, do not use it ({error})")
    return "; ".join(problems) or None


_TESTS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}


def choose(rows: Iterable[Row], where: list[str], sort: str | None = None, reverse: bool = False) -> list[Row]:
    """Return the rows that meet every condition, sorted; rows without the sort field come last.

    Fields are the keys of a row and the metrics that runs measured or reported.
    """
    rows = list(rows)
    conditions = [_condition(text, rows) for text in where]
    kept = [row for row in rows if all(fits(row) for fits in conditions)]
    if sort is None:
        return kept[::-1] if reverse else kept
    order = sort_order(kept, sort)
    values = [(row, value_of(row, order.metric)) for row in kept]
    there = [(row, value) for row, value in values if value is not None]
    there.sort(key=lambda one: (is_number(one[1]), one[1] if is_number(one[1]) else _text(one[1])))
    if order.lower == reverse:
        there.reverse()
    return [row for row, _ in there] + [row for row, value in values if value is None]


def value_of(row: Row, key: str) -> Any:
    """Return a field of a row or, under another name, a metric; None if the run has none."""
    return row[key] if key in KEYS else (row["metrics"] or {}).get(key)


def sort_order(rows: list[Row], name: str) -> BestMetric:
    """Return what `--sort NAME` sorts by, and whether lower values come first.

    A score of averaged weights is not compared with one of live ones. Of a metric that does not say by its name
    whether lower is better, NAME says it: min:NAME or max:NAME.
    """
    way, _, asked = name.rpartition(":")
    if way not in ("", "min", "max"):
        raise UserError(f"--sort '{name}': write FIELD, min:FIELD or max:FIELD, as in max:f1")
    key = _key(asked, "--sort", rows)
    if key in SCORES and any(row[key] is not None for row in rows):
        common = comparable(rows, key)
        if common is None:
            why = "some of these runs have it for averaged weights only, others for live ones only"
            raise UserError(f"--sort {name}: {why}: sort by averaged_{key} or live_{key}")
        key = common
    if way:
        return BestMetric(key, way == "min")
    if key in KEYS:
        return BestMetric(key, not DESCENDING.search(key))
    lower = is_lower_better(key)
    if lower is None:
        why = f"is a higher or a lower {key} better? That name does not tell"
        raise UserError(f"--sort {name}: {why}: write max:{key} or min:{key}")
    return BestMetric(key, lower)


def _key(name: str, flag: str, rows: Iterable[Row]) -> str:
    key = name.replace("-", "_")
    key = ALIASES.get(key, key)
    if key in KEYS:
        return key
    metrics = {metric for row in rows for metric in row["metrics"] or ()}
    if name in metrics:
        return name
    known = (*KEYS, *sorted(metrics))
    if nearest_names(name, known):
        raise UserError(f"{flag}: {unknown_name('field', name, known)}")
    raise UserError(f"{flag}: unknown field '{name}': 'paceline list --csv' has a column for each that is known")


def _condition(text: str, rows: Iterable[Row]) -> Callable[[Row], bool]:
    """Parse `lr>=0.01`, `strategy=async` or `strategy=bounded:*`; numbers compare as numbers, `none` as missing."""
    found = re.fullmatch(r"\s*([\w-]+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*", text)
    if found is None:
        raise UserError(f"--where '{text}': write FIELD=VALUE, as in strategy=async, or with !=, <, <=, >, >=")
    key, sign, wanted = _key(found[1], f"--where '{text}'", rows), found[2], found[3]
    if sign in ("=", "!="):
        return lambda row: _is(value_of(row, key), wanted) == (sign == "=")
    try:
        limit = float(wanted)
    except ValueError:
        raise UserError(f"--where '{text}': {sign} takes a number, got '{wanted}'") from None
    return lambda row: is_number(value := value_of(row, key)) and bool(_TESTS[sign](value, limit))


def _is(value: Any, wanted: str) -> bool:
    if is_number(value):
        try:
            return bool(float(value) == float(wanted))
        except ValueError:
            return False
    return fnmatch.fnmatchcase(_text(value), wanted.lower() if value is None or isinstance(value, bool) else wanted)


def _text(value: Any) -> str:
    """Return the value as typed: none, true, lists with commas."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(f"{part:g}" if is_number(part) else str(part) for part in value) if _is_list(value) else str(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def as_texts(row: Row) -> Row:
    """Return the row for a CSV file: lists as typed, missing values empty."""
    return {key: "" if row[key] is None else _text(row[key]) if _is_list(row[key]) else row[key] for key in KEYS}
