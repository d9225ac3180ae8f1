"""Accounts: every second of a worker's time lands in one part, and states say whose turn it is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import Input, Join, Leave, Push
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server
from paceline.interfaces import Policy
from paceline.runtimes.server.accounting import TimeAccounting, Way
from paceline.runtimes.server.timing import TimingCollector
from paceline.transports.protocol import Timing

NOTHING = torch.zeros(0)
SERVING = 0.25


def make_server(policy: Policy, num_workers: int, steps: int = 1000) -> Server:
    rule = Plain(Sgd())
    training = Training(Budget(10**6, 10**6, steps=steps), Schedule(0.0))
    return Server(torch.zeros(1), rule, policy, training, Roster(num_workers))


@dataclass
class Office:
    """A server with its accounts; serving any input takes a quarter of a second."""

    policy: Policy
    num_workers: int = 2
    way: Way = "sending"
    seqs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = make_server(self.policy, self.num_workers)
        self.timings = TimingCollector()
        self.accounting = TimeAccounting(self.timings, self.way)
        for worker in range(self.num_workers):
            self.take(Join(worker, 0), 0.0)

    def take(self, message: Input, now: float) -> list[int]:
        self.accounting.on_input(message, self.server, now)
        replies = self.server.handle(message).replies
        for reply in replies:
            self.accounting.on_reply(reply, now, now + SERVING)
        return [reply.worker for reply in replies]

    def push(self, worker: int, now: float, computed: float = 0.0, waited: float = 0.0) -> list[int]:
        """A push comes, and its worker says how long it computed and how long it had waited before that."""
        seq = self.seqs[worker] = self.seqs.get(worker, -1) + 1
        self.timings.add(worker, Timing(0.0, computed, waited))
        serial = self.server.members[worker].serial
        return self.take(Push(worker, 0, seq, serial, 1, 0.0, torch.zeros(1), NOTHING), now)

    def row(self, now: float) -> dict[str, Any]:
        return self.accounting.row(self.server, now)


def test_an_exchange_is_split_into_the_way_the_wait_and_the_server() -> None:
    """Worker 0 waits 3 s for worker 1's push; its own push and reply are under way for half a second together."""
    office = Office(Barrier())
    assert office.push(0, 1.0, computed=0.75) == []
    assert office.push(1, 4.0, computed=3.75) == [0, 1]
    office.push(0, 6.0, computed=1.0, waited=3.0 + SERVING + 0.5)
    row = office.row(6.0)
    parts = {part: row[part][0] for part in ("computing", "waiting", "server", "sending")}
    assert parts == {"computing": 1.75, "waiting": 3.0, "server": SERVING, "sending": 0.5}
    assert row["send"][0] == 0.25  # of two exchanges, the first without any
    assert row["step"] == [0.875, 3.75]


@pytest.mark.parametrize(("way", "other"), [("server", "sending"), ("waiting", "sending"), ("sending", None)])
def test_what_lies_between_counts_as_the_runtime_says(way: Way, other: str | None) -> None:
    office = Office(Async(), way=way)
    office.push(0, 1.0, computed=0.5)
    office.push(0, 3.0, computed=0.5, waited=1.0)
    row = office.row(3.0)
    assert row[way][0] == (1.0 if way == "server" else 1.0 - SERVING)
    assert other is None or other not in row
    if way == "waiting":  # a ring, whose workers make the update themselves
        assert "server" not in row and row["computing"][0] == 1.0 + SERVING


@given(st.lists(st.tuples(st.integers(0, 2), *[st.floats(0.0, 2.0)] * 3), max_size=40), st.booleans())
def test_no_second_is_lost_or_counted_twice(course: list[tuple[int, float, float, float]], in_step: bool) -> None:
    """Whoever's turn it is computes and sends; what it says it did is what the four parts add up to."""
    office = Office(Barrier() if in_step else Async(), num_workers=3)
    now, told, sent = 0.0, dict.fromkeys(range(3), 0.0), dict.fromkeys(range(3), 0.0)
    pushed_at: dict[int, float] = {}
    answered_at = dict.fromkeys(range(3), SERVING)
    for worker, computed, up, down in course:
        if office.server.members[worker].waiting:
            continue
        waited = answered_at[worker] + down - pushed_at[worker] if worker in pushed_at else 0.0
        begins = answered_at[worker] + (down if worker in pushed_at else 0.0)
        now = max(now, begins + computed + up)
        pushed_at[worker] = now - up
        for other in office.push(worker, now, computed, waited):
            answered_at[other] = now + SERVING
        told[worker] += computed + waited
        now += SERVING
    row = office.row(now)
    for worker in range(3):
        sent[worker] = sum(row[part][worker] for part in ("computing", "sending", "waiting", "server") if part in row)
        assert sent[worker] == pytest.approx(told[worker], abs=0.005)


def test_states_say_whose_turn_it_is() -> None:
    office = Office(Barrier(), num_workers=3)
    assert office.row(0.0)["state"] == ["live"] * 3
    office.push(0, 1.0)
    assert office.row(1.0)["state"] == ["held", "live", "live"]
    office.take(Leave(2, 0), 2.0)
    assert office.row(2.0)["state"] == ["held", "live", "lost"]
    row = office.row(1e6)
    assert row["state"] == ["held", "paused", "lost"]
    assert row["paused"] == {"1": [1e6 - SERVING, 30.0]}
    office.take(Join(2, 1), 3.0)
    assert office.row(3.0)["state"] == ["held", "live", "live"]
    office.take(Leave(2, 0), 4.0)  # of its earlier life
    assert office.row(4.0)["state"] == ["held", "live", "live"]


def test_before_the_start_those_who_came_are_held_and_the_others_awaited() -> None:
    server = make_server(Async(), 2)
    accounts = TimeAccounting(TimingCollector())
    accounts.on_input(Join(1, 0), server, 0.0)
    server.handle(Join(1, 0))
    row = accounts.row(server, 0.0)
    assert row["state"] == ["awaited", "held"]
    assert row["ago"] == [None, 0.0]


def test_when_it_is_over_nobody_is_paused_and_who_leaves_is_not_lost() -> None:
    office = Office(Async())
    office.server.budget = Budget(1, 1, steps=1)
    office.push(0, 1.0)
    office.take(Leave(0, 0), 2.0)
    assert office.row(1e6)["state"] == ["done", "done"]
    assert office.row(1e6)["paused"] == {}


def test_staleness_is_the_mean_of_a_workers_own_pushes() -> None:
    office = Office(Async())
    for second in range(1, 4):
        office.push(0, float(second))
    office.push(1, 4.0)
    row = office.row(4.0)
    assert row["staleness"] == [0.0, 3.0]
    assert row["pushes"] == row["steps"] == [3, 1]
    assert row["ago"] == [1.0, 0.0]


def test_a_repeated_push_counts_once() -> None:
    office = Office(Async())
    office.push(1, 0.5)
    office.push(0, 1.0)
    office.seqs[0] -= 1
    office.take(Push(0, 0, 0, 0, 1, 0.0, torch.zeros(1), NOTHING), 2.0)
    row = office.row(2.0)
    assert row["pushes"] == [1, 1]
    assert row["staleness"] == [1.0, 0.0], "the mean is over one push"


def test_the_wait_after_a_return_is_nobodys() -> None:
    """Between a loss and the first reply of the next life there was no worker to wait."""
    office = Office(Async())
    office.push(0, 1.0, computed=1.0)
    office.take(Leave(0, 0), 2.0)
    office.take(Join(0, 1), 50.0)
    office.timings.add(0, Timing(0.0, 1.0, 0.0))
    office.take(Push(0, 1, 0, office.server.members[0].serial, 1, 0.0, torch.zeros(1), NOTHING), 52.0)
    row = office.row(52.0)
    assert row["waiting"][0] == 0.0 and row["server"][0] <= SERVING


def test_a_row_of_a_thousand_workers_is_of_bounded_size() -> None:
    office = Office(Async(), num_workers=1000)
    for worker in range(1000):
        office.push(worker, 3600.123456 + worker / 7, computed=123.456789, waited=98.7654321)
    assert len(json.dumps(office.row(12345.678))) < 120_000
