"""Divide the data over the workers and set the budget: the same in every process, for a config and its labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config import RunConfig, is_script, max_workers_of
from paceline.core.messages import DataAssignment, Reply
from paceline.core.schedules import Budget
from paceline.data.partition import hold_out, hold_out_fold, partition
from paceline.data.sampler import Batches, samples_before
from paceline.errors import UserError
from paceline.randomness import rng
from paceline.settings.preprocessing import fold_of, split_of, train_score_of
from paceline.settings.strategies import on_ring


@dataclass(frozen=True)
class WorkAssignment:
    """The shards of the workers, the samples held out, and how long to train."""

    shards: list[np.ndarray[Any, Any]]
    validation: np.ndarray[Any, Any]
    train: np.ndarray[Any, Any]
    quotas: list[int | None]
    budget: Budget
    skew: float  # the mean distance of the workers' label histograms from that of all data, from 0 to almost 1
    labels: np.ndarray[Any, Any]  # the labels of the samples to train on
    multiple_of: int = 1  # a worker's pass has a multiple of this many samples
    _parts: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    _part_sizes: dict[int, list[int]] = field(default_factory=dict)

    def batches(self, worker: int, config: RunConfig, assignment: DataAssignment | None = None) -> Batches:
        """The batches of one worker, by the first division or by the one since workers joined or left.

        A worker that joins late has no shard before that: it warms up on the shard of another worker.
        """
        if assignment is None:
            shard = self.shards[worker % len(self.shards)]
            return Batches(shard, config.batch_size, config.seed, worker, multiple_of=self.multiple_of)
        members = assignment.members
        return self.part(worker, config, assignment.generation, members.index(worker), len(members))

    def part(self, worker: int, config: RunConfig, generation: int, index: int, count: int) -> Batches:
        """The batches of one worker that has part `index` of `count`."""
        shard = self.train[self.parts(count, config)[index]]
        return Batches(shard, config.batch_size, config.seed, worker, generation, self.multiple_of)

    def samples_of(self, reply: Reply, config: RunConfig) -> int:
        """How many samples the batch has, or the batches of local steps have, that a reply asks for."""
        if reply.assignment is None:
            size = len(self.shards[reply.worker % len(self.shards)]) // self.multiple_of * self.multiple_of
        else:
            members = reply.assignment.members
            if len(members) not in self._part_sizes:
                self._part_sizes[len(members)] = [len(part) for part in self.parts(len(members), config)]
            size = self._part_sizes[len(members)][members.index(reply.worker)]
        first, end = reply.batch, reply.batch + max(1, reply.steps)
        return samples_before(end, size, config.batch_size) - samples_before(first, size, config.batch_size)

    def parts(self, num_members: int, config: RunConfig) -> list[np.ndarray[Any, Any]]:
        """Divide the train set over this many members, and keep the last division: all workers ask for the same one."""
        if num_members not in self._parts:
            self._parts.clear()
            parts = partition(self.labels, num_members, split_of(config), config.seed, config.shard_weights)
            self._parts[num_members] = parts
        return self._parts[num_members]


def held_out(labels: np.ndarray[Any, Any], config: RunConfig) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The samples to train on, and those held out: a share of the train set, or one fold of it."""
    fold = fold_of(config)
    if fold is not None:
        return hold_out_fold(labels, *fold, config.seed)
    return hold_out(labels, config.validation, config.seed)


def scored_train(train: np.ndarray[Any, Any], config: RunConfig) -> np.ndarray[Any, Any]:
    """The samples to train on that are scored at the end: all, or as many as `--train-score`, drawn by the seed."""
    number = train_score_of(config)
    if number is None or number >= len(train):
        return train
    return np.sort(rng(config.seed, "train score").choice(train, number, replace=False))


def divide_work(labels: np.ndarray[Any, Any], config: RunConfig, multiple_of: int = 1) -> WorkAssignment:
    """Split the train set over the workers, and set the budget. A worker's pass is a multiple of `multiple_of`."""
    workers, places = config.workers or 1, max_workers_of(config)
    train, validation = held_out(labels, config)
    if config.batch_size > len(train):
        what = "session.prepare(..., loader): batches of" if is_script(config) else "--batch-size"
        have = "is only 1 sample" if len(train) == 1 else f"are only {len(train)} samples"
        raise UserError(f"{what} {config.batch_size}: there {have}; use a smaller batch")
    available = -(-len(train) // config.batch_size)
    if places > available:
        flag = "workers" if config.max_workers is None else "max-workers"
        raise UserError(
            f"--{flag} {places}: {len(train)} samples make only {available} batch{'es' * (available > 1)} of "
            f"{config.batch_size}; use at most {available} worker{'s' * (available > 1)} or a smaller batch"
        )
    parts = partition(labels[train], workers, split_of(config), config.seed, config.shard_weights)
    shards = [train[part] for part in parts]
    size, seed = config.batch_size, config.seed
    work = [Batches(shard, size, seed, worker, 0, multiple_of) for worker, shard in enumerate(shards)]
    if config.epoch_mode == "own":
        counts = [max(1, round(config.epochs * batches.per_epoch)) for batches in work]
        if on_ring(config):  # no worker leaves a ring early: one with fewer batches goes on into its next epoch
            counts = [max(counts)] * workers
        quotas: list[int | None] = list(counts)
        total = sum(b.samples_before(count) for b, count in zip(work, counts, strict=True))
        budget = Budget(total, len(train), per_worker=True)
    else:
        quotas = [None] * places
        budget = Budget(max(1, round(config.epochs * len(train))), len(train), steps=config.steps)
    skew = skew_of(labels, train, shards)
    found = WorkAssignment(shards, validation, train, quotas, budget, skew, labels[train], multiple_of)
    if config.max_workers is not None:
        _require_parts(found, config)
    return found


def _require_parts(work: WorkAssignment, config: RunConfig) -> None:
    """Check that every worker has at least one batch, for each number of members; even parts only for the largest."""
    drawn = split_of(config).kind == "dirichlet"
    for num_members in range(1 if drawn else max_workers_of(config), max_workers_of(config) + 1):
        try:
            smallest = min(len(part) for part in work.parts(num_members, config))
        except UserError as error:
            raise UserError(f"--max-workers {config.max_workers}: {error}") from None
        if smallest < config.batch_size:
            raise UserError(
                f"--max-workers {config.max_workers}: split {config.split} over {num_members} workers leaves one with "
                f"{smallest} samples, less than a batch of {config.batch_size}: use fewer, iid or smaller batches"
            )


def skew_of(labels: np.ndarray[Any, Any], train: np.ndarray[Any, Any], shards: list[np.ndarray[Any, Any]]) -> float:
    """The mean distance of label histograms (half the sum of differences), without differences that chance explains.

    >>> labels = np.arange(400) % 2
    >>> whole = np.arange(400)
    >>> skew_of(labels, whole, [whole[labels == 0], whole[labels == 1]]), skew_of(labels, whole, [whole, whole])
    (0.5, 0.0)
    """
    _, number = np.unique(labels, return_inverse=True)
    count = int(number.max()) + 1
    shares = np.bincount(number[train], minlength=count) / len(train)
    found = []
    for shard in shards:
        apart = np.abs(np.bincount(number[shard], minlength=count) / len(shard) - shares).sum() / 2.0
        chance = np.sqrt(shares * (1.0 - shares) / (2.0 * np.pi * len(shard))).sum() if len(shard) < len(train) else 0.0
        found.append(apart if apart > 3.0 * chance else 0.0)
    return float(np.mean(found))
