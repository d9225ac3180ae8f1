"""The runs of a folder: one row each, from its config and result alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.folder import RunFolder


def folders_below(path: Path) -> list[Path]:
    """Each run folder below `path` (itself, its folders, and theirs, as a sweep leaves them), newest first."""
    found = {*path.glob("config.toml"), *path.glob("*/config.toml"), *path.glob("*/*/config.toml")}
    return [config.parent for config in sorted(found, key=lambda config: (-changed_at(config.parent), config))]


def changed_at(path: Path) -> float:
    """When anything was last written down of the run; 0 where nothing is there any more."""
    dates = []
    for name in ("config.toml", "events.jsonl"):
        with contextlib.suppress(OSError):
            dates.append((path / name).stat().st_mtime)
    return max(dates, default=0.0)


def runs_in(path: Path) -> list[dict[str, Any]]:
    """Each run below `path`, newest first.

    A run whose files cannot be read is listed as damaged.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder: give the one that holds your runs, as in 'paceline list runs'")
    return [_row(RunFolder(found), path) for found in folders_below(path)]


def run_folders(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Runs by their folders, or all in a folder that holds some, in this order; and what of `paths` is neither."""
    found: dict[Path, Path] = {}
    others = []
    for path in paths:
        if not path.exists() or (path / "config.toml").is_file():
            found.setdefault(path.resolve(), RunFolder.open(path).path)
            continue
        below = sorted(folders_below(path)) if path.is_dir() else []
        for run in below:
            found.setdefault(run.resolve(), run)
        if not below:
            others.append(f"{path} is not a run folder, nor does it hold any: it is left out")
    if not found:
        raise UserError(f"{paths[0]} is not a run folder, nor does it hold any: 'paceline train' makes one")
    return list(found.values()), others


def _row(folder: RunFolder, above: Path) -> dict[str, Any]:
    name = str(folder.path.relative_to(above)) if folder.path != above else folder.path.name
    row: dict[str, Any] = {"run": name, "strategy": None, "model": None, "workers": None, "status": "damaged"}
    row |= {"test_accuracy": None, "changed": changed_at(folder.path), "path": str(folder.path)}
    try:
        config, result = folder.config(), folder.result()
    except UserError:
        return row
    model = config.model if config.task is None else config.task
    row |= {"strategy": config.strategy, "model": model, "workers": config.workers}
    if result is None:
        return row | {"status": "running" if folder.is_locked() else "killed"}
    return row | {"status": result.get("status", "damaged"), "test_accuracy": result.get("test_accuracy")}
