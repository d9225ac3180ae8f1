"""From run folders to paths through weight space: their snapshots as flat vectors, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.runs.folder import RunFolder, is_script
from paceline.runs.snapshots import Entry, read_index, read_snapshot
from paceline.system.memory import require_memory
from paceline.tasks.supervised import SupervisedTask

LEAST = 3
"""Snapshots that make a path: two would only make a line."""


@dataclass(frozen=True)
class Trail:
    """A run and the snapshots it kept."""

    folder: RunFolder
    config: RunConfig
    entries: list[Entry]

    @property
    def trained(self) -> str:
        """What was trained on what: runs on one picture have this in common."""
        return f"task {self.config.task}" if self.config.task else f"{self.config.model} on {self.config.dataset}"


@dataclass(frozen=True)
class TrainingPath:
    """The snapshots of one run that are finite: weights [n, P], running statistics [n, S] where there are any."""

    trail: Trail
    entries: list[Entry]
    points: Tensor
    states: Tensor | None
    left_out: list[int]

    def each(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Every snapshot's weights with its own running statistics."""
        states: Iterable[Tensor | None] = self.states if self.states is not None else repeat(None)
        return zip(self.points, states, strict=False)


def find_trails(runs: list[Path]) -> list[Trail]:
    """The runs that are to be shown; everything that can be wrong with them before a tensor is read."""
    trails = []
    for path in runs:
        folder = RunFolder.open(path)
        config = folder.config()
        if is_script(config):
            raise UserError(
                f"{path} is a run of your own loop: its model lives in the script, which cannot be evaluated"
            )
        entries = read_index(folder)
        if len(entries) < LEAST:
            found = f"{len(entries)} snapshot{'s' if len(entries) > 1 else ''}" if entries else "no snapshots"
            raise UserError(
                f"{path} has {found}, a path needs at least {LEAST}: train with --snapshots N (N an epoch), "
                "as in 'paceline train --snapshots 4'"
            )
        trails.append(Trail(folder, config, entries))
    for trail in trails[1:]:
        if trail.trained != trails[0].trained:
            raise UserError(
                f"{trails[0].folder.path} trained {trails[0].trained}, {trail.folder.path} {trail.trained}: "
                "one picture shows runs of one model on one data set"
            )
    if len({trail.folder.path.resolve() for trail in trails}) < len(trails):
        raise UserError("a run is named twice: name each once")
    return trails


def read_path(trail: Trail, task: SupervisedTask) -> TrainingPath:
    """Every snapshot as a flat vector; those with a NaN or an infinity are left out."""
    flat = task.flat
    count = len(trail.entries)
    require_memory(4 * count * (flat.layout.size + flat.state_size), f"snapshots of {trail.folder.path}")
    points, states = torch.zeros(count, flat.layout.size), torch.zeros(count, flat.state_size)
    for number, entry in enumerate(trail.entries):
        tensors = read_snapshot(trail.folder, entry)
        _fill(flat.layout, points[number], tensors, trail, entry)
        if flat.state_size:
            _fill(flat.state_layout, states[number], tensors, trail, entry)
    finite = (torch.isfinite(points).all(1) & torch.isfinite(states).all(1)).tolist()
    entries = [entry for entry, good in zip(trail.entries, finite, strict=True) if good]
    left_out = [entry.version for entry, good in zip(trail.entries, finite, strict=True) if not good]
    if len(entries) < LEAST:
        raise UserError(
            f"{trail.folder.path} has {len(entries)} snapshots without a NaN or an infinity, a path needs {LEAST}: "
            "the run diverged; train again with a lower --lr"
        )
    keep = torch.tensor(finite)
    kept = points[keep] if left_out else points
    return TrainingPath(trail, entries, kept, states[keep] if flat.state_size else None, left_out)


def _fill(layout: Layout, out: Tensor, tensors: dict[str, Tensor], trail: Trail, entry: Entry) -> None:
    for name, view in layout.views(out).items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != view.shape:
            found = "is not in" if tensor is None else f"has shape {list(tensor.shape)} in"
            raise UserError(
                f"{name} {found} snapshot {entry.version} of {trail.folder.path}, the model's has {list(view.shape)}: "
                "the model was changed since the run"
            )
        view.copy_(tensor)
