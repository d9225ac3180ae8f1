"""Who trains on what, and for how long: a function of the config and the labels, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.assemble import on_ring
from paceline.config import RunConfig
from paceline.core.schedules import Budget
from paceline.data.batches import Batches
from paceline.data.partition import hold_out, hold_out_fold, parse_fold, parse_split, partition
from paceline.errors import UserError


@dataclass(frozen=True)
class Work:
    """Who trains on what, and for how long."""

    shards: list[np.ndarray[Any, Any]]
    validation: np.ndarray[Any, Any]
    train: np.ndarray[Any, Any]
    quotas: list[int | None]
    budget: Budget
    skew: float
    """How far the workers' labels are from the whole: the mean distance of their histograms, from 0 to almost 1."""

    def batches(self, worker: int, config: RunConfig) -> Batches:
        """The addressed batches of one worker."""
        return Batches(self.shards[worker], config.batch_size, config.seed, worker)


def held_out(labels: np.ndarray[Any, Any], config: RunConfig) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What a run trains on, and what it only scores: a share of the train set, or one fold of it."""
    if config.fold is not None:
        return hold_out_fold(labels, *parse_fold(config.fold), config.seed)
    return hold_out(labels, config.validation, config.seed)


def divide_work(labels: np.ndarray[Any, Any], config: RunConfig) -> Work:
    """Split the train set over the workers; the same in every process, since it is a function of the config alone."""
    workers = config.workers or 1
    train, validation = held_out(labels, config)
    if config.batch_size > len(train):
        raise UserError(f"--batch-size {config.batch_size}: there are only {len(train)} samples; use a smaller batch")
    available = -(-len(train) // config.batch_size)
    if workers > available:
        raise UserError(
            f"--workers {workers}: {len(train)} samples make only {available} batches of {config.batch_size}; "
            f"use at most {available} workers or a smaller batch"
        )
    parts = partition(labels[train], workers, parse_split(config.split), config.seed, config.shard_weights)
    shards = [train[part] for part in parts]
    work = [Batches(shard, config.batch_size, config.seed, worker) for worker, shard in enumerate(shards)]
    if config.epoch_mode == "own":
        counts = [max(1, round(config.epochs * batches.per_epoch)) for batches in work]
        if on_ring(config):  # nobody leaves a ring early: who has fewer goes on into its next epoch
            counts = [max(counts)] * workers
        quotas: list[int | None] = list(counts)
        total = sum(b.samples_before(count) for b, count in zip(work, counts, strict=True))
        budget = Budget(total, len(train), own=True)
    else:
        quotas = [None] * workers
        budget = Budget(max(1, round(config.epochs * len(train))), len(train), steps=config.steps)
    return Work(shards, validation, train, quotas, budget, skew_of(labels, train, shards))


def skew_of(labels: np.ndarray[Any, Any], train: np.ndarray[Any, Any], shards: list[np.ndarray[Any, Any]]) -> float:
    """Half the sum of differences between a worker's shares of labels and the whole's, less what chance makes of it.

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
