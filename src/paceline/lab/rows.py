"""Many configs to many results: traced, grouped into families, run side by side, scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.assemble import parse_strategy
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.lab.batched import BATCHED
from paceline.lab.family import Family, Row
from paceline.lab.scoring import EVERYTHING, scores_of
from paceline.lab.steps import Images
from paceline.lab.tracing import traced
from paceline.rulebook import RULES, average_horizon, chosen, parse_rule
from paceline.runs.result import summarise

ROOM = 0.6
"""Share of the device's free memory that weights, snapshots and activations of one family may take."""
ACTIVATIONS = {"lenet5": 25_000, "cnn": 125_000}
"""Floats that a sample needs on its way through the model, about; torch's own way takes more."""
TORCHS_OWN = 8


@dataclass(frozen=True)
class Finished:
    """One run's end: its figures as `result.json` has them, and its weights."""

    config: RunConfig
    result: dict[str, Any]
    weights: Tensor
    """Those that were scored."""
    live: Tensor
    layout: Layout


CHUNK = 40
"""Updates that a family queues before it is the next one's turn."""
AHEAD = 2
"""Chunks that a family may have queued: enough to keep a device busy, and no family waits long for another."""
POLL = 1e-4


@dataclass
class Spent:
    """Where the seconds of many rows went, and what was done in them."""

    tracing: float = 0.0
    training: float = 0.0
    scoring: float = 0.0
    num_rows: int = 0
    gradients: int = 0
    longest: int = 0
    """Updates of the longest row: each waits for the one before."""

    def line(self) -> str:
        rate, chain = (number / max(self.training, 1e-9) for number in (self.gradients, self.longest))
        return (
            f"{self.num_rows} rows, {self.gradients:,} gradients: tracing {self.tracing:.1f} s, training "
            f"{self.training:.1f} s ({rate:,.0f} gradients/s, longest row {self.longest:,} updates, {chain:,.0f}/s), "
            f"scoring {self.scoring:.1f} s"
        )


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
        if config.snapshots is not None:
            raise UserError("the lab keeps no weights on the way: leave out --snapshots")


def run_rows(
    configs: list[RunConfig],
    dataset: Dataset,
    device: torch.device,
    progress: Progress,
    spent: Spent | None = None,
    parts: Sequence[str] = EVERYTHING,
) -> Iterator[Finished]:
    """Run all families side by side, in turns; each result comes as soon as it is there."""
    check_rows(configs)
    spent = spent or Spent()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: products of 10-bit mantissas, sums in full
    train, test = images_of(dataset, True, device), images_of(dataset, False, device)
    began = time.perf_counter()
    rows = traced(configs, dataset, progress)
    total, done = sum(row.trace.workers.size for row in rows), 0
    started = time.perf_counter()
    spent.tracing += started - began
    scored_before = spent.scoring
    spent.num_rows += len(rows)
    spent.longest = max(spent.longest, *(len(row.trace) for row in rows))
    active = [Family(members, train) for members in families(rows, device)]
    while active:
        ready = [family for family in active if family.num_queued < (AHEAD if family.left else 1)]
        for family in ready:
            done += family.advance(CHUNK) * sum(row.trace.workers.shape[1] for row in family.rows)
            progress(f"{sum(len(one.rows) for one in active)} rows side by side", done / total)
            if not family.left and not family.num_queued:
                active[active.index(family) : active.index(family) + 1] = family.without_the_ended()
                paused = time.perf_counter()
                found = list(_results(family, train, test, parts, paused - began))
                spent.scoring += time.perf_counter() - paused
                yield from found
        if not ready:
            time.sleep(POLL)
    spent.gradients += total
    spent.training += time.perf_counter() - started - (spent.scoring - scored_before)


def families(rows: list[Row], device: torch.device) -> list[list[Row]]:
    """Rows that can go side by side, the longest families first; no family larger than the device has room for."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        c = row.config
        kind = (c.model, row.trace.workers.shape[1], c.optimizer, c.momentum, c.nesterov, tuple(c.betas), c.batch_size)
        groups.setdefault((*kind, c.weight_decay, c.clip, _rule(row), average_horizon(c)), []).append(row)
    parts = []
    for members in groups.values():
        size = most_rows(members, device)
        ordered = sorted(members, key=lambda row: len(row.trace))
        parts += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return sorted(parts, key=lambda part: -max(len(row.trace) for row in part))


def _rule(row: Row) -> str:
    """The rule by name; of `auto`, what it chose for this row."""
    return f"auto {chosen(row.config, row.skew).rule}" if row.config.rule == "auto" else row.config.rule


def most_rows(members: list[Row], device: torch.device) -> int:
    """How many of these rows fit side by side."""
    row = members[0]
    pushes = max(one.trace.workers.shape[1] for one in members)
    places = max(one.config.workers or 1 for one in members) if pushes == 1 else 1
    tables = 1 + RULES[parse_rule(row.config.rule)[0]].knows_workers
    samples = pushes * row.config.batch_size
    floats = row.initial.numel() * (places * tables + 10) + 2 * samples * max(len(one.trace) for one in members)
    floats += ACTIVATIONS[row.config.model] * samples * (1 if device.type == "cuda" else TORCHS_OWN)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2 << 30
    most = int(ROOM * free / (4 * floats))
    if most < 1:
        need = 4 * floats / ROOM / 2**30
        raise UserError(
            f"one run of {row.config.model} with {row.config.workers} workers needs about {need:.1f} GiB on {device}, "
            f"{free / 2**30:.1f} are free: use fewer workers or a larger device"
        )
    return most


def _results(family: Family, train: Images, test: Images, parts: Sequence[str], seconds: float) -> Iterator[Finished]:
    for number, scores in scores_of(family, train, test, parts).items():
        row, (evaluated, live) = family.rows[number], family.final[number]
        found = bool(torch.isfinite(evaluated).all())
        scores = scores if found else {}
        result = summarise(row.config, row.trace.server, 4 * family.layout.size, row.trace.virtual_seconds, scores)
        result |= {"status": "finished" if found else "diverged", "lab_seconds": round(seconds, 3)}
        result["rule_applied"] = family.rule.name  # the trace was made without weights
        yield Finished(row.config, result, evaluated.cpu(), live.cpu(), family.layout)
