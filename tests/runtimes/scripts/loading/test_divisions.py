"""Data that is divided again when workers join and leave: every pass is divided alike by all workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.config import RunConfig
from paceline.core.messages import DataAssignment
from paceline.errors import UserError
from paceline.runtimes.scripts.loading.divisions import Division, Divisions, part_of, require_one_loader
from paceline.runtimes.scripts.loading.loader import WorkerLoader, share
from paceline.settings.resolve import resolve
from tests.support.shared_loaders import CountingSession, one_pass

CONFIG = resolve(RunConfig(workers=2, max_workers=4, task="script:loop", path="star"))
NUMBERS = torch.arange(120.0)[:, None]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(NUMBERS)


def loaders(kind: str, workers: tuple[int, ...]) -> dict[int, tuple[WorkerLoader, Divisions]]:
    found = {}
    for worker in workers:
        divisions, data = Divisions(CONFIG, worker), TensorDataset(NUMBERS)
        if kind == "shuffled":
            loader: DataLoader[Any] = DataLoader(data, 5, shuffle=True)
        elif kind == "drawn":
            loader = DataLoader(data, 5, shuffle=False)
        else:
            loader = DataLoader(Stream(), 5)
        found[worker] = share(loader, CountingSession(), CONFIG, divisions), divisions
    return found


def covered(passes: list[list[list[int]]]) -> set[int]:
    """How often each sample comes in one pass of all workers."""
    counts = Counter(number for batches in passes for batch in batches for number in batch)
    assert sorted(counts) == list(range(120))
    return set(counts.values())


@pytest.mark.parametrize("kind", ["shuffled", "drawn", "stream"])
def test_each_pass_has_each_sample_once_whoever_is_in_it(kind: str) -> None:
    found = loaders(kind, (0, 1, 2))
    assert covered([one_pass(found[worker][0]) for worker in (0, 1)]) == {1}
    joined = DataAssignment(1, (0, 1, 2), 3)
    for loader, divisions in found.values():
        assert divisions.follow(joined, loader.passes) is None
    found[2][0].resume_at(3, 0)
    for _ in range(2):
        assert covered([one_pass(found[worker][0]) for worker in (0, 1)]) == {1}, "the newcomer has no part of these"
    assert [one_pass(found[2][0]) for _ in range(3)] == [[], [], []]
    assert covered([one_pass(found[worker][0]) for worker in (0, 1, 2)]) == {1}
    for worker in (1, 2):
        assert found[worker][1].follow(DataAssignment(2, (1, 2), 5), 4) is None
    assert covered([one_pass(found[worker][0]) for worker in (0, 1, 2)]) == {1}
    assert covered([one_pass(found[worker][0]) for worker in (1, 2)]) == {1}


def test_generations_have_an_order_of_their_own() -> None:
    found = loaders("shuffled", (0, 1))
    before = one_pass(found[0][0])
    found[0][1].follow(DataAssignment(3, (0, 1), 1), 1)
    assert one_pass(found[0][0]) != before


def test_a_division_that_comes_too_late_is_said() -> None:
    divisions = Divisions(CONFIG, 1)
    assert divisions.follow(None, 7) is None
    note = divisions.follow(DataAssignment(1, (0, 1, 2), 4), 6)
    assert note is not None and "from pass 7 on, others from 5" in note
    assert [divisions.of_pass(number) for number in (5, 6)] == [Division(0, 1, 2), Division(1, 1, 3)]
    note = divisions.follow(DataAssignment(3, (1, 2), 9), 7)
    assert note is not None, "it has not heard of the second one"
    assert divisions.of_pass(8) == Division(1, 1, 3) and divisions.newest == Division(3, 0, 2)


def test_a_division_replaces_those_that_were_to_begin_later() -> None:
    divisions = Divisions(CONFIG, 0)
    divisions.follow(DataAssignment(1, (0, 1, 2), 9), 2)
    divisions.follow(DataAssignment(2, (0, 2), 5), 2)
    assert [divisions.of_pass(number).generation for number in (4, 5, 9)] == [0, 2, 2]


def test_the_pass_at_the_next_push_counts_the_batches_of_a_step() -> None:
    ((loader, _),) = loaders("shuffled", (0,)).values()  # 12 batches in a pass
    said = []
    for number, _batch in enumerate(loader, start=1):
        if not number % 4:
            loader.handed_out.push()
            said.append(loader.pass_at_next_push())
    assert said == [0, 0, 1]


@pytest.mark.parametrize(("loaders", "optimizers", "what"), [(2, 1, "2 loaders"), (1, 2, "2 optimizers")])
def test_what_cannot_be_divided_again_is_refused(loaders: int, optimizers: int, what: str) -> None:
    with pytest.raises(UserError, match=f"--max-workers 4: .*{what}"):
        require_one_loader(CONFIG, loaders, optimizers)
    require_one_loader(RunConfig(workers=2), loaders, optimizers)


def test_a_part_that_would_stay_is_refused_if_workers_join_and_leave() -> None:
    fixed = RunConfig(workers=2)
    assert part_of([1, 2, 3, 4], fixed, Divisions(fixed, 1)) == [3, 4]
    with pytest.raises(UserError, match="--max-workers 4 workers join and leave"):
        part_of([1, 2, 3, 4], CONFIG, Divisions(CONFIG, 1))
