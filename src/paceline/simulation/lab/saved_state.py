"""Batches of runs in files, so that a later command goes on where this one stopped, bit for bit on the same device.

A file holds every tensor that an update reads and changes; arrival orders and inputs are computed again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from paceline.config import RunConfig, to_toml
from paceline.errors import UserError
from paceline.runs.durable_files import write_atomically
from paceline.simulation.lab.batch import LabRun, RunBatch
from paceline.simulation.lab.inputs import Images
from paceline.system.strict_json import from_json, to_json

PATTERN = "batch-*.safetensors"
_ANY = RunConfig()


def identity_of(row: LabRun) -> str:
    """Return a digest of the settings that determine a run."""
    plain = dataclasses.replace(row.config, runs=_ANY.runs, data_dir=None, threads=1, train_score=_ANY.train_score)
    return hashlib.sha256(to_toml(plain).encode()).hexdigest()


def save_batches(batches: Sequence[RunBatch], rows: Sequence[LabRun], folder: Path) -> None:
    """Write the state of every batch, then remove the files that an earlier call wrote about any of `rows`."""
    known, written = {identity_of(row) for row in rows}, set()
    for batch in batches:
        names = [identity_of(row) for row in batch.rows]
        about = {"runs": to_json(names), "begin": f"{batch.begin}", "done": f"{batch.done}"}
        digest = hashlib.sha256("".join([*names, f"{batch.begin + batch.done}"]).encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PATTERN.replace("*", digest[:16])
        written.add(path)
        content = save(batch.tensors(), {**about, "places": f"{batch.max_workers}"})
        write_atomically(path, content)
    for path in set(folder.glob(PATTERN)) - written:
        if known & set(_read(path)[0]):
            path.unlink()


def _read(path: Path) -> tuple[list[str], dict[str, str], dict[str, Tensor]]:
    """Return the runs of a file, what it says about them, and its tensors."""
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, str] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return from_json(about["runs"]), about, tensors
    except Exception as error:  # the library has errors of its own
        raise UserError(f"{path} is damaged ({error}): remove it to start its runs again") from None


def restore_batches(folder: Path, rows: list[LabRun], data: Images) -> tuple[list[RunBatch], list[LabRun]]:
    """Return the batches whose state is in `folder`, of those runs that are still wanted, and the runs in none."""
    wanted = {identity_of(row): row for row in rows}
    batches = []
    for path in sorted(folder.glob(PATTERN)):
        names, about, tensors = _read(path)
        places = [place for place, name in enumerate(names) if name in wanted]
        if places:
            chosen = [wanted.pop(names[place]) for place in places]
            batch = RunBatch(chosen, data, int(about["begin"]), int(about["places"]))
            batch.restore(_of_runs(tensors, places, len(names)), int(about["done"]))
            batches.append(batch)
    return batches, list(wanted.values())


def _of_runs(tensors: dict[str, Tensor], places: list[int], total: int) -> dict[str, Tensor]:
    """Return the tensors of the runs at `places` of `total`."""
    if places == list(range(total)):
        return tensors
    index = torch.tensor(places)
    return {name: tensor.view(total, -1, *tensor.shape[1:])[index].flatten(0, 1) for name, tensor in tensors.items()}
