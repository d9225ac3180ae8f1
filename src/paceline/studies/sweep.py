"""`paceline sweep`: check every combination of a grid, then run each into its own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.assembly.preflight import require_device
from paceline.assembly.run import work_of
from paceline.assembly.task import load_task
from paceline.assembly.work import divide_work
from paceline.config import SCHEMA, RunConfig
from paceline.data.datasets import Dataset, load, locate_data
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.durable_files import write_atomically
from paceline.simulation.run import check
from paceline.studies.batch_runs import note_sample, resolve_for_simulation, result_of, run_missing
from paceline.studies.sweep_file import SweepGrid, prefix_errors
from paceline.system.strict_json import to_json

MARKER = "sweep.json"
MANY_RUNS = 1000


def prepare(
    grid: SweepGrid, folder: Path, device: str, data_dir: str | None, yes: bool, console: Console
) -> list[RunConfig]:
    """Resolve and check the config of every run; start and write nothing."""
    if grid.num_runs > MANY_RUNS and not yes:
        raise UserError(f"{grid.path} asks for {grid.num_runs:,} runs: add --yes if that is what you want")
    require_device(RunConfig(device=device))
    _require_same_sweep(grid, folder)
    divided: set[tuple[Any, ...]] = set()
    data: dict[tuple[str, str | None], Dataset] = {}
    requested, resolved = list(grid.configs(folder, data_dir)), []
    for config in requested:
        with prefix_errors(f"{grid.path}: {config.name}"):
            resolved.append(resolve_for_simulation(config))
            check(resolved[-1])
            _check_division(resolved[-1], divided, data)
    note_sample(requested, resolved, console)
    return resolved


def _check_division(
    config: RunConfig, divided: set[tuple[Any, ...]], data: dict[tuple[str, str | None], Dataset]
) -> None:
    """Split the data as the run will, to find mistakes early; once per distinct split."""
    names = ("dataset", "data_dir", "task", "split", "workers", "batch_size", "validation", "fold")
    how = [getattr(config, name) for name in names]
    address = (*how, config.seed if config.split != "full" else 0, tuple(config.shard_weights or ()))
    if address in divided:
        return
    divided.add(address)
    if config.task is not None:
        work_of(load_task(config.task), config)
        return
    place = (config.dataset, config.data_dir)
    if place not in data:
        location = locate_data(config)
        assert location is not None
        data[place] = load(location)
    divide_work(data[place].train_labels, config)


def _identity(grid: SweepGrid) -> dict[str, Any]:
    """Return the settings that two calls of one sweep must share; the lists of values may change."""
    return {"run": grid.fixed, "grid over": list(grid.axes), "folds": grid.folds}


def _require_same_sweep(grid: SweepGrid, folder: Path) -> None:
    """Refuse a folder that holds another sweep or other files."""
    what_to_do = "give this sweep another name, use another --runs, or remove it"
    marker = folder / MARKER
    if not marker.is_file():
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not a sweep: {what_to_do}")
        return
    try:
        there = dict(json.loads(marker.read_text(encoding="utf-8"))["sweep"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{marker} cannot be read ({error}): {what_to_do}") from None
    for name, value in _identity(grid).items():
        if there.get(name) != value:
            raise UserError(f"{folder} holds another sweep, with {name} {there.get(name)}, not {value}: {what_to_do}")


def sweep(
    grid: SweepGrid, configs: list[RunConfig], folder: Path, device: str, console: Console
) -> list[dict[str, Any]]:
    """Run the missing configs and return the results of all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "sweep": _identity(grid), "grid": grid.axes}
        write_atomically(folder / MARKER, (to_json(content, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"sweep folder {folder} cannot be written: {error.strerror}; try --runs DIR") from None
    run_missing(configs, device, console)
    return [result_of(config) for config in configs]
