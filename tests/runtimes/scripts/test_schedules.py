"""A scheduler that was handed to `prepare` goes on where the worker's last incarnation was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from paceline.runtimes.scripts.adopt import FollowedScheduler, Place

MAKERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=12),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.9)], [3]
    ),
    "chained": lambda optimizer: ChainedScheduler([StepLR(optimizer, 2), ExponentialLR(optimizer, 0.9)]),
}


def optimizer_of() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)


def settings(optimizer: torch.optim.Optimizer) -> list[float]:
    return [optimizer.param_groups[0][name] for name in ("lr", "momentum")]


class Loop:
    """An optimizer and its followed scheduler; its loader is at `place`."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.optimizer = optimizer_of()
        self.scheduler, self.skips, self.place = make(self.optimizer), False, ((0, 0),)
        self.followed = FollowedScheduler(self.scheduler, lambda: self.skips, self.where)

    def where(self) -> Place:
        return self.place

    def push(self) -> int:
        """The next batch and its step; return what the server is told."""
        self.place = ((self.place[0][0], self.place[0][1] + 1),)
        self.optimizer.step()
        return self.followed.count_after(self.place)


@pytest.mark.parametrize("count", [0, 1, 4, 7])
@pytest.mark.parametrize("name", MAKERS)
def test_it_goes_on_after_as_many_steps(name: str, count: int) -> None:
    plain, loop = optimizer_of(), Loop(MAKERS[name])
    scheduler = MAKERS[name](plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.followed.go_on(count)
    for _ in range(count):
        plain.step()
        scheduler.step()
    assert settings(loop.optimizer) == settings(plain) and loop.followed.count == count
    for one, other in ((plain, scheduler), (loop.optimizer, loop.scheduler)):
        for _ in range(3):
            one.step()
            other.step()
    assert settings(loop.optimizer) == settings(plain) and loop.followed.count == count + 3


def test_steps_do_nothing_while_finished_passes_are_skipped() -> None:
    loop = Loop(MAKERS["exponential"])
    loop.followed.go_on(2)
    before = settings(loop.optimizer)
    loop.skips = True
    for _ in range(5):
        loop.scheduler.step()
    assert settings(loop.optimizer) == before and loop.followed.count == 2
    loop.skips = False
    loop.optimizer.step()
    loop.scheduler.step()
    assert settings(loop.optimizer)[0] == pytest.approx(0.9 * before[0]) and loop.followed.count == 3


@pytest.mark.parametrize("name", MAKERS)
def test_steps_count_from_the_state_that_the_script_loads(name: str) -> None:
    """A script that starts again loads the same state after `prepare`, and goes on behind it."""
    saved = Loop(MAKERS[name])
    for _ in range(3):
        saved.push()
        saved.scheduler.step()
    first, second = Loop(MAKERS[name]), Loop(MAKERS[name])
    first.scheduler.load_state_dict(copy.deepcopy(saved.scheduler.state_dict()))
    told = 0
    for _ in range(4):
        told = first.push()
        first.scheduler.step()
    assert told == 4
    second.followed.go_on(told)
    second.scheduler.load_state_dict(copy.deepcopy(saved.scheduler.state_dict()))
    assert settings(second.optimizer) == settings(first.optimizer)
    assert second.scheduler.last_epoch == first.scheduler.last_epoch if hasattr(first.scheduler, "last_epoch") else True
    second.push()
    second.scheduler.load_state_dict(copy.deepcopy(saved.scheduler.state_dict()))
    assert second.followed.count == 0, "after a push it is a load of this incarnation"


def test_one_that_needs_a_metric_stays_where_it_is() -> None:
    loop = Loop(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0))
    loop.followed.go_on(5)
    assert settings(loop.optimizer) == [0.1, 0.9] and loop.followed.count == 5
    for _ in range(3):
        loop.optimizer.step()
        loop.scheduler.step(1.0)
    assert settings(loop.optimizer)[0] < 0.1 and loop.followed.count == 8


def test_the_server_is_told_of_the_step_that_follows_each_push() -> None:
    """The next incarnation begins with the next batch: the schedule has stepped by then."""
    loop, told = Loop(MAKERS["exponential"]), []
    for _ in range(4):
        told.append(loop.push())
        loop.scheduler.step()
    assert told[1:] == [2, 3, 4], "after the second push it is known that one follows each"
    loop.place = ((1, 0),)  # a new pass
    assert loop.push() == 5


def test_a_schedule_by_epochs_is_stepped_by_the_next_incarnation_itself() -> None:
    loop, told = Loop(MAKERS["exponential"]), []
    for epoch in range(3):
        loop.place = ((epoch, 0),)
        told.append([loop.push() for _ in range(3)])
        loop.scheduler.step()
    assert told == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_a_schedule_that_steps_before_its_push_is_counted_as_it_is() -> None:
    loop, told = Loop(MAKERS["exponential"]), []
    for number in range(4):
        loop.place = ((0, number + 1),)
        loop.optimizer.step()
        loop.scheduler.step()
        told.append(loop.followed.count_after(loop.place))
    assert told == [1, 2, 3, 4]


def test_a_schedule_of_every_second_step_is_followed_within_one() -> None:
    loop, told = Loop(MAKERS["exponential"]), []
    for number in range(6):
        told.append(loop.push())
        if number % 2:
            loop.scheduler.step()
    counts = [0, 0, 1, 1, 2, 2]
    assert all(count <= one <= count + 1 for one, count in zip(told, counts, strict=True))
