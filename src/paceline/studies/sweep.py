"""`paceline sweep`: every combination of a grid checked, then run into a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.assembly.preflight import require_device
from paceline.assembly.run import work_of
from paceline.assembly.task import load_task
from paceline.assembly.work import divide_work
from paceline.config import RunConfig
from paceline.data.datasets import Dataset, load, locate_data
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.folder import SCHEMA, write_atomically
from paceline.simulation.run import check
from paceline.studies.batch_runs import note_sample, result_of, run_missing, settle
from paceline.studies.sweep_file import Grid, at

MARKER = "sweep.json"
MANY_RUNS = 1000


def prepare(
    grid: Grid, folder: Path, device: str, data_dir: str | None, yes: bool, console: Console
) -> list[RunConfig]:
    """Every run's settled config, all of them checked; starts and writes nothing."""
    if grid.num_runs > MANY_RUNS and not yes:
        raise UserError(f"{grid.path} asks for {grid.num_runs:,} runs: add --yes if that is what you want")
    require_device(RunConfig(device=device))
    _require_same_sweep(grid, folder)
    divided: set[tuple[Any, ...]] = set()
    data: dict[tuple[str, str | None], Dataset] = {}
    asked, settled = list(grid.configs(folder, data_dir)), []
    for config in asked:
        with at(f"{grid.path}: {config.name}"):
            settled.append(settle(config))
            check(settled[-1])
            _check_division(settled[-1], divided, data)
    note_sample(asked, settled, console)
    return settled


def _check_division(
    config: RunConfig, divided: set[tuple[Any, ...]], data: dict[tuple[str, str | None], Dataset]
) -> None:
    """Divide the data as the run will; once for all that do it alike."""
    c = config
    how = (c.dataset, c.data_dir, c.task, c.split, c.workers, c.batch_size, c.validation, c.fold)
    address = (*how, c.seed if c.split != "full" else 0, tuple(c.shard_weights or ()))
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


def _identity(grid: Grid) -> dict[str, Any]:
    """What must be the same for two calls to be one sweep; the lists may grow and shrink."""
    return {"run": grid.fixed, "grid over": list(grid.axes), "folds": grid.folds}


def _require_same_sweep(grid: Grid, folder: Path) -> None:
    """A folder that holds something else is not touched."""
    what_to_do = "give this sweep another name, use another --runs, or remove it"
    marker = folder / MARKER
    if not marker.is_file():
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder} is there already and is no sweep: {what_to_do}")
        return
    try:
        there = dict(json.loads(marker.read_text(encoding="utf-8"))["sweep"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{marker} cannot be read ({error}): {what_to_do}") from None
    for name, value in _identity(grid).items():
        if there.get(name) != value:
            raise UserError(f"{folder} holds another sweep, with {name} {there.get(name)}, not {value}: {what_to_do}")


def sweep(grid: Grid, configs: list[RunConfig], folder: Path, device: str, console: Console) -> list[dict[str, Any]]:
    """Run what is not there yet; returns the results of all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA, "sweep": _identity(grid), "grid": grid.axes}
        write_atomically(folder / MARKER, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"sweep folder {folder} cannot be written: {error.strerror}; try --runs DIR") from None
    run_missing(configs, device, console)
    return [result_of(config) for config in configs]
