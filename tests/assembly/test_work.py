"""However many share the data, all of it has an owner; and where that cannot be, it is said before the run starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.assembly.work import WorkAssignment, divide_work
from paceline.config import RunConfig
from paceline.core.messages import DataAssignment
from paceline.errors import UserError
from paceline.settings.resolve import resolve

LABELS = np.arange(600) % 10


def divided(**settings: Any) -> tuple[RunConfig, WorkAssignment]:
    config = resolve(RunConfig(**{"workers": 3, "max_workers": 6, "batch_size": 8, "task": "a:b", **settings}))
    return config, divide_work(LABELS, config)


def one_pass(config: RunConfig, work: WorkAssignment, worker: int, assignment: DataAssignment | None) -> list[int]:
    batches = work.batches(worker, config, assignment)
    return [int(i) for number in range(batches.per_epoch) for i in batches.indices(number)]


@pytest.mark.parametrize("split", ["iid", "labels", "dirichlet:5"])
@pytest.mark.parametrize("members", [(2,), (0, 2), (1, 4, 5), (0, 1, 2, 3, 4, 5)])
def test_in_every_deal_each_sample_has_one_owner_and_is_seen_once_a_pass(split: str, members: tuple[int, ...]) -> None:
    config, work = divided(split=split, validation=0.1)
    assignment = DataAssignment(1 + len(members), members)
    seen = [index for worker in members for index in one_pass(config, work, worker, assignment)]
    assert sorted(seen) == work.train.tolist()


def test_under_full_everybody_has_everything() -> None:
    config, work = divided(split="full")
    for worker in (1, 5):
        assert sorted(one_pass(config, work, worker, DataAssignment(1, (1, 5)))) == work.train.tolist()


def test_the_classes_of_who_left_are_spread_over_who_is_here() -> None:
    config, work = divided(split="labels", workers=5)
    before = {w: set(LABELS[one_pass(config, work, w, None)]) for w in range(5)}
    after = {w: set(LABELS[one_pass(config, work, w, DataAssignment(1, (0, 1, 3, 4)))]) for w in (0, 1, 3, 4)}
    assert before[2] <= set().union(*after.values()) and all(len(classes) == 2 for classes in before.values())


def test_an_address_names_its_deal() -> None:
    config, work = divided()
    first = work.batches(1, config, DataAssignment(1, (0, 1))).indices(0).tolist()
    assert work.batches(1, config, DataAssignment(1, (0, 1))).indices(0).tolist() == first
    assert work.batches(1, config, DataAssignment(2, (0, 1))).indices(0).tolist() != first
    assert set(work.batches(1, config, DataAssignment(9, (0, 1))).indices(0)) <= set(
        one_pass(config, work, 1, DataAssignment(1, (0, 1)))
    )


def test_the_first_division_is_the_one_of_a_fixed_run() -> None:
    config, work = divided()
    fixed, other = divided(max_workers=None)
    assert [one_pass(config, work, w, None) for w in range(3)] == [one_pass(fixed, other, w, None) for w in range(3)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_workers": 2}, "--max-workers 2 is below the --workers 3 that begin"),
        ({"max_workers": 76}, "--max-workers 76: 600 samples make only 75 batches of 8"),
        ({"max_workers": 75, "batch_size": 8, "validation": 0.1}, "540 samples make only 68 batches"),
        ({"batch_size": 120, "workers": 2, "max_workers": 4, "split": "labels"}, None),
        ({"split": "dirichlet:0.001"}, "--max-workers 6: split dirichlet:0.001"),
        ({"epoch_mode": "own"}, "under --epoch-mode own each worker passes over its own data"),
        ({"shard_weights": [1.0, 1.0, 2.0]}, "--shard-weights are for workers that stay"),
        ({"strategy": "allreduce"}, "strategy allreduce is a ring, which no worker can join"),
        ({"strategy": "local:4"}, "strategy local:4 is a ring, which no worker can join"),
        ({"strategy": "classic", "workers": 1}, "strategy classic is one worker"),
        ({"device": "cuda"}, "workers that share a GPU are one process, which no worker joins"),
    ],
)
def test_what_cannot_be_shared_anew_is_refused(settings: dict[str, Any], words: str | None) -> None:
    if words is None:
        divided(**settings)
        return
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        divided(**settings)
