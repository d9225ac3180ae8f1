"""Training paths: the snapshots of run folders, checked and read as flat weight vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import RunConfig, is_script
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.runs.folder import RunFolder
from paceline.runs.snapshots import SnapshotEntry, read_index, read_snapshot
from paceline.system.memory import require_memory
from paceline.tasks.supervised import SupervisedTask

MIN_POINTS = 3  # minimum snapshots per run: two points span no plane


@dataclass(frozen=True)
class RunSnapshots:
    """A run and the index of its snapshots."""

    folder: RunFolder
    config: RunConfig
    entries: list[SnapshotEntry]

    @property
    def trained(self) -> str:
        """Model and data set, or the custom task; equal for all runs of one figure."""
        return f"task {self.config.task}" if self.config.task else f"{self.config.model} on {self.config.dataset}"


@dataclass(frozen=True)
class TrainingPath:
    """The finite snapshots of one run: weights [n, P] and, if the model has any, running statistics [n, S]."""

    run: RunSnapshots
    entries: list[SnapshotEntry]
    points: Tensor
    states: Tensor | None
    left_out: list[int]

    def each(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield every snapshot's weights with its running statistics."""
        states: Iterable[Tensor | None] = self.states if self.states is not None else repeat(None)
        return zip(self.points, states, strict=False)


def open_runs(paths: list[Path]) -> list[RunSnapshots]:
    """Open the runs to show and check them before any tensor is read."""
    runs = []
    for path in paths:
        folder = RunFolder.open(path)
        config = folder.config()
        if is_script(config):
            script = f"{path} is a run of a script, whose model cannot be evaluated here"
            raise UserError(f"{script}: give runs of 'paceline train'")
        entries = read_index(folder)
        if len(entries) < MIN_POINTS:
            found = f"{len(entries)} snapshot{'s' if len(entries) > 1 else ''}" if entries else "no snapshots"
            remedy = "train with --snapshots N (N per epoch), as in 'paceline train --snapshots 4'"
            raise UserError(f"{path} has {found}, a path needs at least {MIN_POINTS}: {remedy}")
        runs.append(RunSnapshots(folder, config, entries))
    for run in runs[1:]:
        if run.trained != runs[0].trained:
            found = f"{runs[0].folder.path} trained {runs[0].trained}, {run.folder.path} {run.trained}"
            raise UserError(f"{found}: give runs of one model on one data set")
    if len({run.folder.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run is given twice: give each once")
    return runs


def read_path(run: RunSnapshots, task: SupervisedTask) -> TrainingPath:
    """Read every snapshot as a flat vector; leave out those with a NaN or an infinity."""
    flat, count = task.flat, len(run.entries)
    require_memory(4 * count * (flat.layout.size + flat.state_size), f"snapshots of {run.folder.path}")
    points, states = torch.zeros(count, flat.layout.size), torch.zeros(count, flat.state_size)
    for number, entry in enumerate(run.entries):
        tensors = read_snapshot(run.folder, entry)
        _fill(flat.layout, points[number], tensors, run, entry)
        if flat.state_size:
            _fill(flat.state_layout, states[number], tensors, run, entry)
    finite = (torch.isfinite(points).all(1) & torch.isfinite(states).all(1)).tolist()
    entries = [entry for entry, good in zip(run.entries, finite, strict=True) if good]
    left_out = [entry.version for entry, good in zip(run.entries, finite, strict=True) if not good]
    if len(entries) < MIN_POINTS:
        found = f"{run.folder.path} has {len(entries)} snapshots without a NaN or an infinity"
        raise UserError(f"{found}, a path needs {MIN_POINTS}: the run diverged; train again with a lower --lr")
    keep = torch.tensor(finite)
    kept = points[keep] if left_out else points
    return TrainingPath(run, entries, kept, states[keep] if flat.state_size else None, left_out)


def _fill(layout: Layout, out: Tensor, tensors: dict[str, Tensor], run: RunSnapshots, entry: SnapshotEntry) -> None:
    for name, view in layout.views(out).items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != view.shape:
            found = "is not in" if tensor is None else f"has shape {list(tensor.shape)} in"
            found += f" snapshot {entry.version} of {run.folder.path}, the model's has {list(view.shape)}"
            raise UserError(f"{name} {found}: the model was changed since the run; train it again")
        view.copy_(tensor)
