"""The sweep file: fixed settings, lists of values to combine, optional folds. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import FIELDS, RunConfig, coerce, parse_toml
from paceline.errors import UserError, unknown_name
from paceline.system.strict_json import to_json

PARTS = ("name", "folds", "run", "grid")
NOT_ALLOWED = {
    "name": "name the sweep above [run]; the runs are named after their settings",
    "runs": "give --runs on the command line",
    "device": "give --device on the command line",
    "fold": "write folds = K above [run] to run every fold",
    "timing_only": "a sweep compares accuracy; 'paceline plan' compares times",
    "parameters": "a sweep compares accuracy; 'paceline plan' compares times",
}
"""Settings not allowed in a sweep file, and what to do instead."""
MAX_NAME_LENGTH = 120


@dataclass(frozen=True)
class SweepGrid:
    """The content of a sweep file."""

    path: Path
    name: str
    fixed: dict[str, Any]
    axes: dict[str, list[Any]]
    folds: int | None

    @property
    def num_runs(self) -> int:
        return math.prod(map(len, self.axes.values())) * (self.folds or 1)

    def configs(self, folder: Path, data_dir: str | None) -> Iterator[RunConfig]:
        """Yield a config per combination, named after its settings; folds vary fastest, then the last list."""
        folds = [f"{number}/{self.folds}" for number in range(1, self.folds + 1)] if self.folds is not None else [None]
        for values in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, values, strict=True))
            for fold in folds:
                name = run_name(chosen, fold)
                settings = {**self.fixed, **chosen, "fold": fold, "name": name, "runs": str(folder)}
                with prefix_errors(f"{self.path}: {name}"):
                    config = RunConfig(**settings)
                yield config if data_dir is None else replace(config, data_dir=data_dir)


@contextlib.contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefix the message of a UserError with `place`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def describe(settings: dict[str, Any]) -> str:
    """Return settings as text, as in `lr = 0.1, rule = plain`."""
    return ", ".join(f"{name} = {value_text(value)}" for name, value in settings.items()) or "the only setting"


def value_text(value: Any) -> str:
    """Return a setting's value as the user writes it.

    >>> value_text([0.9, 0.999]), value_text(True), value_text(0.005)
    ('0.9,0.999', 'true', '0.005')
    """
    if isinstance(value, list):
        return ",".join(map(value_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_name(settings: dict[str, Any], fold: str | None) -> str:
    """Return a folder name that lists the settings and depends on nothing else in the grid.

    >>> run_name({"lr": 0.1, "strategy": "bounded:3"}, "2/5")
    'lr=0.1_strategy=bounded3_fold=2of5'
    """
    parts = [f"{name}={_as_file_name(value_text(value))}" for name, value in settings.items()]
    whole = "_".join([*parts, *([f"fold={fold.replace('/', 'of')}"] if fold is not None else [])])
    if len(whole) <= MAX_NAME_LENGTH:
        return whole
    return f"{whole[:MAX_NAME_LENGTH]}-{zlib.crc32(whole.encode()):08x}"


def _as_file_name(text: str) -> str:
    """Remove characters unfit for a file name; add a checksum if any except colons were removed."""
    plain = re.sub(r"[^A-Za-z0-9.,+-]", "", text)
    return plain if plain == text.replace(":", "") else f"{plain[-24:]}-{zlib.crc32(text.encode()):08x}"


def read_grid(path: Path) -> SweepGrid:
    """Read a sweep file and check every name and type in it."""
    raw = parse_toml(path, "give a TOML file with [run] and [grid], as examples/sweep.toml")
    for key in raw:
        if key not in PARTS:
            setting = key.replace("-", "_") in set(FIELDS) - set(NOT_ALLOWED)
            hint = f"'{key}' is a setting: write it under [run], or a list of it under [grid]"
            raise UserError(f"{path}: {hint if setting else unknown_name('entry', key, PARTS)}")
    name, folds = raw.get("name", path.stem), raw.get("folds")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"{path}: name = {name!r} is not a folder name: use letters, digits, dots and dashes")
    if folds is not None and (isinstance(folds, bool) or not isinstance(folds, int) or folds < 2):
        raise UserError(f"{path}: folds = {folds!r}: give a whole number of at least 2, or leave it out")
    fixed, axes = _table(path, raw, "run"), _table(path, raw, "grid")
    if not axes:
        raise UserError(f"{path}: [grid] is empty, so there is nothing to sweep: give a list, as lr = [0.01, 0.1]")
    both = sorted(set(fixed) & set(axes))
    if both:
        raise UserError(f"{path}: {both[0]} is under [run] and under [grid]: leave out one of the two")
    run = {key: _fixed(path, key, value) for key, value in fixed.items()}
    return SweepGrid(path, name, run, {key: _axis(path, key, values) for key, values in axes.items()}, folds)


def _table(path: Path, raw: dict[str, Any], title: str) -> dict[str, Any]:
    """Return one table of the file, with dashes in names replaced by underscores."""
    table = raw.get(title, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: {title} = {table!r}: write [{title}] on a separate line, settings below it")
    settings = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name == "folds":
            raise UserError(f"{path}: folds is under [{title}]: write it above [run]")
        if name not in FIELDS:
            raise UserError(f"{path}: {unknown_name('setting', key, set(FIELDS) - set(NOT_ALLOWED))}")
        if name in NOT_ALLOWED:
            raise UserError(f"{path}: {key} under [{title}]: {NOT_ALLOWED[name]}")
        settings[name] = value
    return settings


def _fixed(path: Path, key: str, value: Any) -> Any:
    if isinstance(value, list) and "list" not in str(FIELDS[key].type):
        raise UserError(f"{path}: {key} = {value!r} under [run] is a list: lists to try belong under [grid]")
    with prefix_errors(str(path)):
        return coerce(FIELDS[key], value)


def _axis(path: Path, key: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        problem = f"{path}: {key} = {values!r} under [grid] is not a list"
        raise UserError(f"{problem}: write [{values!r}], or put it under [run]")
    if not values:
        raise UserError(f"{path}: {key} = [] under [grid] is empty: give at least one value")
    found: dict[str, Any] = {}
    for value in values:
        with prefix_errors(f"{path}: under [grid], one of {key}"):
            value = coerce(FIELDS[key], value)
        text = to_json(value)
        if text in found:
            raise UserError(f"{path}: {key} under [grid] has {value_text(value)} twice: leave out one of the two")
        found[text] = value
    return list(found.values())
