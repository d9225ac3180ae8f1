"""A loop that takes batches before it steps: a worker that starts again trains on each batch once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.own_loops import OneServer

BATCHES, SIZE, PER_PUSH = 12, 4, 2
LAST = 3  # samples of the last batch


class Killed(Exception):
    pass


class Trainer:
    """Trains on batches of numbers and notes them; ends after `limit` steps, as if it were killed."""

    def __init__(self, one: OneServer, incarnation: int, limit: int | None, copies: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        data = TensorDataset(torch.arange(float(BATCHES * SIZE - SIZE + LAST))[:, None])
        self.session = one.session(0, incarnation)
        _, _, self.loader = self.session.prepare(self.model, self.optimizer, DataLoader(data, SIZE))
        self.seen: list[int] = []
        self._forward: list[int] = []
        self._limit, self._copies = limit, copies

    def forward(self, batch: Any) -> None:
        x = batch[0] * 1.0 if self._copies else batch[0]
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self._forward += batch[0].flatten().int().tolist()

    def step(self) -> None:
        if self._limit is not None and self.session.iteration >= self._limit:
            raise Killed
        self.optimizer.step()
        self.seen += self._forward
        self._forward = []


def plain(trainer: Trainer) -> None:
    for batch in trainer.loader:
        trainer.forward(batch)
        trainer.step()


def takes_the_next_before_its_step(trainer: Trainer) -> None:
    batches = iter(trainer.loader)
    batch = next(batches, None)
    while batch is not None:
        trainer.forward(batch)
        batch = next(batches, None)
        trainer.step()


def one_ahead(batches: Any, ahead: int = 1) -> Iterator[Any]:
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) > ahead:
            yield held.pop(0)
    yield from held


def has_two_models(trainer: Trainer) -> None:
    """Each batch is followed by a call with inputs of its own, as of a GAN."""
    for batch in one_ahead(trainer.loader):
        trainer.forward(batch)
        trainer.model(torch.ones(2, 1))
        trainer.step()


def is_one_ahead(trainer: Trainer) -> None:
    for batch in one_ahead(trainer.loader):
        trainer.forward(batch)
        trainer.step()


def is_three_ahead(trainer: Trainer) -> None:
    for batch in one_ahead(trainer.loader, 3):
        trainer.forward(batch)
        trainer.step()


def accumulates(trainer: Trainer) -> None:
    for number, batch in enumerate(trainer.loader):
        trainer.forward(batch)
        if number % PER_PUSH == PER_PUSH - 1:
            trainer.step()


def accumulates_ahead(trainer: Trainer) -> None:
    for number, batch in enumerate(one_ahead(trainer.loader)):
        trainer.forward(batch)
        if number % PER_PUSH == PER_PUSH - 1:
            trainer.step()


def calls_no_model(trainer: Trainer) -> None:
    for batch in trainer.loader:
        trainer.optimizer.zero_grad()
        nn.functional.linear(batch[0], trainer.model.weight, trainer.model.bias).sum().backward()
        trainer._forward = batch[0].flatten().int().tolist()
        trainer.step()


AHEAD = (takes_the_next_before_its_step, is_one_ahead, is_three_ahead, has_two_models, accumulates_ahead)
LOOPS = (plain, accumulates, *AHEAD)
CASES: list[tuple[Callable[[Trainer], None], bool]] = [
    *((loop, False) for loop in (*LOOPS, calls_no_model)),
    *((loop, True) for loop in (*LOOPS, calls_no_model)),
]


@pytest.mark.parametrize("limit", [1, 2, 4, 5])
@pytest.mark.parametrize(("loop", "copies"), CASES)
def test_each_batch_is_trained_on_once(
    tmp_path: Path, loop: Callable[[Trainer], None], copies: bool, limit: int
) -> None:
    one = OneServer(tmp_path, workers=1, strategy="async", rule="plain")
    first = Trainer(one, 0, limit, copies)
    with pytest.raises(Killed):
        loop(first)
    one.lose(0)
    second = Trainer(one, 1, None, copies)
    loop(second)
    assert first.seen + second.seen == list(range(BATCHES * SIZE - SIZE + LAST))
    assert one.server is not None and one.server.samples == BATCHES * SIZE - SIZE + LAST


@pytest.mark.parametrize("copies", [False, True])
def test_a_batch_that_the_loop_skips_does_not_come_again(tmp_path: Path, copies: bool) -> None:
    one = OneServer(tmp_path, workers=1, strategy="async", rule="plain")

    def loop(trainer: Trainer) -> None:
        for number, batch in enumerate(trainer.loader):
            if number in (0, 3):
                continue
            trainer.forward(batch)
            trainer.step()

    first = Trainer(one, 0, 4, copies)
    with pytest.raises(Killed):
        loop(first)
    one.lose(0)
    again = Trainer(one, 1, None, copies)
    plain(again)
    assert again.seen == list(range(6 * SIZE, BATCHES * SIZE - SIZE + LAST))


def test_a_loop_that_copies_batches_for_later_is_told_what_a_restart_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(OneServer(tmp_path, workers=1, strategy="async", rule="plain"), 0, None)
    for batch in one_ahead([batch[0].clone()] for batch in trainer.loader):  # as if it were copied to a GPU
        trainer.forward(batch)
        trainer.step()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "a restart skips that batch" in told[0]


def test_copies_and_pickles_of_a_model_in_training_are_free_of_the_session(tmp_path: Path) -> None:
    trainer = Trainer(OneServer(tmp_path, workers=1, strategy="async", rule="plain"), 0, None)
    batch = next(iter(trainer.loader))
    stored = pickle.dumps(trainer.model)
    assert b"paceline" not in stored
    for twin in (copy.deepcopy(trainer.model), pickle.loads(stored)):
        assert torch.equal(twin(batch[0]), trainer.model(batch[0].clone().detach()))
    plain(trainer)
    trainer.session.finish()
    assert not trainer.model._forward_pre_hooks
