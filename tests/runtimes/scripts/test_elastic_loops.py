"""Own loops whose workers join, leave and are drained: each goes on in its data where no other is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.core.messages import Drain, Resume
from paceline.core.server import restore_server, server_facts
from paceline.runtimes.scripts.session import Session, TrainingOver
from tests.support.own_loops import OneServer

NUMBERS = torch.arange(40.0)[:, None]


class Loop:
    """A script's loop as a generator: it stops after every step."""

    def __init__(self, session: Session, passes: int = 8) -> None:
        self.session, self.passes, self.seen = session, passes, list[tuple[int, int]]()
        model = nn.Linear(1, 1)
        self.optimizer = SGD(model.parameters(), lr=1.0)
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        loader = DataLoader(TensorDataset(NUMBERS), 5, shuffle=True)
        self.model, _, _, self.loader = session.prepare(model, self.optimizer, self.scheduler, loader)
        self._steps = self._run()

    def _run(self) -> Any:
        for number in range(self.passes):
            for (batch,) in self.loader:
                self.optimizer.zero_grad()
                self.model(batch / 1000).mean().backward()
                self.optimizer.step()
                self.seen += [(number, int(sample)) for sample in batch.flatten()]
                yield
            self.scheduler.step()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            next(self._steps, None)

    def finish(self) -> None:
        for _ in self._steps:
            pass


def elastic(folder: Path) -> tuple[OneServer, list[Loop]]:
    """A run of one worker, and a second one that has joined after ten steps, in the second pass."""
    one = OneServer(folder, strategy="async", workers=1, max_workers=4, rule="plain")
    first = Loop(one.session(0))
    first.step(10)
    return one, [first, Loop(one.session(1))]


def seen_in(number: int, loops: list[Loop]) -> Counter[int]:
    return Counter(sample for loop in loops for place, sample in loop.seen if place == number)


def test_a_worker_that_joins_begins_with_the_first_pass_that_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, loops = elastic(tmp_path)
    assert [loop.session.num_workers for loop in loops] == [1, 2], "the first has not heard of it yet"
    rates = [loop.optimizer.param_groups[0]["lr"] for loop in loops]
    assert rates == [0.5, 0.5], "a newcomer goes on with the schedule of another worker"
    for _ in range(8):
        for loop in loops:
            loop.step()
    loops.append(Loop(one.session(2)))
    for loop in loops:
        loop.finish()
    assert [loop.session.num_workers for loop in loops] == [3, 3, 3]
    for number in range(8):
        assert seen_in(number, loops) == Counter(range(40)), number
    assert [min(number for number, _ in loop.seen) for loop in loops] == [0, 2, 5]
    assert loops[1].session.iteration == 3 * 4 + 3 * 3
    assert "hears late" not in capsys.readouterr().err


def test_a_worker_that_comes_after_the_last_pass_has_nothing_to_do(tmp_path: Path) -> None:
    one, loops = elastic(tmp_path)
    for loop in loops:
        loop.finish()
    late = Loop(one.session(3))
    late.finish()
    assert not late.seen
    late.session.finish()


def test_the_part_of_a_drained_worker_goes_to_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, loops = elastic(tmp_path)
    for loop in loops:
        loop.step(5)
    one.handle(Drain(1))
    loops[1].finish()
    assert loops[1].session.finished and len(loops[1].seen) == 6 * 5, "its current push still counts"
    assert "worker 1 was drained: its loop ends" in capsys.readouterr().err
    with pytest.raises(TrainingOver):
        loops[1].session.finish()
    loops[0].finish()
    assert one.server is not None and one.server.assignments is not None
    first = one.server.assignments.now.first_pass
    assert first == 4, "worker 1 was in its pass 3"
    for number in (0, 1, 2, *range(first, 8)):
        assert seen_in(number, loops) == Counter(range(40)), number
    assert max(seen_in(3, loops).values()) == 1 and len(seen_in(3, loops)) < 40


def test_a_worker_that_was_lost_before_it_heard_of_its_drain_hears_of_it_when_it_returns(tmp_path: Path) -> None:
    one, loops = elastic(tmp_path)
    loops[1].step(3)
    one.handle(Drain(1))
    one.lose(1)
    back = Loop(one.session(1, 1))
    assert back.session.finished
    back.finish()
    assert not back.seen
    with pytest.raises(TrainingOver):
        back.session.finish()


def test_a_lost_worker_goes_on_in_its_pass_unless_the_others_have_divided_the_data_without_it(tmp_path: Path) -> None:
    one, loops = elastic(tmp_path)
    for loop in loops:
        loop.step(6)
    one.lose(1)
    back = Loop(one.session(1, 1))
    assert back.session.iteration == 6 and back.loader.position == (3, 2), "nobody has heard that it was away"
    back.step(2)
    one.lose(1)
    loops[0].step(2)
    again = Loop(one.session(1, 2))
    assert again.session.iteration == 8 and again.loader.position == (5, 0)
    for loop in (loops[0], again):
        loop.finish()
    for number in range(5, 8):
        assert seen_in(number, [loops[0], again]) == Counter(range(40)), number


def test_a_resumed_run_goes_on_with_the_division_that_it_had(tmp_path: Path) -> None:
    one, loops = elastic(tmp_path)
    for _ in range(7):
        for loop in loops:
            loop.step()
    assert one.server is not None and one.server.assignments is not None
    facts = json.loads(json.dumps(server_facts(one.server)))
    restore_server(one.server, facts, one.server.weights, one.server.rule_state)
    one.handle(Resume())
    one.server.roster.pending.clear()
    again = Loop(one.session(0, 1))  # `paceline resume` starts none above --workers
    places = loops[0].loader.position, again.loader.position
    assert places[0] == places[1], "it goes on in its pass, as its part was"
    again.finish()
    first = one.server.assignments.now.first_pass
    for number in range(first, 8):
        assert seen_in(number, [again]) == Counter(range(40)), number
    for number in range(2):
        assert seen_in(number, loops) == Counter(range(40)), number
