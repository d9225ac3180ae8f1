"""What the server does for users' own loops: each has its own schedule, and a dropped push is one of its steps."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.core.messages import Disposition, Join, Leave, Outcome, Push, SetLrFactor
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import LrDisagreement, Roster, Server, restore_server, server_facts
from paceline.interfaces import Policy

BUDGET = Budget(samples=10**9, epoch_samples=100, per_worker=True)


def server_of(policy: Policy, num_workers: int, quota: int | None = None, own_loop: bool = True) -> Server:
    """A server of one weight at 0 and a learning rate of 1, on which every worker has joined."""
    server = Server(torch.zeros(1), Plain(Sgd()), policy, Training(BUDGET, Schedule(1.0)), Roster(num_workers))
    for worker in range(num_workers):
        server.handle(Join(worker, 0, quota, own_loop=own_loop))
    return server


def push(server: Server, worker: int) -> Outcome:
    """A push of gradient -1: it moves the weight by its learning rate."""
    serial = server.members[worker].serial
    return server.handle(Push(worker, 0, serial, serial, 1, 0.5, -torch.ones(1), torch.empty(0)))


def moved(server: Server, *workers: int) -> float:
    """How far the weight moves by a push of each of these workers."""
    before = server.weights.item()
    for worker in workers:
        push(server, worker)
    return server.weights.item() - before


def test_a_push_that_is_applied_alone_has_the_learning_rate_of_its_own_worker() -> None:
    server = server_of(Async(), 3)
    server.handle(SetLrFactor(0, 0.125))
    server.handle(SetLrFactor(2, 0.5))
    assert [moved(server, worker) for worker in (0, 1, 2, 0)] == [0.125, 1.0, 0.5, 0.125]
    assert server.lr_disagreement is None, "only rounds can disagree"


def test_a_round_has_the_learning_rate_of_its_lowest_worker_and_remembers_the_first_disagreement() -> None:
    server = server_of(Barrier(), 3)
    for worker in (2, 1, 0):
        server.handle(SetLrFactor(worker, 0.5))
    assert moved(server, 2, 0, 1) == 0.5 and server.lr_disagreement is None
    server.handle(SetLrFactor(2, 0.125))
    assert moved(server, 2, 1, 0) == 0.5
    assert server.lr_disagreement == LrDisagreement(used=0, other=2, factors=(0.5, 0.125))
    server.handle(SetLrFactor(1, 0.25))
    assert moved(server, 2, 1, 0) == 0.5
    assert server.lr_disagreement == LrDisagreement(used=0, other=2, factors=(0.5, 0.125))


def test_a_slow_worker_0_sets_the_learning_rate_of_rounds_that_it_misses() -> None:
    """Otherwise the learning rate would rise again with each round that it takes part in."""
    server = server_of(Barrier(1), 3)
    server.handle(SetLrFactor(0, 0.5))
    for worker in (1, 2):
        server.handle(SetLrFactor(worker, 0.125))
    assert moved(server, 1, 2) == 0.5
    assert server.lr_disagreement == LrDisagreement(used=0, other=1, factors=(0.5, 0.125))


@pytest.mark.parametrize("policy", [Async, Barrier])
def test_the_next_workers_schedule_holds_if_worker_0_dies(policy: type[Async | Barrier]) -> None:
    server = server_of(policy(), 3)
    for worker in range(3):
        server.handle(SetLrFactor(worker, 0.5))
    server.handle(Leave(0, 0))
    server.handle(SetLrFactor(1, 0.25))
    server.handle(SetLrFactor(2, 0.25))
    assert server.lr == 0.25
    assert moved(server, 2, 1) == (0.25 if policy is Barrier else 0.5)


def test_a_checkpoint_keeps_every_workers_learning_rate() -> None:
    server = server_of(Async(), 3)
    server.handle(SetLrFactor(1, 0.25))
    facts = json.loads(json.dumps(server_facts(server)))
    again = server_of(Async(), 3)
    restore_server(again, facts, server.weights, {})
    assert [moved(again, worker) for worker in range(3)] == [1.0, 0.25, 1.0]


def late(server: Server) -> Outcome:
    """Worker 0 pushes after a round that worker 1 closed without it."""
    push(server, 1)
    return push(server, 0)


def test_a_dropped_push_is_a_step_of_an_own_loop_and_its_batch_comes_again() -> None:
    server = server_of(Barrier(1), 2, quota=3)
    dropped = late(server)
    (again,) = dropped.replies
    assert (dropped.disposition, again.batch, again.dropped) == (Disposition.DROPPED, 0, 1)
    late(server)
    last = late(server).replies[-1]
    assert (last.worker, last.finished, last.batch, last.dropped) == (0, True, 0, 3), "the loop made its three steps"
    assert server.finished and (server.samples, server.dropped) == (3, 3)


def test_a_dropped_push_of_a_task_is_made_up_for() -> None:
    server = server_of(Barrier(1), 2, quota=3, own_loop=False)
    for _ in range(3):
        late(server)
    while not server.finished:
        push(server, 0)
    assert (server.samples, server.dropped) == (6, 3)


def test_a_worker_that_comes_back_still_has_its_dropped_steps() -> None:
    server = server_of(Barrier(1), 2, quota=3)
    late(server)
    server.handle(Leave(0, 0))
    assert server.handle(Join(0, 1, 3, own_loop=True)).replies[0].dropped == 1
