"""A sweep's file: fixed settings, lists whose combinations are run, perhaps folds. Importing this imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import FIELDS, RunConfig, coerce, parse_toml
from paceline.errors import UserError, unknown_name

PARTS = ("name", "folds", "run", "grid")
ELSEWHERE = {
    "name": "name the sweep above [run]; its runs are named by their settings",
    "runs": "give --runs on the command line",
    "device": "give --device on the command line",
    "fold": "write folds = K above [run], and every fold is run",
    "timing_only": "a sweep compares what was learned; 'paceline plan' compares times",
    "parameters": "a sweep compares what was learned; 'paceline plan' compares times",
}
"""Settings that a sweep's file does not take, and what to do instead."""
LONGEST_NAME = 120


@dataclass(frozen=True)
class Grid:
    """What a sweep's file asks for."""

    path: Path
    name: str
    fixed: dict[str, Any]
    axes: dict[str, list[Any]]
    folds: int | None

    @property
    def num_runs(self) -> int:
        return math.prod(map(len, self.axes.values())) * (self.folds or 1)

    def configs(self, folder: Path, data_dir: str | None) -> Iterator[RunConfig]:
        """Every combination as a config, named by its settings; the last list varies fastest, folds faster still."""
        folds = [f"{number}/{self.folds}" for number in range(1, self.folds + 1)] if self.folds is not None else [None]
        for values in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, values, strict=True))
            for fold in folds:
                name = run_name(chosen, fold)
                settings = {**self.fixed, **chosen, "fold": fold, "name": name, "runs": str(folder)}
                with at(f"{self.path}: {name}"):
                    config = RunConfig(**settings)
                yield config if data_dir is None else replace(config, data_dir=data_dir)


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    """Puts a place before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def in_words(settings: dict[str, Any]) -> str:
    """As in `lr = 0.1, rule = plain`."""
    return ", ".join(f"{name} = {shown(value)}" for name, value in settings.items()) or "the only setting"


def shown(value: Any) -> str:
    """A setting's value as a person writes it.

    >>> shown([0.9, 0.999]), shown(True), shown(0.005)
    ('0.9,0.999', 'true', '0.005')
    """
    if isinstance(value, list):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_name(settings: dict[str, Any], fold: str | None) -> str:
    """A folder's name that says the settings; the same for the same settings, whatever else the grid holds.

    >>> run_name({"lr": 0.1, "strategy": "bounded:3"}, "2/5")
    'lr=0.1_strategy=bounded3_fold=2of5'
    """
    parts = [f"{name}={_as_file_name(shown(value))}" for name, value in settings.items()]
    whole = "_".join([*parts, *([f"fold={fold.replace('/', 'of')}"] if fold is not None else [])])
    if len(whole) <= LONGEST_NAME:
        return whole
    return f"{whole[:LONGEST_NAME]}-{zlib.crc32(whole.encode()):08x}"


def _as_file_name(text: str) -> str:
    """The text itself, but for colons; where other characters had to go, a checksum keeps it apart from others."""
    plain = re.sub(r"[^A-Za-z0-9.,+-]", "", text)
    return plain if plain == text.replace(":", "") else f"{plain[-24:]}-{zlib.crc32(text.encode()):08x}"


def read_grid(path: Path) -> Grid:
    """The file, every name and type in it checked."""
    raw = parse_toml(path, "give a TOML file with [run] and [grid], as examples/sweep.toml")
    for key in raw:
        if key not in PARTS:
            setting = key.replace("-", "_") in set(FIELDS) - set(ELSEWHERE)
            hint = f"'{key}' is a setting: write it under [run], or a list of it under [grid]"
            raise UserError(f"{path}: {hint if setting else unknown_name('entry', key, PARTS)}")
    name, folds = raw.get("name", path.stem), raw.get("folds")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"{path}: name = {name!r} is not a folder name: use letters, digits, dots and dashes")
    if folds is not None and (isinstance(folds, bool) or not isinstance(folds, int) or folds < 2):
        raise UserError(f"{path}: folds = {folds!r}: give a whole number of at least 2, or leave it out")
    fixed, axes = _table(path, raw, "run"), _table(path, raw, "grid")
    if not axes:
        raise UserError(f"{path}: nothing under [grid], so there is nothing to sweep: give a list, as lr = [0.01, 0.1]")
    both = sorted(set(fixed) & set(axes))
    if both:
        raise UserError(f"{path}: {both[0]} stands under [run] and under [grid]: leave out one of the two")
    return Grid(
        path,
        name,
        {key: _fixed(path, key, value) for key, value in fixed.items()},
        {key: _axis(path, key, values) for key, values in axes.items()},
        folds,
    )


def _table(path: Path, raw: dict[str, Any], title: str) -> dict[str, Any]:
    """One table of the file with the settings' own names."""
    table = raw.get(title, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: {title} = {table!r}: write [{title}] on a line of its own, settings below it")
    settings = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name == "folds":
            raise UserError(f"{path}: folds stands under [{title}]: write it above [run]")
        if name not in FIELDS:
            raise UserError(f"{path}: {unknown_name('setting', key, set(FIELDS) - set(ELSEWHERE))}")
        if name in ELSEWHERE:
            raise UserError(f"{path}: {key} under [{title}]: {ELSEWHERE[name]}")
        settings[name] = value
    return settings


def _fixed(path: Path, key: str, value: Any) -> Any:
    if isinstance(value, list) and "list" not in str(FIELDS[key].type):
        raise UserError(f"{path}: {key} = {value!r} under [run] is a list: lists to try belong under [grid]")
    with at(str(path)):
        return coerce(FIELDS[key], value)


def _axis(path: Path, key: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise UserError(
            f"{path}: {key} = {values!r} under [grid] is no list: write [{values!r}], or put it under [run]"
        )
    if not values:
        raise UserError(f"{path}: {key} = [] under [grid] makes a grid of no runs: give at least one value")
    found: dict[str, Any] = {}
    for value in values:
        with at(f"{path}: under [grid], one of {key}"):
            value = coerce(FIELDS[key], value)
        text = json.dumps(value)
        if text in found:
            raise UserError(f"{path}: {key} under [grid] has {shown(value)} twice: leave out one of the two")
        found[text] = value
    return list(found.values())
