"""A worker that falls silent without leaving: the rule goes on without what it last said, until it pushes again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from paceline.core.membership import SILENCE_FACTOR, Member
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async
from paceline.core.rules.cached import Cached
from paceline.core.rules.dana import Dana
from paceline.core.rules.foresight import Foresight, ForesightCached
from paceline.core.rules.ringleader import Ringleader
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server, restore_server, server_facts
from paceline.interfaces import Rule
from tests.support.toy_cluster import Ledger, ToyCluster

CACHING = ("cached", "foresight-cached", "foresight")
RULES: dict[str, Callable[[int], Rule]] = {
    "dana": lambda max_workers: Dana(0.5, max_workers),
    "ringleader": lambda max_workers: Ringleader(0.0, max_workers),
    "cached": lambda max_workers: Cached(Sgd(), max_workers),
    "foresight-cached": lambda max_workers: ForesightCached(0.9, max_workers),
    "foresight": lambda max_workers: Foresight(0.9, max_workers),
}
SILENT_AFTER = int(SILENCE_FACTOR * 3)


def cluster(rule: str) -> ToyCluster:
    toys = ToyCluster("async", 3, Budget(1_000_000, 100), make_rule=RULES[rule])
    for worker in range(3):
        toys.join(worker)
    for worker in range(3):
        toys.push(worker)
    return toys


def kept_of(toys: ToyCluster, worker: int) -> float:
    """What the rule has of the worker's last push; its pushes are ones in a place of their own."""
    return float(toys.server.rule_state["cache"][worker].abs().sum())


@pytest.mark.parametrize("rule", CACHING)
def test_its_last_push_lapses_and_its_next_one_counts(rule: str) -> None:
    toys = cluster(rule)
    for number in range(SILENT_AFTER):
        toys.push(number % 2)
    assert not toys.server.members[2].silent and kept_of(toys, 2) == 1.0
    for number in range(4):  # one of the three is looked at each time
        toys.push(number % 2)
    assert toys.server.members[2].silent and kept_of(toys, 2) == 0.0
    assert toys.server.rule_state["total"].tolist() == [1.0, 1.0, 0.0]
    assert [toys.server.members[worker].silent for worker in (0, 1)] == [False, False]
    toys.push(2)
    assert not toys.server.members[2].silent and kept_of(toys, 2) == 1.0
    assert toys.server.rule_state["total"].tolist() == [1.0, 1.0, 1.0]


def test_the_others_do_not_look_ahead_along_its_momentum() -> None:
    toys = cluster("dana")
    for number in range(SILENT_AFTER):
        toys.push(number % 2)
    assert toys.server.rule_state["total"][2] == 1.0
    for number in range(4):
        toys.push(number % 2)
    assert toys.server.members[2].silent and toys.server.rule_state["total"][2] == 0.0
    toys.push(2)
    assert toys.server.rule_state["total"][2] == 1.0


@pytest.mark.parametrize("pushes_before", [0, 1, 2])
def test_a_round_does_not_wait_for_it_and_its_next_push_counts(pushes_before: int) -> None:
    """Silent before it has a mean of the round, before its step, and after it."""
    toys = ToyCluster("async", 3, Budget(1_000_000, 100), make_rule=RULES["ringleader"])
    for worker in range(3):
        toys.join(worker)
    for worker in [2, 0, 1, 2][: 2 * pushes_before]:
        toys.push(worker)
    for number in range(2 * SILENT_AFTER):
        toys.push(number % 2)
    assert toys.server.members[2].silent
    before = toys.server.weights.clone()
    for number in range(8):
        toys.push(number % 2)
    moved = before - toys.server.weights
    assert moved[0] > 0 and moved[1] > 0 and moved[2] == 0.0
    toys.push(2)
    for number in range(4):
        toys.push(number % 2)
    assert toys.server.weights[2] < before[2]


def test_a_steady_worker_is_slow_and_not_silent() -> None:
    toys = cluster("cached")
    for number in range(10 * SILENT_AFTER):
        toys.push(number % 2)
        if number % (SILENT_AFTER - 5) == 0:
            toys.push(2)
        assert kept_of(toys, 2) == 1.0


def test_one_pause_teaches_little_and_a_new_pace_is_learned() -> None:
    member = Member(0, None, usual=3.0)
    member.record_push(1000)
    assert member.usual == pytest.approx(3.6)
    for version in range(2000, 50_000, 1000):
        member.version = version - 1000
        member.record_push(version)
    assert member.usual > 900.0


def test_who_is_held_back_or_gone_is_not_silent() -> None:
    assert Member(0, None, waiting=False).fell_silent(61, 3)
    assert not Member(0, None, waiting=False).fell_silent(60, 3)
    assert not Member(0, None, waiting=True).fell_silent(61, 3)
    assert not Member(0, None, waiting=False, live=False).fell_silent(61, 3)
    assert not Member(0, None, waiting=False, released=True).fell_silent(61, 3)
    assert not Member(0, None, waiting=False, silent=True).fell_silent(61, 3)  # told already


@pytest.mark.parametrize("updates", [SILENT_AFTER - 3, SILENT_AFTER + 4])
def test_a_server_that_goes_on_from_a_cut_knows_who_is_silent(updates: int) -> None:
    toys = cluster("foresight-cached")
    for number in range(updates):
        toys.push(number % 2)
    facts = json.loads(json.dumps(server_facts(toys.server)))
    rule = Ledger(RULES["foresight-cached"](3))
    rule.here = set(range(3))
    toys.twin = Server(torch.zeros(3), rule, Async(), Training(toys.budget, Schedule(0.25)), Roster(3))
    restore_server(toys.twin, facts, toys.server.weights, toys.server.rule_state)
    for number in range(updates, updates + 10):
        toys.push(number % 2)  # compares both, bit for bit
    toys.push(2)
    assert server_facts(toys.server) == server_facts(toys.twin)
