"""Random courses of pushes, leaves and joins, walked by a rule and by its serial oracle side by side.

A worker's gradient depends on the weights it was sent, so a wrong hand-out shows as well as a wrong step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.interfaces import Arrival, Rule, State

SIZE = 5
GAP = 4
"""The last place belongs to no parameter: zero, and zero it stays."""


@dataclass(frozen=True)
class Turn:
    """Perhaps somebody leaves, perhaps somebody (back or new) joins, then `push` pushes."""

    push: int
    leave: int | None = None
    join: int | None = None


@dataclass(frozen=True)
class Course:
    max_workers: int
    turns: tuple[Turn, ...]


def course(seed: int, max_workers: int | None = None, length: int | None = None) -> Course:
    """Uneven arrivals: some workers push several times as often as others, and a few come and go."""
    chance = Random(seed)
    max_workers = max_workers or chance.randint(1, 4)
    pace = [chance.choice([1.0, 1.0, 4.0]) for _ in range(max_workers)]
    live, turns = set(range(max_workers)), []
    for _ in range(length or chance.randint(1, 40)):
        leave = join = None
        if len(live) > 1 and chance.random() < 0.12:
            leave = chance.choice(sorted(live))
            live.discard(leave)
        missing = sorted(set(range(max_workers)) - live - {leave})
        if missing and chance.random() < 0.5:
            join = chance.choice(missing)
            live.add(join)
        here = sorted(live)
        turns.append(Turn(chance.choices(here, [pace[worker] for worker in here])[0], leave, join))
    return Course(max_workers, tuple(turns))


courses = st.integers(0, 2**32).map(course)


def lr_at(version: int) -> float:
    """A learning rate that changes on the way."""
    return (0.02, 0.05, 0.03)[version // 5 % 3]


def gradient_at(worker: int, weights: Sequence[float]) -> list[float]:
    """Of a bowl of the worker's own."""
    found = [(0.4 + 0.3 * ((worker + place) % 3)) * (w - (worker - place)) for place, w in enumerate(weights)]
    return [*found[:GAP], 0.0]


START = [0.5, -1.0, 2.0, 0.25, 0.0]


class Slow(Protocol):
    """A rule written slowly and plainly."""

    weights: list[float]

    def leave(self, worker: int) -> None: ...

    def push(self, worker: int, gradient: list[float], staleness: int, lr: float, num_live: int) -> None: ...

    def sent(self, worker: int) -> list[float]: ...


class Ledger:
    """Who is here, and at which version each was answered; the same for both."""

    def __init__(self, max_workers: int) -> None:
        self.live = set(range(max_workers))
        self.version = 0
        self._answered = dict.fromkeys(range(max_workers), 0)

    def leave(self, worker: int) -> None:
        self.live.discard(worker)

    def answer(self, worker: int) -> None:
        self.live.add(worker)
        self._answered[worker] = self.version

    def staleness(self, worker: int) -> int:
        return self.version - self._answered[worker]


def walk_slowly(slow: Slow, along: Course) -> list[list[float]]:
    """The weights after each push."""
    ledger = Ledger(along.max_workers)
    memories = {worker: slow.sent(worker) for worker in range(along.max_workers)}
    found = []
    for turn in along.turns:
        if turn.leave is not None:
            ledger.leave(turn.leave)
            slow.leave(turn.leave)
        if turn.join is not None:
            ledger.answer(turn.join)
            memories[turn.join] = slow.sent(turn.join)
        gradient = gradient_at(turn.push, memories[turn.push])
        slow.push(turn.push, gradient, ledger.staleness(turn.push), lr_at(ledger.version), len(ledger.live))
        ledger.version += 1
        ledger.answer(turn.push)
        memories[turn.push] = slow.sent(turn.push)
        found.append(list(slow.weights))
    return found


class Walk:
    """A rule on its way along a course, as the server drives it."""

    def __init__(self, rule: Rule, along: Course, state: State | None = None) -> None:
        self.rule, self.course = rule, along
        self.ledger = Ledger(along.max_workers)
        self.weights = torch.tensor(START)
        self.state = rule.start(self.weights)
        self.memories = [torch.zeros(SIZE) for _ in range(along.max_workers)]
        for worker in range(along.max_workers):
            rule.join(self.state, worker)
        for worker in range(along.max_workers):
            self._answer(worker)

    def _answer(self, worker: int) -> None:
        self.ledger.answer(worker)
        self.rule.reply_weights(self.weights, self.state, worker, self.memories[worker])

    def turn(self, turn: Turn) -> None:
        if turn.leave is not None:
            self.ledger.leave(turn.leave)
            self.rule.leave(self.state, turn.leave)
        if turn.join is not None:
            self.rule.join(self.state, turn.join)
            self._answer(turn.join)
        worker, ledger = turn.push, self.ledger
        gradient = torch.tensor(gradient_at(worker, self.memories[worker].tolist()))
        lr = torch.tensor(lr_at(ledger.version))
        arrival = Arrival(worker, ledger.staleness(worker), lr, len(ledger.live))
        self.rule.apply(self.weights, self.state, gradient, arrival)
        ledger.version += 1
        self._answer(worker)

    def to_the_end(self) -> list[list[float]]:
        found = []
        for turn in self.course.turns:
            self.turn(turn)
            found.append(self.weights.tolist())
        return found


def require_the_oracles_way(rule: Rule, slow: Slow, along: Course) -> None:
    """The same weights after every push, up to rounding, and zeros where no parameter lies."""
    expected, found = torch.tensor(walk_slowly(slow, along)), torch.tensor(Walk(rule, along).to_the_end())
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    assert (found[:, GAP] == 0).all()


def walk_together(rule: Rule, several: Sequence[Course]) -> Tensor:
    """The weights after each push, [pushes, runs, SIZE], of runs side by side: one apply for all, leaves one by one."""
    runs, max_workers = len(several), several[0].max_workers
    weights = torch.tensor([START] * runs)
    state = rule.start(weights)
    memories = weights.unsqueeze(1).repeat(1, max_workers, 1)
    ledgers = [Ledger(max_workers) for _ in several]
    everyone = torch.arange(runs)
    found = []
    for turns in zip(*(along.turns for along in several), strict=True):
        for run, turn in enumerate(turns):
            row = {name: tensor[run] for name, tensor in state.items()}
            if turn.leave is not None:
                ledgers[run].leave(turn.leave)
                rule.leave(row, turn.leave)
            if turn.join is not None:
                ledgers[run].answer(turn.join)
                rule.join(row, turn.join)
                rule.reply_weights(weights[run], row, turn.join, memories[run, turn.join])
        workers = torch.tensor([turn.push for turn in turns])
        rows = [gradient_at(turn.push, memories[run, turn.push].tolist()) for run, turn in enumerate(turns)]
        staleness = [[ledger.staleness(turn.push)] for ledger, turn in zip(ledgers, turns, strict=True)]
        lr = torch.tensor([[lr_at(ledger.version)] for ledger in ledgers])
        live = torch.tensor([[len(ledger.live)] for ledger in ledgers], dtype=torch.int32)
        arrival = Arrival(workers, torch.tensor(staleness, dtype=torch.int32), lr, live)
        rule.apply(weights, state, torch.tensor(rows), arrival)
        out = torch.zeros(runs, SIZE)
        rule.reply_weights(weights, state, workers, out)
        memories[everyone, workers] = out
        for ledger, turn in zip(ledgers, turns, strict=True):
            ledger.version += 1
            ledger.answer(turn.push)
        found.append(weights.clone())
    return torch.stack(found)


MakeRule = Callable[[int], Rule]
"""From the number of places."""
