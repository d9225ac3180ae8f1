"""The table of faults: what to inject into a run and when, read from TOML and written back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from paceline.config import parse_toml
from paceline.errors import UserError, unknown_name
from paceline.settings.notation import seconds
from paceline.system.terminal import seconds_text

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Fault:
    """One row of the table. Times are seconds, `at` by the run's clock."""

    kind: str
    at: float
    worker: int | None = None  # the worker that it hits; None for a fault of the server
    lasts: float = 0.0  # how long it lasts; reorder, duplicate: how much later the message or its copy arrives
    factor: float = 1.0  # slow: how many times longer a step takes
    restart_after: float | None = None  # crash: the worker starts again so much later; None: never
    message: str = "push"  # lose, duplicate, reorder: the first push or reply sent at or after `at`
    noticed_after: float | None = None  # the server drops the worker so much later; None: a crash at once, a cut never


KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "crash": ((), ("restart_after", "noticed_after")),
    "slow": (("lasts", "factor"), ()),
    "pause": (("lasts",), ()),
    "lose": ((), ("message",)),
    "duplicate": ((), ("lasts", "message")),
    "reorder": (("lasts",), ("message",)),
    "cut": (("lasts",), ("noticed_after",)),
    "server": ((), ("lasts",)),
    "join": ((), ()),
    "drain": ((), ()),
}
"""For each kind the required keys and the optional ones, beside kind, at and worker."""
MISFORTUNES = tuple(kind for kind in KINDS if kind not in ("join", "drain"))
"""Faults proper; joining and draining are planned events."""

MESSAGES = ("push", "reply")
_DEFAULTS = {spec.name: spec.default for spec in dataclasses.fields(Fault)}
_TIMES = ("at", "lasts", "restart_after", "noticed_after")


def read_faults(path: Path, num_workers: int) -> tuple[Fault, ...]:
    """Read the `[[fault]]` rows of a TOML file, sorted by time and, at one time, in the order of the file."""
    content = parse_toml(path, "--faults takes a TOML file of [[fault]] rows")
    rows = content.pop("fault", [])
    if content:
        raise UserError(f"{path}: '{next(iter(content))}' is no part of a fault table: it holds [[fault]] rows alone")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: 'fault' is not a list of rows: head each with [[fault]], in double brackets")
    try:
        faults = [_read_row(f"fault {number}", row) for number, row in enumerate(rows, start=1)]
        check_faults(faults, num_workers)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _read_row(where: str, row: dict[str, Any]) -> Fault:
    _check_keys(where, row)
    values = {**row}
    for key in (*_TIMES, "factor"):
        value = row.get(key)
        try:
            if isinstance(value, str) and key != "factor":
                values[key] = seconds(value)
            elif _is_number(value):
                values[key] = float(value)
        except UserError as error:
            raise UserError(f"{where} ({row['kind']}): {key} = {error}") from None
        except OverflowError:
            values[key] = math.inf
    return Fault(**values)


def _check_keys(where: str, row: dict[str, Any]) -> None:
    for key in ("kind", "at"):
        if key not in row:
            raise UserError(f"{where} has no {key}: a row says at least kind, at and worker")
    kind = row["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{where}: {unknown_name('kind', str(kind), KINDS)}")
    needed, possible = KINDS[kind]
    for key in row:
        if key not in _DEFAULTS:
            raise UserError(f"{where} ({kind}): {unknown_name('key', key, _DEFAULTS)}")
        if key not in (*needed, *possible, "kind", "at", "worker"):
            raise UserError(f"{where} ({kind}): a {kind} has no {key}: leave it out")
    for key in needed:
        if key not in row:
            raise UserError(f"{where} ({kind}) has no {key}: a {kind} needs {' and '.join(needed)}")


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_faults(faults: Iterable[Fault], num_workers: int) -> None:
    """Refuse the first row that does not fit a run with this many workers; rows are counted from 1."""
    for number, fault in enumerate(faults, start=1):
        if fault.kind not in KINDS:
            raise UserError(f"fault {number}: {unknown_name('kind', str(fault.kind), KINDS)}")
        where = f"fault {number} ({fault.kind})"
        _check_worker(where, fault, num_workers)
        for key in _TIMES:
            _check_time(where, fault, key)
        if not (_is_number(fault.factor) and math.isfinite(fault.factor) and fault.factor > 0):
            raise UserError(f"{where}: factor = {fault.factor!r} is no number above 0: give 4 for four times as slow")
        if fault.message not in MESSAGES:
            raise UserError(f"{where}: {unknown_name('message', str(fault.message), MESSAGES)}")
        needed, possible = KINDS[fault.kind]
        for key in ("lasts", "factor", "restart_after", "message", "noticed_after"):
            if key not in (*needed, *possible) and getattr(fault, key) != _DEFAULTS[key]:
                raise UserError(f"{where}: a {fault.kind} has no {key}: leave it out")


def _check_worker(where: str, fault: Fault, num_workers: int) -> None:
    if fault.kind == "server":
        if fault.worker is not None:
            raise UserError(f"{where}: worker = {fault.worker!r}, but it hits the server: leave worker out")
        return
    known = f"there are 0 to {num_workers - 1}" + (", --max-workers makes room" if fault.kind == "join" else "")
    if fault.worker is None:
        raise UserError(f"{where} has no worker: say which one it hits, {known}")
    if not isinstance(fault.worker, int) or isinstance(fault.worker, bool):
        raise UserError(f"{where}: worker = {fault.worker!r} is not a worker's number: {known}")
    if not 0 <= fault.worker < num_workers:
        raise UserError(f"{where}: no worker {fault.worker}, {known}")


def _check_time(where: str, fault: Fault, key: str) -> None:
    value = getattr(fault, key)
    if value is None and _DEFAULTS[key] is None:
        return
    if not _is_number(value) or not math.isfinite(value):
        raise UserError(f"{where}: {key} = {value!r} is not a time: give seconds, as in 1.5 or '30ms'")
    if value < 0:
        raise UserError(f"{where}: {key} = {value:g} is before zero: give a time from 0 on")
    if key in KINDS[fault.kind][0] and value == 0:
        raise UserError(f"{where}: {key} = 0 does nothing: give a time above zero, as in 1.5 or '30ms'")


def never_fired(faults: Iterable[Fault], file: str | None, seconds: float) -> list[str]:
    """Return a line for each fault that was still to come when the run ended.

    >>> never_fired([Fault("crash", 60.0, 1)], "faults.toml", 12.34)
    ['a fault of faults.toml (crash of worker 1 at 60 s) never fired: the run ended at 12 s; give an earlier time']
    """
    return [
        f"a fault of {file} ({fault.kind} of {_target(fault)} at {fault.at:g} s) never fired: "
        f"the run ended at {seconds_text(seconds)}; give an earlier time"
        for fault in faults
    ]


def _target(fault: Fault) -> str:
    return "the server" if fault.worker is None else f"worker {fault.worker}"


def faults_toml(faults: Iterable[Fault]) -> str:
    """Write the table as TOML; `read_faults` reads it back."""
    return "\n".join(_row_toml(fault) for fault in faults)


def _row_toml(fault: Fault) -> str:
    lines = ["[[fault]]"]
    for key, default in _DEFAULTS.items():
        value = getattr(fault, key)
        if value is not None and (value != default or key in KINDS[fault.kind][0]):
            text = f'"{value}"' if isinstance(value, str) else repr(int(value) if key == "worker" else float(value))
            lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


def random_faults(rng: np.random.Generator, num_workers: int, horizon: float, most: int) -> tuple[Fault, ...]:
    """Draw 1 to `most` faults of any kind within `horizon` seconds, by time; seven crashes in eight restart."""
    count = int(rng.integers(1, most + 1))
    faults = [_random_fault(rng, num_workers, horizon) for _ in range(count)]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _random_fault(rng: np.random.Generator, num_workers: int, horizon: float) -> Fault:
    def draw(low: float, high: float) -> float:
        return float(f"{rng.uniform(low, high):.4g}")  # few digits, so that a printed table can be read

    kind = str(rng.choice(MISFORTUNES))
    keys: dict[str, Any] = {"at": draw(0.0, horizon)}
    if kind != "server":
        keys["worker"] = int(rng.integers(num_workers))
    if "lasts" in KINDS[kind][0] + KINDS[kind][1]:
        keys["lasts"] = draw(0.01 * horizon, 0.3 * horizon)
    if kind == "slow":
        keys["factor"] = draw(1.5, 10.0)
    if "message" in KINDS[kind][1]:
        keys["message"] = str(rng.choice(MESSAGES))
    if kind in ("crash", "cut") and rng.random() < 0.5:
        keys["noticed_after"] = draw(0.01 * horizon, 0.1 * horizon)
    if kind == "crash" and rng.random() < 7 / 8:
        keys["restart_after"] = draw(0.1 * horizon, 0.4 * horizon)  # never before the crash is noticed
    return Fault(kind, **keys)
