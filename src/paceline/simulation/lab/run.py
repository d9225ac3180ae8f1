"""Many configs to many results: traced, grouped into families, run side by side, scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.runs.result import summarise
from paceline.settings.preprocessing import ways_of
from paceline.settings.strategies import strategy_of
from paceline.simulation.lab.batch import Family
from paceline.simulation.lab.evaluation import EVERYTHING, scores_of
from paceline.simulation.lab.inputs import Images
from paceline.simulation.lab.models import BATCHED
from paceline.simulation.lab.packing import cut_to_fit, families, memory_of, room_on
from paceline.simulation.lab.trace_pool import traced


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
    num_families: int = 0
    num_kinds: int = 0
    """Fewer than families where the device had no room for all rows of a kind at once."""
    gradients: int = 0
    longest: int = 0
    """Updates of the longest row: each waits for the one before."""

    def line(self) -> str:
        rate, chain = (number / max(self.training, 1e-9) for number in (self.gradients, self.longest))
        cut = f" in {self.num_families} families, cut to fit the memory" if self.num_families > self.num_kinds else ""
        return (
            f"{self.num_rows} rows{cut}, {self.gradients:,} gradients: tracing {self.tracing:.1f} s, training "
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
        strategy = strategy_of(config)
        if strategy.is_local or config.eval_every is not None or config.faults is not None:
            raise UserError(
                f"the lab has no local steps, evaluations on the way or faults: {config.strategy} asked for"
            )
        if config.max_seconds is not None:
            raise UserError("the lab counts updates, not seconds: leave out --max-seconds, or 'paceline simulate'")
        if ways_of(config) or config.dataset == "imagenet":
            raise UserError(f"the lab takes images as they are: leave out --augment, or --dataset {config.dataset}")
        if config.codec is not None or config.pull_codec is not None:
            raise UserError("the lab has no codecs: 'paceline simulate' has them, on the CPU")
        if config.snapshots is not None:
            raise UserError("the lab keeps no weights on the way: leave out --snapshots")
        if config.precision != "fp32" or config.compile or config.capture or config.accumulate > 1:
            raise UserError("the lab has its own steps: leave out --precision, --compile, --capture and --accumulate")


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
    scoring = 0.0
    spent.num_rows += len(rows)
    spent.longest = max(spent.longest, *(len(row.trace) for row in rows))
    room = room_on(device)
    kinds = families(rows)
    waiting = cut_to_fit(kinds, room, device)
    spent.num_kinds, spent.num_families = spent.num_kinds + len(kinds), spent.num_families + len(waiting)
    active: list[Family] = []
    while active or waiting:
        taken = sum(memory_of(family.rows, device) for family in active)
        while waiting and (not active or taken + memory_of(waiting[0], device) <= room):
            taken += memory_of(waiting[0], device)
            active.append(Family(waiting.pop(0), train))
        ready = [family for family in active if family.num_queued < (AHEAD if family.left else 1)]
        for family in ready:
            done += family.advance(CHUNK) * sum(row.trace.workers.shape[1] for row in family.rows)
            progress(f"{sum(len(one.rows) for one in active)} rows side by side", done / total)
            if not family.left and not family.num_queued:
                active[active.index(family) : active.index(family) + 1] = family.without_the_ended()
                paused = time.perf_counter()
                found = list(_results(family, train, test, parts, paused - began))
                scoring += time.perf_counter() - paused
                yield from found
        if not ready:
            time.sleep(POLL)
    spent.gradients += total
    spent.scoring += scoring
    spent.training += time.perf_counter() - started - scoring


def _results(family: Family, train: Images, test: Images, parts: Sequence[str], seconds: float) -> Iterator[Finished]:
    for number, scores in scores_of(family, train, test, parts).items():
        row, (evaluated, live) = family.rows[number], family.final[number]
        found = bool(torch.isfinite(evaluated).all())
        scores = scores if found else {}
        result = summarise(row.config, row.trace.server, row.trace.virtual_seconds, scores)
        result |= {"status": "finished" if found else "diverged", "lab_seconds": round(seconds, 3)}
        result["rule_applied"] = family.rule.name  # the trace was made without weights
        yield Finished(row.config, result, evaluated.cpu(), live.cpu(), family.layout)
