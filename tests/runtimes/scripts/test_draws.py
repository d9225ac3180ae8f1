"""All workers draw the same pass of a sampler, share its batches, and find their place in it again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runtimes.scripts.adopt import sort_out
from paceline.runtimes.scripts.draws import DrawnBatches, order_of
from paceline.runtimes.scripts.sampler import share_data
from paceline.settings.resolve import resolve

DATA = TensorDataset(torch.arange(100.0)[:, None])


class Mixed(Sampler[int]):
    """Draws from every global generator, and from one of its own that goes on from pass to pass."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(50):
            yield int(random.random() * 20 + np.random.rand() * 20 + torch.rand(()) * 20 + self.own.random() * 20)


def drawn(loader: DataLoader[Any], worker: int, workers: int = 3, accumulate: int = 1, **settings: Any) -> DrawnBatches:
    config = resolve(RunConfig(workers=workers, task="a:b", epoch_mode="own", **settings))
    return DrawnBatches(order_of(loader), 100, config, worker, accumulate)


def one_pass(batches: DrawnBatches, number: int) -> list[list[int]]:
    steps = range(number * batches.per_epoch, (number + 1) * batches.per_epoch)
    batches.begin_pass(number, steps[0])
    return [part.tolist() for step in steps for part in batches.parts(step)]


LOADERS = {
    "in order": lambda: DataLoader(DATA, 8),
    "subset": lambda: DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(80))),
    "with replacement": lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, True, 77), drop_last=True),
    "own": lambda: DataLoader(DATA, 8, sampler=Mixed()),
    "whole batches": lambda: DataLoader(DATA, batch_sampler=[[1, 2], [3], [4, 5, 6], [7], [8, 9]]),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_the_batches_of_all_workers_are_those_of_one(name: str, workers: int) -> None:
    alone = drawn(LOADERS[name](), 0, workers=1)
    shares = [drawn(LOADERS[name](), worker, workers) for worker in range(workers)]
    for number in range(3):
        whole, parts = one_pass(alone, number), [one_pass(share, number) for share in shares]
        for worker, part in enumerate(parts):
            assert part == whole[worker::workers]
    assert {share.checksum for share in shares} == {alone.checksum}
    assert sum(share.samples_before(2 * share.per_epoch) for share in shares) == 2 * alone.num_samples
    assert {share.epoch_samples for share in shares} == {alone.num_samples}


def test_each_pass_and_each_seed_has_its_own_draw() -> None:
    first = drawn(LOADERS["subset"](), 0, seed=1)
    passes = [one_pass(first, 0), one_pass(first, 1), one_pass(drawn(LOADERS["subset"](), 0, seed=2), 0)]
    assert passes[0] != passes[1] and passes[0] != passes[2]
    assert one_pass(first, 0) == passes[0]


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_loop_finds_the_same_batches(name: str) -> None:
    """It begins the finished passes too, so that a sampler with a state of its own comes to the same one."""
    went_on, resumed = drawn(LOADERS[name](), 1), drawn(LOADERS[name](), 1)
    for number in range(2):
        one_pass(went_on, number)
        resumed.begin_pass(number, 2 * resumed.per_epoch)
    assert one_pass(went_on, 2) == one_pass(resumed, 2)


def test_batches_of_a_dropped_push_come_again_in_the_next_pass() -> None:
    share = drawn(LOADERS["subset"](), 1)
    first, second = one_pass(share, 0), one_pass(drawn(LOADERS["subset"](), 1), 1)
    last = share.per_epoch - 1
    share.begin_pass(1, last)
    assert [part.tolist() for number in (last, last + 1) for part in share.parts(number)] == [first[-1], second[0]]


def test_under_full_each_worker_draws_all() -> None:
    shares = [drawn(LOADERS["subset"](), worker, split="full") for worker in range(3)]
    passes = [one_pass(share, 0) for share in shares]
    assert all(sorted(np.concatenate(seen)) == list(range(80)) for seen in passes)
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_samples_are_counted_by_steps(accumulate: int) -> None:
    share = drawn(DataLoader(DATA, 8), 1, workers=2, accumulate=accumulate)  # 6 batches, the last of 4
    share.begin_pass(0, 0)
    sizes = [sum(map(len, share.parts(step))) for step in range(share.per_epoch)]
    assert [share.samples_before(step) for step in range(share.per_epoch + 1)] == np.cumsum([0, *sizes]).tolist()
    assert (share.per_epoch, sum(sizes)) == (-(-6 // accumulate), share.num_samples)


def test_more_workers_than_batches_are_told_so() -> None:
    with pytest.raises(UserError, match="SequentialSampler makes 2 batches for 3 workers"):
        drawn(DataLoader(DATA, 50), 0)


def test_a_batch_size_beside_a_batch_sampler_is_one_too_many() -> None:
    with pytest.raises(UserError, match="batch_size=4, and the loader has list, which makes batches itself"):
        sort_out(nn.Linear(1, 1), (LOADERS["whole batches"](),), 4)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", [*LOADERS, "shuffled"])
def test_no_step_has_more_samples_than_its_loop_declares(name: str, accumulate: int) -> None:
    loader = LOADERS[name]() if name in LOADERS else DataLoader(DATA, 8, shuffle=True)
    config = resolve(RunConfig(workers=2, task="a:b", epoch_mode="own", epochs=1.0))
    share = share_data(sort_out(nn.Linear(1, 1), (loader,), None), config, 0, accumulate)
    share.batches.begin_pass(0, 0)
    steps = [sum(map(len, share.batches.parts(step))) for step in range(share.batches.per_epoch)]
    assert max(steps) <= share.max_samples
