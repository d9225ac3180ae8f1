"""What the server does for users' own loops: each brings its own settings, and every push is one of its steps."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Disposition, Join, Leave, Outcome, Resume, Stop
from paceline.core.own_loop.settings import LoopLayout, Number, SettingsDisagreement
from paceline.core.policies import Async, Barrier, DropStale
from paceline.core.schedules import Budget
from paceline.core.server import Server, restore_server, server_facts
from tests.support.loop_servers import LOOP, push, served, values, vector


def moved(server: Server, lrs: dict[int, float]) -> float:
    """How far the first weight moves by a push of each of these workers, in this order, at these learning rates."""
    before = values(server)[0]
    for worker, lr in lrs.items():
        push(server, worker, vector(lr))
    return values(server)[0] - before


def test_a_push_that_is_applied_alone_has_the_settings_of_its_own_worker() -> None:
    server = served(Async(), 3)
    assert [moved(server, {worker: lr}) for worker, lr in ((0, 0.125), (1, 1.0), (2, 0.5), (0, 0.25))] == [
        0.125,
        1.0,
        0.5,
        0.25,
    ]
    assert server.own_loops.disagreement is None, "only rounds can disagree"


def test_each_group_has_its_own_settings() -> None:
    server = served(Async(), 1)
    push(server, 0, vector((0.5, 0.25)))
    assert values(server) == [0.5, 0.25]
    push(server, 0, vector((0.5, 0.25), momentum=0.5))  # the momentum buffer begins with this gradient
    push(server, 0, vector((0.5, 0.25), momentum=0.5))
    assert values(server) == [0.5 + 0.5 + 0.75, 0.25 + 0.25 + 0.375]


def test_a_round_has_the_settings_of_its_lowest_worker_and_remembers_the_first_disagreement() -> None:
    server = served(Barrier(), 3)
    assert moved(server, {2: 0.5, 0: 0.5, 1: 0.5}) == 0.5 and server.own_loops.disagreement is None
    assert moved(server, {2: 0.125, 1: 0.5, 0: 0.5}) == 0.5
    first = SettingsDisagreement(used=0, other=2, setting="lr", values=(0.5, 0.125))
    assert server.own_loops.disagreement == first
    assert moved(server, {2: 0.125, 1: 0.25, 0: 0.5}) == 0.5
    assert server.own_loops.disagreement == first


def test_a_disagreement_names_the_setting() -> None:
    server = served(Barrier(), 2)
    push(server, 1, vector(0.5, momentum=0.25))
    push(server, 0, vector(0.5, momentum=0.125))
    assert server.own_loops.disagreement == SettingsDisagreement(0, 1, "momentum", (0.125, 0.25))


def test_loops_at_other_places_do_not_disagree() -> None:
    server = served(Barrier(), 2)
    push(server, 1, vector(0.5, place=7))
    push(server, 0, vector(0.5, place=3, flags=(1, 0)))
    assert server.own_loops.disagreement is None


def test_a_slow_worker_0_sets_the_learning_rate_of_rounds_that_it_misses() -> None:
    """Otherwise the learning rate would rise again with each round that it takes part in."""
    server = served(Barrier(1), 3)
    assert moved(server, {0: 0.5, 1: 0.5}) == 0.5
    push(server, 2, vector(0.125))  # late
    assert moved(server, {1: 0.125, 2: 0.125}) == 0.5
    assert server.own_loops.disagreement == SettingsDisagreement(0, 1, "lr", (0.5, 0.125))


@pytest.mark.parametrize("policy", [Async, Barrier])
def test_the_next_workers_settings_hold_if_worker_0_dies(policy: type[Async | Barrier]) -> None:
    server = served(policy(), 3)
    moved(server, {0: 0.5, 1: 0.5, 2: 0.5})
    assert server.lr == 0.5
    server.handle(Leave(0, 0))
    assert moved(server, {2: 0.125, 1: 0.25}) == (0.25 if policy is Barrier else 0.375)
    assert server.lr == 0.25


@pytest.mark.parametrize("policy", [Async, Barrier])
def test_a_parameter_without_a_gradient_anywhere_is_skipped(policy: type[Async | Barrier]) -> None:
    """Also by its momentum, as torch skips it."""
    server = served(policy(), 2)
    for worker in range(2):
        push(server, worker, vector(1.0, momentum=0.5))
    before = values(server)
    for worker in range(2):
        push(server, worker, vector(1.0, momentum=0.5, flags=(1, 0)))
    assert values(server)[0] > before[0] and values(server)[1] == before[1]
    assert {name for name in server.rule_state if name.startswith("optimizer.")} == {
        "optimizer.0.momentum_buffer",
        "optimizer.1.momentum_buffer",
    }


def test_a_parameter_with_a_gradient_in_some_pushes_of_a_round_gets_their_mean() -> None:
    server = served(Barrier(), 2)
    lacking = torch.cat([torch.full((2,), -1.0), torch.zeros(server.weights.numel() - 2)])
    push(server, 0, vector(1.0, momentum=0.5, flags=(1, 0)), gradient=lacking)
    push(server, 1, vector(1.0, momentum=0.5))
    assert values(server) == [1.0, 0.5]
    for worker in range(2):  # then momentum moves both
        push(server, worker, vector(1.0, momentum=0.5), gradient=0.0)
    assert values(server) == [1.5, 0.75]


def test_alone_the_same_push_skips_what_it_has_no_gradient_for() -> None:
    server = served(Async(), 2)
    push(server, 0, vector(1.0, flags=(1, 0)))
    push(server, 1, vector(1.0, flags=(0, 1)))
    assert values(server) == [1.0, 1.0]


@pytest.mark.parametrize("policy", [Async, Barrier])
def test_a_push_of_weight_0_is_answered_and_changes_nothing(policy: type[Async | Barrier]) -> None:
    server = served(policy(), 2)
    outcomes = [push(server, worker, vector(0.5), weight=0.0) for worker in range(2)]
    assert sum(len(outcome.replies) for outcome in outcomes) == 2
    assert all(outcome.disposition is Disposition.TAKEN for outcome in outcomes)
    assert (server.version, server.skipped, server.taken, server.samples, server.dropped) == (0, 2, 2, 0, 0)
    assert not server.weights.any() and [reply.batch for reply in outcomes[-1].replies] == [1] * len(
        outcomes[-1].replies
    )
    assert moved(server, {0: 0.5, 1: 0.5}) == (0.5 if policy is Barrier else 1.0)


def test_a_round_is_the_mean_of_those_that_were_not_skipped() -> None:
    server = served(Barrier(), 3)
    push(server, 0, vector(1.0), weight=0.0, gradient=0.0)
    push(server, 1, vector(1.0), gradient=-1.0)
    assert not server.version
    push(server, 2, vector(1.0), gradient=-3.0)
    assert (server.version, server.skipped, values(server)) == (1, 1, [2.0, 2.0])


def test_a_round_with_one_push_left_has_that_pushs_settings() -> None:
    server = served(Barrier(), 2)
    push(server, 0, vector(1.0), weight=0.0, gradient=0.0)
    push(server, 1, vector(0.25), gradient=-1.0)
    assert values(server) == [0.25, 0.25] and server.own_loops.disagreement is None


def test_the_loss_of_a_skipped_push_may_be_infinite() -> None:
    server = served(Async(), 1)
    assert push(server, 0, weight=0.0, gradient=0.0, loss=float("inf")).disposition is Disposition.TAKEN
    assert server.divergence is None and not server.finished


STEPS = Budget(samples=60, epoch_samples=60, per_worker=True, pushes=6)


def test_steps_are_the_pushes_of_all_workers_in_rounds() -> None:
    server = served(Barrier(), 2, budget=STEPS)
    for number in range(3):
        assert not server.finished, f"round {number}"
        push(server, 0)
        replies = push(server, 1).replies
    assert server.finished and (server.version, server.taken) == (3, 6)
    assert [(reply.worker, reply.finished) for reply in replies] == [(0, True), (1, True)]


def test_steps_are_the_pushes_of_all_workers_if_each_is_applied_alone() -> None:
    server = served(Async(), 2, budget=STEPS)
    for worker in (0, 0, 1, 0, 0):
        (reply,) = push(server, worker).replies
        assert not reply.finished
    (reply,) = push(server, 1).replies
    assert reply.finished and server.finished and server.version == 6
    assert push(server, 0).disposition is Disposition.LATE and server.taken == 6


def test_a_step_that_is_skipped_is_one_of_the_steps() -> None:
    server = served(Async(), 2, budget=STEPS)
    for worker in (0, 1, 0, 1, 0):
        push(server, worker, weight=0.0)
    (reply,) = push(server, 1, weight=0.0).replies
    assert reply.finished and server.finished and not server.version


def test_a_push_that_is_dropped_is_none_of_the_steps() -> None:
    server = served(DropStale(1), 2, budget=Budget(60, 60, per_worker=True, pushes=2))
    push(server, 1)
    assert push(server, 0).disposition is Disposition.DROPPED and not server.finished
    assert push(server, 0).replies[0].finished and (server.taken, server.dropped) == (2, 1)


def test_a_loop_that_ends_leaves_its_work_to_the_others() -> None:
    server = served(Barrier(), 2)
    push(server, 1, vector(0.5))
    outcome = server.handle(Leave(0, 0, done=True))
    assert [reply.worker for reply in outcome.replies] == [1] and values(server) == [0.5, 0.5]
    assert server.members[0].released and not server.finished
    push(server, 1, vector(0.5))
    assert server.version == 2
    server.handle(Resume())
    assert server.pending_workers == [1], "nobody waits for a loop that has ended"
    server.handle(Stop())
    assert server.finished and server.version == 2


def test_the_next_incarnation_is_told_where_its_predecessor_was() -> None:
    server = served(Async(), 2)
    push(server, 1, vector(0.25, place=6))
    server.handle(Leave(1, 0))
    (reply,) = server.handle(Join(1, 1, own_loop=True)).replies
    memory = WorkerBuffers.private(BufferSizes(server.weights.numel(), loop=LOOP.size))
    server.send_weights(reply, memory)
    assert torch.equal(memory.loop, vector(0.25, place=6)) and reply.batch == 1
    memory.loop.fill_(-1.0)
    (reply,) = push(server, 1, vector(0.125, place=7)).replies
    server.send_weights(reply, memory)
    assert (memory.loop == -1.0).all(), "later replies leave it to the worker"


def test_a_checkpoint_keeps_every_workers_settings() -> None:
    server = served(Async(), 3)
    push(server, 1, vector(0.25, place=3), weight=0.0)
    facts = json.loads(json.dumps(server_facts(server)))
    again = served(Async(), 3)
    restore_server(again, facts, server.weights, server.rule_state)
    assert again.own_loops.newest.keys() == {1} and torch.equal(again.own_loops.newest[1], server.own_loops.newest[1])
    assert (again.skipped, again.taken, again.lr) == (1, 1, 0.25)
    assert server_facts(again) == server_facts(server)


def late(server: Server) -> Outcome:
    """Worker 0 pushes after a round that worker 1 closed without it."""
    push(server, 1)
    return push(server, 0)


def test_a_dropped_push_is_a_step_of_an_own_loop() -> None:
    server = served(Barrier(1), 2, quota=3)
    dropped = late(server)
    (again,) = dropped.replies
    assert (dropped.disposition, again.batch, again.dropped) == (Disposition.DROPPED, 0, 1)
    late(server)
    last = late(server).replies[-1]
    assert (last.worker, last.finished, last.batch, last.dropped) == (0, True, 0, 3), "the loop made its three steps"
    assert server.finished and (server.samples, server.dropped) == (3, 3)


def test_a_dropped_push_of_a_task_is_made_up_for() -> None:
    server = served(Barrier(1), 2, quota=3, own_loop=False)
    for _ in range(3):
        late(server)
    while not server.finished:
        push(server, 0)
    assert (server.samples, server.dropped) == (6, 3)


def test_a_worker_that_comes_back_still_has_its_dropped_steps() -> None:
    server = served(Barrier(1), 2, quota=3)
    late(server)
    server.handle(Leave(0, 0))
    assert server.handle(Join(0, 1, 3, own_loop=True)).replies[0].dropped == 1


def test_a_layout_goes_through_json() -> None:
    layout = LoopLayout(3, (Number(0, "lr"), Number(0, "betas", 1)), ((0, 2), (1,)))
    assert LoopLayout.from_facts(json.loads(json.dumps(layout.to_facts()))) == layout
    assert (layout.size, layout.num_parameters) == (8, 3)
