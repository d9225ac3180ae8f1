"""Finds the samples with a NaN or an infinity behind a loss that is none, so that no setting is blamed for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig
from paceline.core.server import Server
from paceline.data.sampler import Batches
from paceline.interfaces import Scores
from paceline.runs.result import what_diverged, why_diverged
from paceline.system.terminal import counted
from paceline.tasks.nested import Structure, num_samples, tensors_of
from paceline.tasks.supervised import ArrayLoader, SupervisedTask


def non_finite_row(
    config: RunConfig, server: Server, task: SupervisedTask | None, work: WorkAssignment | None
) -> dict[str, str]:
    """The reason of a diverged run whose last batch holds a NaN or an infinity, for its result; else empty."""
    found = server.divergence
    if found is None or task is None or work is None:
        return {}
    worker, assignments = found.worker, server.assignments
    assignment, before = assignments.told(worker) if assignments is not None else (None, 0)
    batches = work.batches(worker, config, assignment)
    loader = task.loader(batches, config.seed, worker)
    first = found.batch - before
    if first > 0 and _said_of(loader, batches, first - 1) is not None:
        return {}  # it had trained on such a batch
    for number in range(first, first + max(1, server.members[worker].steps)):
        if (said := _said_of(loader, batches, number)) is not None:
            return {"reason": f"{what_diverged(server)}: {said}: remove or replace those"}
    return {}


def why_not_finite(
    config: RunConfig, server: Server, task: SupervisedTask, scores: Mapping[str, Scores | None]
) -> str | None:
    """Say that the final weights make a loss of the run's scores a NaN or an infinity; None if the data make it one."""
    for part, found in scores.items():
        if found is not None and not math.isfinite(found.loss) and _said_of_data(task, part) is None:
            kind, _, of = part.rpartition("_")
            which = f"the {kind} weights have" if kind else "the weights have"
            return why_diverged(config, server, f"{which} a loss on the {of} data that is not finite")
    return None


def notes_on_data(task: SupervisedTask | None, scores: Mapping[str, Scores | None]) -> Iterator[str]:
    """Say of each part of the data whose loss is not finite which of its samples are not."""
    for part in ("train", "validation", "test"):
        found = scores.get(part)
        if task is None or found is None or math.isfinite(found.loss):
            continue
        if (said := _said_of_data(task, part)) is not None:
            yield f"the {part} loss is not finite: {said}: remove or replace those"


def _said_of_data(task: SupervisedTask, part: str) -> str | None:
    """Say which samples of the train or test data are not finite; None if all are."""
    name = "test" if part.endswith("test") else "train"
    data = task.test if name == "test" else task.train
    assert data is not None, "only what there is has a loss"
    total = num_samples(data[0])
    for what, one in zip(("inputs", "targets"), data, strict=True):
        if broken := _broken_rows(one, total):
            many = f"sample {broken[0]}{', ...' if len(broken) > 1 else ''}"
            return f"the {what} of {len(broken)} of {counted(total, f'{name} sample')} ({many}) hold a NaN or infinity"
    return None


def _said_of(loader: ArrayLoader, batches: Batches, number: int) -> str | None:
    """Say which part of a batch is not finite, and of how many samples; None if all of it is finite."""
    batch, rows = loader.batch(number), batches.indices(number)
    for part, data in (("inputs", batch.inputs), ("targets", batch.targets)):
        broken = _broken_rows(data, len(rows))
        if len(broken):
            which = f"{counted(len(broken), 'sample')} of its batch of {len(rows)} (train sample {rows[broken[0]]}"
            return f"the {part} of {which}{', ...' if len(broken) > 1 else ''}) hold a NaN or infinity"
    return None


def _broken_rows(data: Structure, num_samples: int) -> list[int]:
    broken = torch.zeros(num_samples, dtype=torch.bool)
    for tensor in tensors_of(data):
        if tensor.dim() and len(tensor) == num_samples:
            broken |= ~torch.isfinite(tensor).reshape(num_samples, -1).all(1).cpu()
    return [int(row) for row in broken.nonzero().flatten()]
