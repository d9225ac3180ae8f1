"""The lab: trains many simulated runs at once on one device, in batches of runs with the same kind of update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.analysis.collapse import COLLAPSED, why_collapsed
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.runs.result import summarise
from paceline.settings.preprocessing import ways_of
from paceline.settings.strategies import strategy_of
from paceline.simulation.lab.batch import RunBatch
from paceline.simulation.lab.evaluation import ALL_PARTS, Statistics, buffers_of, estimated, scores_of
from paceline.simulation.lab.inputs import Images
from paceline.simulation.lab.models import AUGMENTED, BATCHED
from paceline.simulation.lab.packing import available_memory, group_rows, memory_of, split_to_fit
from paceline.simulation.lab.saved_state import restore_batches, save_batches
from paceline.simulation.lab.trace_pool import traced
from paceline.system.subnormals import flush_subnormals
from paceline.system.terminal import seconds_text


@dataclass(frozen=True)
class LabResult:
    """A finished run: its result as in `result.json`, and its weights."""

    config: RunConfig
    result: dict[str, Any]
    weights: Tensor  # the evaluated weights
    live: Tensor
    layout: Layout
    buffers: dict[str, Tensor]  # running statistics of the evaluated weights, by their names in the model
    live_buffers: dict[str, Tensor]


CHUNK = 40  # updates that a batch of runs queues before the next batch's turn
MAX_QUEUED = 2  # maximum queued chunks per batch: enough to keep the device busy without long waits for other batches
POLL = 1e-4


@dataclass
class LabTimes:
    """Time and work of a call of the lab."""

    tracing: float = 0.0
    training: float = 0.0
    scoring: float = 0.0
    num_rows: int = 0
    num_batches: int = 0
    num_kinds: int = 0  # fewer than batches if the device has too little memory for all runs of a kind at once
    gradients: int = 0
    longest: int = 0  # updates of the longest run, which are sequential
    num_left: int = 0  # runs that have not ended because the time was up

    def line(self) -> str:
        """Return the times as one line."""
        rate, chain = (number / max(self.training, 1e-9) for number in (self.gradients, self.longest))
        split = f" in {self.num_batches} batches, split to fit memory" if self.num_batches > self.num_kinds else ""
        return (
            f"{self.num_rows} runs{split}, {self.gradients:,} gradients: tracing {seconds_text(self.tracing)}, "
            f"training {seconds_text(self.training)} ({rate:,.0f} gradients/s, longest run {self.longest:,} updates, "
            f"{chain:,.0f}/s), scoring {seconds_text(self.scoring)}"
        )


Progress = Callable[[str, float], None]  # called with the current activity and the finished share of all updates


def images_of(dataset: Dataset, train: bool, device: torch.device) -> Images:
    """Return one part of a data set on the device."""
    images = torch.from_numpy(dataset.train_images if train else dataset.test_images)
    labels = torch.from_numpy(dataset.train_labels if train else dataset.test_labels)
    mean, std = torch.tensor(dataset.info.mean), torch.tensor(dataset.info.std)
    placed = images.permute(0, 2, 3, 1).contiguous().to(device)
    return Images(placed, labels.to(device), (1.0 / (255.0 * std)).to(device), (-mean / std).to(device))


def check_rows(configs: list[RunConfig]) -> None:
    """Raise UserError if the lab does not support a config."""
    for config in configs:
        _check_model(config)
        if strategy_of(config).is_local or config.eval_every is not None or config.faults is not None:
            lacks = "no local steps, no --eval-every and no --faults"
            raise UserError(f"the lab has {lacks} ({config.strategy} given): use 'paceline simulate'")
        if config.max_seconds is not None:
            raise UserError("the lab has no --max-seconds: leave it out, or use 'paceline simulate'")
        if config.codec is not None or config.pull_codec is not None:
            raise UserError("the lab has no codecs: use 'paceline simulate', which computes on the CPU")
        if config.aggregate is not None or config.robust:
            raise UserError("the lab has no --aggregate but mean and no --robust: use 'paceline simulate'")
        if config.weights is not None:
            raise UserError(f"the lab draws its initial weights (--weights {config.weights}): use 'paceline simulate'")
        if config.snapshots is not None:
            raise UserError("the lab keeps no snapshots: leave out --snapshots")
        if config.precision != "fp32" or config.compile or config.capture or config.accumulate > 1:
            raise UserError("the lab has a fixed step: leave out --precision, --compile, --capture and --accumulate")


def _check_model(config: RunConfig) -> None:
    """Raise UserError if the lab cannot train the config's model on its data."""
    if config.model not in BATCHED or config.task is not None:
        raise UserError(f"the lab trains {', '.join(BATCHED)}, not {config.task or config.model}")
    if config.dataset == "imagenet":
        raise UserError("the lab does not decode images: use --dataset cifar10")
    if ways_of(config) and config.model not in AUGMENTED:
        raise UserError(f"the lab augments the images of {' and '.join(AUGMENTED)} only: add --augment none")


@dataclass(frozen=True)
class Pause:
    """Where the state of unfinished runs is kept, and when to save it and stop, if at all."""

    folder: Path
    at: float = math.inf  # a time of `perf_counter`

    @property
    def is_due(self) -> bool:
        return time.perf_counter() >= self.at


def run_rows(
    configs: list[RunConfig],
    dataset: Dataset,
    device: torch.device,
    progress: Progress,
    spent: LabTimes | None = None,
    parts: Sequence[str] = ALL_PARTS,
    pause: Pause | None = None,
) -> Iterator[LabResult]:
    """Train all configs, batch by batch in turns, and yield each result as soon as its run ends.

    With `pause`, go on from the state that an earlier call has kept, and keep it again when the time is up.
    """
    check_rows(configs)
    flush_subnormals()
    spent = spent or LabTimes()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: products of 10-bit mantissas, sums in full
    train, test = images_of(dataset, True, device), images_of(dataset, False, device)
    began = time.perf_counter()
    rows = traced(configs, dataset, progress)
    total = sum(row.trace.workers.size for row in rows)
    started, scoring = time.perf_counter(), 0.0
    spent.tracing += started - began
    spent.num_rows += len(rows)
    spent.longest = max(spent.longest, *(len(row.trace) for row in rows))
    room = available_memory(device)
    active, fresh = restore_batches(pause.folder, rows, train) if pause is not None else ([], rows)
    kinds = group_rows(fresh)
    waiting = split_to_fit(kinds, room, device)
    spent.num_kinds += len(kinds) + len(active)
    spent.num_batches += len(waiting) + len(active)
    before = done = sum(batch.gradients_done for batch in active)
    while active or waiting:
        taken = sum(memory_of(batch.rows, device) for batch in active)
        while waiting and (not active or taken + memory_of(waiting[0], device) <= room):
            taken += memory_of(waiting[0], device)
            active.append(RunBatch(waiting.pop(0), train))
        ready = [batch for batch in active if batch.num_queued < (MAX_QUEUED if batch.left else 1)]
        for batch in ready:
            done += batch.advance(CHUNK) * sum(row.trace.workers.shape[1] for row in batch.rows)
            progress(f"{sum(len(one.rows) for one in active)} runs at once", done / total)
            if not batch.left and not batch.num_queued:
                active[active.index(batch) : active.index(batch) + 1] = batch.remaining()
                paused = time.perf_counter()
                found = list(_results(batch, train, test, parts, paused - began))
                scoring += time.perf_counter() - paused
                yield from found
        if pause is not None and pause.is_due:
            break
        if not ready:
            time.sleep(POLL)
    if pause is not None:
        save_batches(active, rows, pause.folder)
    spent.num_left += sum(len(batch.rows) for batch in active) + sum(map(len, waiting))
    spent.gradients += done - before
    spent.scoring += scoring
    spent.training += time.perf_counter() - started - scoring


def _results(batch: RunBatch, train: Images, test: Images, parts: Sequence[str], seconds: float) -> Iterator[LabResult]:
    statistics = {number: _statistics_of(batch, number, train) for number in batch.ended}
    for number, scores in scores_of(batch, statistics, train, test, parts).items():
        row, (evaluated, live) = batch.rows[number], batch.final[number]
        finite = bool(torch.isfinite(evaluated).all())
        result = summarise(row.config, row.trace.server, row.trace.virtual_seconds, scores if finite else {})
        why: str | None = "the weights are no longer finite"
        if finite:
            why = why_collapsed(row.config, row.trace.server, None, scores, list)  # the lab logs no losses
        status = "diverged" if not finite else COLLAPSED if why is not None else "finished"
        result |= {"status": status, "reason": why, "lab_seconds": round(seconds, 3)}
        result["rule_applied"] = batch.rule.name  # the arrival order was simulated without weights
        buffers = (buffers_of(row.config.model, each) for each in statistics[number])
        yield LabResult(row.config, result, evaluated.cpu(), live.cpu(), batch.layout, *buffers)


def _statistics_of(batch: RunBatch, number: int, train: Images) -> tuple[Statistics, Statistics]:
    """Return the running statistics of a finished run's evaluated and live weights."""
    (evaluated, live), config = batch.final[number], batch.rows[number].config
    found = estimated(config, batch.layout, evaluated, train)
    return found, found if torch.equal(evaluated, live) else estimated(config, batch.layout, live, train)
