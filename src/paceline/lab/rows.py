"""Many configs to many results: traced, grouped into families, run side by side, scored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.assemble import parse_strategy
from paceline.config import RunConfig, to_toml
from paceline.crew import make_task, work_of
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.lab.batched import BATCHED
from paceline.lab.family import Family, Images, Row
from paceline.lab.feed import Feed, feed_of
from paceline.lab.scoring import scores_of
from paceline.lab.trace import Trace, trace_of
from paceline.rulebook import average_horizon
from paceline.runs.result import summarise

ROOM = 0.6
"""Share of the device's free memory that weights, snapshots and activations of one family may take."""
ACTIVATIONS = {"lenet5": 1_200_000, "cnn": 7_000_000}
"""Floats that a batch of one run needs on its way through the model, about."""


@dataclass(frozen=True)
class Finished:
    """One run's end: its figures as `result.json` has them, and its weights."""

    config: RunConfig
    result: dict[str, Any]
    weights: Tensor
    layout: Layout


WORTH_COMPILING = 5000
CHUNK = 20
"""Updates that a family queues before it is the next one's turn."""
Progress = Callable[[str, float], None]
"""What is being done, and how much of all updates is done."""


def images_of(dataset: Dataset, train: bool, device: torch.device) -> Images:
    """One part of a data set on the device."""
    images = torch.from_numpy(dataset.train_images if train else dataset.test_images)
    labels = torch.from_numpy(dataset.train_labels if train else dataset.test_labels)
    mean, std = torch.tensor(dataset.info.mean), torch.tensor(dataset.info.std)
    placed = images.permute(0, 2, 3, 1).contiguous().to(device)
    return Images(placed, labels.to(device), (1.0 / (255.0 * std)).to(device), (-mean / std).to(device))


def check_rows(configs: list[RunConfig]) -> None:
    """What the lab cannot do, said before anything is done."""
    for config in configs:
        if config.model not in BATCHED or config.task is not None:
            raise UserError(f"the lab trains {' and '.join(BATCHED)}, not {config.task or config.model}")
        strategy = parse_strategy(config.strategy)
        if strategy.name == "local" or config.eval_every is not None or config.faults is not None:
            raise UserError(
                f"the lab has no local steps, evaluations on the way or faults: {config.strategy} asked for"
            )
        if config.rule != "plain" or average_horizon(config) is not None or config.optimizer not in ("sgd", "adam"):
            raise UserError(
                f"the lab has rule plain with sgd or adam and live weights so far, not rule {config.rule} with "
                f"{config.optimizer} and --average {config.average}"
            )
        if config.snapshots is not None:
            raise UserError("the lab keeps no weights on the way: leave out --snapshots")


def run_rows(
    configs: list[RunConfig], dataset: Dataset, device: torch.device, progress: Progress, compiled: bool = False
) -> Iterator[Finished]:
    """Run all families side by side, in turns; each result comes as soon as it is there."""
    check_rows(configs)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: products of 10-bit mantissas, sums in full
    train, test = images_of(dataset, True, device), images_of(dataset, False, device)
    rows = _traced(configs, dataset, progress)
    total, done = sum(row.trace.workers.size for row in rows), 0
    began = time.perf_counter()
    active = [Family(members, train) for members in families(rows, device)]
    while active:
        for family in list(active):
            if compiled and not family.compiled and family.left > WORTH_COMPILING:
                family.compile()
            done += family.advance(CHUNK) * sum(row.trace.workers.shape[1] for row in family.rows)
            progress(f"{sum(len(one.rows) for one in active)} rows side by side", done / total)
            if not family.left:
                family.wait()
                active.remove(family)
                yield from _results(family, train, test, time.perf_counter() - began)
                active += family.without_the_ended()


def _traced(configs: list[RunConfig], dataset: Dataset, progress: Progress) -> list[Row]:
    """Every config with its order of updates; those that differ only in model, optimizer or lr share it."""
    rows: list[Row] = []
    known: dict[str, tuple[Trace, Feed]] = {}
    for number, config in enumerate(configs):
        progress(f"tracing {number + 1} of {len(configs)}", 0.0)
        task = make_task(config, dataset)
        alike = dataclasses.replace(config, **{name: getattr(_ANY, name) for name in _NOT_TIMES}, lr=1.0)
        if config.link is not None:
            alike = dataclasses.replace(alike, model=config.model)  # its bytes take time
        key = to_toml(alike)
        if key not in known:
            work = work_of(task, alike)
            trace = trace_of(alike, work, task.layout.size)
            known[key] = (trace, feed_of(trace, work, alike))
        trace, feed = known[key]
        own = dataclasses.replace(trace, lr=trace.lr * np.float32(config.lr or 0.0))
        rows.append(Row(config, own, feed, task.initial(), task.layout))
    return rows


_ANY = RunConfig()
_NOT_TIMES = ("model", "optimizer", "momentum", "nesterov", "betas", "weight_decay", "clip", "name", "runs", "rule")


def families(rows: list[Row], device: torch.device) -> list[list[Row]]:
    """Rows that can go side by side, the longest families first; no family larger than the device has room for."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        c = row.config
        kind = (c.model, row.trace.workers.shape[1], c.optimizer, c.momentum, c.nesterov, tuple(c.betas), c.batch_size)
        groups.setdefault((*kind, c.weight_decay, c.clip), []).append(row)
    parts = []
    for members in groups.values():
        size = most_rows(members, device)
        ordered = sorted(members, key=lambda row: len(row.trace))
        parts += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return sorted(parts, key=lambda part: -max(len(row.trace) for row in part))


def most_rows(members: list[Row], device: torch.device) -> int:
    """How many of these rows fit side by side."""
    row = members[0]
    pushes = max(one.trace.workers.shape[1] for one in members)
    places = max(one.config.workers or 1 for one in members) if pushes == 1 else 1
    floats = row.initial.numel() * (places + 6)
    floats += ACTIVATIONS[row.config.model] * 4 * pushes * row.config.batch_size // 32
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2 << 30
    most = int(ROOM * free / (4 * floats))
    if most < 1:
        need = 4 * floats / ROOM / 2**30
        raise UserError(
            f"one run of {row.config.model} with {row.config.workers} workers needs about {need:.1f} GiB on {device}, "
            f"{free / 2**30:.1f} are free: use fewer workers or a larger device"
        )
    return most


def _results(family: Family, train: Images, test: Images, seconds: float) -> Iterator[Finished]:
    ended = family.ended()
    if not ended:
        return
    for number, scores in scores_of(family, ended, train, test).items():
        row = family.rows[number]
        found = bool(torch.isfinite(family.weights[number]).all())
        scores = scores if found else {}
        result = summarise(row.config, row.trace.server, 4 * family.layout.size, row.trace.virtual_seconds, scores)
        result |= {"status": "finished" if found else "diverged", "lab_seconds": round(seconds, 3)}
        yield Finished(row.config, result, family.weights[number].cpu(), family.layout)
