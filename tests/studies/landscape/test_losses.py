"""Losses on the plane are the task's own, on rows that are the same every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import Dataset
from paceline.errors import UserError
from paceline.settings.resolve import resolve
from paceline.studies.landscape.losses import MIN_BATCH, Losses, chosen_rows
from paceline.tasks.supervised import SupervisedTask


@pytest.mark.parametrize(("model", "side_by_side"), [("lenet5", True), ("lenet5", False), ("cnn", True)])
def test_they_are_the_tasks_own(make_dataset: Callable[..., Dataset], model: str, side_by_side: bool) -> None:
    task = make_task(resolve(RunConfig(model=model)), make_dataset(60, 20))
    points = [(task.initial() * factor, None) for factor in (0.5, 1.0, 1.5, 2.0, 0.1, 3.0, 0.7)]
    ticks: list[int] = []
    found = Losses(task, task.train, 40, side_by_side)(points, lambda: ticks.append(1))
    rows = chosen_rows(60, 40)
    expected = [task.evaluate(weights, None, task.train, rows).loss for weights, _ in points]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert len(ticks) == 7


def normed_task() -> SupervisedTask:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    return SupervisedTask(model, F.cross_entropy, (torch.randn(50, 5), torch.randint(0, 3, (50,))))


def test_running_statistics_count_and_dropout_does_not() -> None:
    task = normed_task()
    losses = Losses(task, task.train, 50)
    weights = task.initial()
    states = [torch.full((task.state_size,), value) for value in (0.5, 2.0)]
    found = losses((weights, state) for state in states)
    assert found.tolist() == pytest.approx([task.evaluate(weights, s, task.train).loss for s in states], rel=1e-6)
    assert found[0] != found[1]
    assert torch.equal(found, losses((weights, state) for state in states))


def test_rows_are_the_same_every_time_and_none_twice() -> None:
    rows = chosen_rows(1000, 100)
    assert torch.equal(rows, chosen_rows(1000, 100))
    assert len(set(rows.tolist())) == 100 and rows.tolist() != list(range(100))
    assert chosen_rows(7, 100).tolist() == list(range(7))


def test_batches_shrink_until_the_device_has_room() -> None:
    task = normed_task()
    plenty = Losses(task, task.train, 50)([(task.initial(), None)])
    seen: list[int] = []

    def scarce(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(targets))
        if len(targets) > MIN_BATCH:
            raise torch.OutOfMemoryError
        return F.cross_entropy(outputs, targets)

    task.loss = scarce
    assert Losses(task, task.train, 50)([(task.initial(), None)]).tolist() == pytest.approx(plenty.tolist())
    assert max(seen[-2:]) <= MIN_BATCH < seen[0]

    def none(outputs: Tensor, targets: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    task.loss = none
    with pytest.raises(UserError, match="too little memory"):
        Losses(task, task.train, 50)([(task.initial(), None)])
