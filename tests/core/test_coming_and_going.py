"""Workers that are drained, and workers that join late: each promise on the smallest case that shows it."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.assembly.core import make_policy
from paceline.config import RunConfig
from paceline.core.messages import DataAssignment, Disposition, Drain, Join, Leave, Outcome, Push, Reply, Resume
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier, DropStale, StaleSynchronous
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.cached import Cached
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server, restore_server, server_facts
from paceline.interfaces import Policy

LONG = Budget(samples=10**9, epoch_samples=100)
TRAINING = Training(LONG, Schedule(1.0))


class Cluster:
    """A server of one weight, and what each worker was told last."""

    def __init__(self, policy: Policy, num_workers: int = 2, max_workers: int | None = None, quota: int | None = None):
        self.server = Server(torch.zeros(1), Plain(Sgd()), policy, TRAINING, Roster(num_workers, max_workers))
        self.told: dict[int, Reply] = {}
        self.quota = quota
        for worker in range(num_workers):
            self.join(worker)

    def handle(self, message: Join | Push | Leave | Drain | Resume) -> Outcome:
        outcome = self.server.handle(message)
        self.told |= {reply.worker: reply for reply in outcome.replies}
        return outcome

    def join(self, worker: int, incarnation: int = 0) -> Outcome:
        return self.handle(Join(worker, incarnation, self.quota))

    def push(self, worker: int) -> Outcome:
        told = self.told[worker]
        return self.handle(
            Push(worker, told.incarnation, told.serial, told.serial, 1, 0.5, torch.ones(1), torch.empty(0))
        )


def over(outcome: Outcome) -> dict[int, bool]:
    """Who is answered, and whether it is over for them."""
    return {reply.worker: reply.finished for reply in outcome.replies}


@pytest.mark.parametrize("policy", [Async(), StaleSynchronous(0), StaleSynchronous(3), DropStale(2)])
def test_a_drained_worker_is_told_that_it_is_over_when_its_push_counts(policy: Policy) -> None:
    cluster = Cluster(policy)
    assert cluster.handle(Drain(0)) == Outcome(Disposition.TAKEN)
    outcome = cluster.push(0)
    assert outcome.disposition == Disposition.TAKEN and over(outcome) == {0: True}
    assert (cluster.server.version, cluster.server.num_live, cluster.server.finished) == (1, 1, False)
    cluster.handle(Leave(0, 0))
    assert over(cluster.push(1)) == {1: False} and over(cluster.push(1)) == {1: False}
    assert cluster.server.weights.item() == -3.0 and cluster.server.dropped == 0


def test_a_round_closes_with_the_push_of_who_is_drained_and_the_next_without_it() -> None:
    cluster = Cluster(Barrier(), 3)
    cluster.push(0)
    assert cluster.handle(Drain(0)).replies == ()  # its push is held: it counts when the round closes
    cluster.push(1)
    assert over(cluster.push(2)) == {0: True, 1: False, 2: False}
    cluster.push(1)
    assert over(cluster.push(2)) == {1: False, 2: False}
    assert cluster.server.version == 2 and cluster.server.samples == 5


def test_who_is_held_back_without_a_push_is_told_at_once_and_sets_the_others_free() -> None:
    cluster = Cluster(StaleSynchronous(0))
    assert over(cluster.push(0)) == {}
    assert over(cluster.handle(Drain(0))) == {0: True}
    cluster = Cluster(StaleSynchronous(0))
    cluster.push(0)
    cluster.handle(Drain(1))
    assert over(cluster.push(1)) == {0: False, 1: True}


def test_a_push_that_is_dropped_is_not_asked_for_again() -> None:
    cluster = Cluster(Barrier(spare=1), 2)
    cluster.push(0)
    cluster.handle(Drain(1))
    outcome = cluster.push(1)
    assert outcome.disposition == Disposition.DROPPED and over(outcome) == {1: True}


def test_a_lost_worker_uses_up_a_spare_and_not_a_part_of_the_batch() -> None:
    """backup:1 of 4 waits for 3 pushes, and still does when one worker is gone: then for all that are left."""
    cluster = Cluster(make_policy(RunConfig(strategy="backup:1", workers=4)), 4)
    assert [len(cluster.push(worker).replies) for worker in (0, 1, 2)] == [0, 0, 3]
    cluster.handle(Leave(3, 0))
    assert [len(cluster.push(worker).replies) for worker in (0, 1, 2)] == [0, 0, 3]
    assert cluster.server.samples == 6
    for worker in (0, 1):
        cluster.push(worker)
    assert over(cluster.handle(Leave(2, 0))) == {0: False, 1: False}, "fewer are live than a round wants: it closes"
    cluster.join(2, 1)
    cluster.join(3, 1)
    assert [len(cluster.push(worker).replies) for worker in (3, 0, 1)] == [0, 0, 3], "the spare is back"


def test_a_round_of_more_workers_than_at_the_start_waits_for_all_but_the_spare() -> None:
    cluster = Cluster(make_policy(RunConfig(strategy="backup:1", workers=2, max_workers=5)), 2, max_workers=5)
    cluster.push(0)
    for worker in (2, 3):
        cluster.join(worker)
    cluster.push(0)  # four are live from now on
    assert [len(cluster.push(worker).replies) for worker in (0, 2, 3)] == [0, 0, 3]


def test_only_who_is_at_work_can_be_drained_and_only_once() -> None:
    cluster = Cluster(Async())
    assert [cluster.handle(Drain(worker)).disposition for worker in (0, 0, 5)] == [Disposition.TAKEN] + 2 * [
        Disposition.REJECTED
    ]
    cluster.push(0)
    assert cluster.handle(Drain(0)).disposition == Disposition.REJECTED
    cluster.handle(Leave(1, 0))
    assert cluster.handle(Drain(1)).disposition == Disposition.REJECTED


def test_who_was_lost_before_it_was_told_is_told_when_it_comes_back_and_then_may_come_again() -> None:
    cluster = Cluster(Async())
    cluster.handle(Drain(0))
    cluster.handle(Leave(0, 0))
    assert over(cluster.join(0, 1)) == {0: True}
    cluster.handle(Leave(0, 1))
    assert over(cluster.join(0, 2)) == {0: False}


def test_a_repeated_push_of_who_was_sent_away_is_answered_alike() -> None:
    cluster = Cluster(Async())
    cluster.handle(Drain(0))
    last = Push(0, 0, 0, 0, 1, 0.5, torch.ones(1), torch.empty(0))
    told = cluster.handle(last).replies
    assert cluster.handle(last) == Outcome(Disposition.REPEATED, told)


def test_a_run_whose_last_worker_is_drained_is_not_over_and_nobody_drained_is_awaited_after_a_resume() -> None:
    cluster = Cluster(Async())
    for worker in (0, 1):
        cluster.handle(Drain(worker))
        cluster.push(worker)
    assert not cluster.server.finished and cluster.server.num_live == 0
    cluster.handle(Resume())
    assert cluster.server.started and not cluster.server.finished
    assert over(cluster.join(1, 1)) == {1: False}


def test_who_has_its_quota_ends_the_run_though_another_was_drained() -> None:
    cluster = Cluster(Async(), quota=2)
    cluster.handle(Drain(0))
    cluster.push(0)
    cluster.push(1)
    assert not cluster.server.finished
    assert over(cluster.push(1)) == {1: True} and cluster.server.finished


def test_every_change_of_who_is_at_work_deals_anew_and_everybody_hears_of_it_with_its_next_answer() -> None:
    cluster = Cluster(Async(), max_workers=4)
    assert cluster.told[0].assignment is None and cluster.push(0).replies[0].assignment is None
    cluster.join(2)
    assert cluster.told[2].assignment == DataAssignment(1, (0, 1, 2))
    assert cluster.told[1].assignment is None  # it is still computing on what it was told
    cluster.push(1)
    assert (cluster.told[1].assignment, cluster.told[1].batch) == (DataAssignment(1, (0, 1, 2)), 0)
    cluster.push(1)
    assert (cluster.told[1].assignment, cluster.told[1].batch) == (DataAssignment(1, (0, 1, 2)), 1)
    cluster.handle(Drain(0))
    cluster.push(2)
    assert cluster.told[2].assignment == DataAssignment(2, (1, 2))
    cluster.push(0)
    cluster.handle(Leave(0, 0))
    cluster.handle(Leave(2, 0))
    cluster.join(2, 1)  # back before anybody was answered: nothing has changed, and its batch is dealt again
    assert cluster.told[2].assignment == DataAssignment(2, (1, 2)) and cluster.told[2].batch == 0


def test_who_never_came_has_no_part_from_the_start() -> None:
    server = Server(torch.zeros(1), Plain(Sgd()), Async(), TRAINING, Roster(3, 3))
    server.handle(Join(0, 0))
    server.handle(Join(2, 0))
    told = server.handle(Leave(1, 0)).replies
    assert [reply.assignment for reply in told] == 2 * [DataAssignment(1, (0, 2))]


def test_without_room_for_others_nothing_is_dealt_anew() -> None:
    cluster = Cluster(Async(), 2)
    cluster.handle(Leave(1, 0))
    assert cluster.push(0).replies[0].assignment is None
    assert cluster.join(2).disposition == Disposition.REJECTED


def test_there_is_room_for_so_many() -> None:
    cluster = Cluster(Async(), 2, max_workers=3)
    assert cluster.join(2).disposition == Disposition.TAKEN and cluster.join(3).disposition == Disposition.REJECTED


def test_a_newcomer_waits_for_the_next_round_and_is_in_that() -> None:
    cluster = Cluster(Barrier(joins_wait=True), 2, max_workers=3)
    cluster.push(0)
    assert over(cluster.join(2)) == {}
    assert over(cluster.push(1)) == {0: False, 1: False, 2: False}
    cluster.push(0)
    assert over(cluster.push(1)) == {}  # all three are in this one
    assert over(cluster.push(2)) == {0: False, 1: False, 2: False} and cluster.server.version == 2


def test_a_newcomer_begins_alone_where_everybody_else_is_gone() -> None:
    cluster = Cluster(Barrier(joins_wait=True), 1, max_workers=2)
    cluster.push(0)
    cluster.join(1)
    assert over(cluster.handle(Leave(0, 0))) == {1: False}


def test_a_fixed_run_lets_who_returns_into_the_round_it_meets() -> None:
    cluster = Cluster(Barrier(), 2)
    cluster.push(0)
    cluster.handle(Leave(1, 0))
    cluster.push(0)
    assert over(cluster.join(1, 1)) == {1: False}


def test_deals_and_drains_survive_a_checkpoint() -> None:
    cluster = Cluster(Async(), max_workers=4)
    cluster.join(3)
    cluster.push(1)
    cluster.push(1)
    cluster.handle(Drain(0))
    facts = json.loads(json.dumps(server_facts(cluster.server)))
    again = Server(torch.zeros(1), Plain(Sgd()), Async(), TRAINING, Roster(2, 4))
    restore_server(again, facts, cluster.server.weights, {})
    before = cluster.told[1]
    assert again.last_answer(1) == before and before.batch == 1
    told = Push(1, 0, before.serial, before.serial, 1, 0.5, torch.ones(1), torch.empty(0))
    assert again.handle(told) == cluster.handle(told)
    assert cluster.told[1].assignment == DataAssignment(2, (1, 3))


def test_a_rule_with_a_row_a_worker_has_one_for_newcomers_and_forgets_who_was_drained() -> None:
    rule = Cached(Sgd(), max_workers=3)
    server = Server(torch.zeros(1), rule, Async(), TRAINING, Roster(1, 3))
    server.handle(Join(0, 0))
    server.handle(Join(2, 0))
    for worker in (0, 2):
        server.handle(Push(worker, 0, 0, 0, 1, 0.5, torch.ones(1), torch.empty(0)))
    assert server.rule_state["total"].item() == 2.0
    server.handle(Drain(2))
    server.handle(Push(2, 0, 1, 1, 1, 0.5, torch.ones(1), torch.empty(0)))
    assert server.rule_state["total"].item() == 1.0 and not server.rule_state["cache"][2].any()


def averaging_server(roster: Roster) -> Server:
    return Server(torch.full((1,), 4.0), Averaged(Plain(Sgd(0.5))), Async(), Training(LONG, Schedule(0.01)), roster)


def push_downhill(server: Server, worker: int, seq: int) -> None:
    """The gradient of weights^2 / 2."""
    assert server.handle(Push(worker, 0, seq, seq, 1, 0.5, server.weights.clone(), torch.empty(0))).replies


@pytest.mark.parametrize("max_workers", [None, 6])
@pytest.mark.parametrize("kind", [Drain, Leave])
def test_the_average_follows_the_live_weights_after_most_workers_have_left(
    max_workers: int | None, kind: type[Drain | Leave]
) -> None:
    server = averaging_server(Roster(6, max_workers))
    for worker in range(6):
        server.handle(Join(worker, 0, None))
    for update in range(30):
        push_downhill(server, update % 6, update // 6)
    for worker in range(1, 6):
        server.handle(Drain(worker) if kind is Drain else Leave(worker, 0))
        if kind is Drain:
            push_downhill(server, worker, 5)
    assert server.num_live == 1
    for seq in range(5, 305):
        push_downhill(server, 0, seq)
    assert abs(server.weights.item()) < 0.1 and abs(server.evaluated.item()) < 0.1


@pytest.mark.parametrize(("shared", "found"), [(False, [1.0, 0.9, 0.6]), (True, [1.0, 1.0, 1.0])])
def test_the_data_of_workers_that_finish_is_missing_unless_others_have_it(shared: bool, found: list[float]) -> None:
    server = averaging_server(Roster(3, shared_data=shared))
    seen: list[float] = []
    server.on_update = lambda update: seen.append(update.present)
    for worker, quota in enumerate((1, 3, 6)):
        server.handle(Join(worker, 0, quota))
    for worker, pushes in enumerate((1, 3, 1)):
        for seq in range(pushes):
            push_downhill(server, worker, seq)
    assert [seen[0], seen[1], seen[4]] == found
    twin = averaging_server(Roster(3, shared_data=shared))
    restore_server(twin, json.loads(json.dumps(server_facts(server))), server.weights, server.rule_state)
    for seq in range(1, 5):
        push_downhill(server, 2, seq)
        push_downhill(twin, 2, seq)
        assert torch.equal(server.evaluated, twin.evaluated)


def test_who_is_lost_or_drained_before_its_quota_has_not_finished() -> None:
    server = averaging_server(Roster(3))
    for worker in range(3):
        server.handle(Join(worker, 0, 9))
    server.handle(Leave(0, 0))
    server.handle(Drain(1))
    push_downhill(server, 1, 0)
    assert server.num_live == 1 and server.roster.present == 1.0


def done_but_for_a_lost_worker() -> Cluster:
    """Worker 0 has reached its quota; worker 1 was lost before it had, and may return."""
    cluster = Cluster(Async(), quota=2)
    cluster.push(1)
    cluster.handle(Leave(1, 0, returns=True))
    for _ in range(2):
        cluster.push(0)
    assert cluster.told[0].finished and not cluster.server.finished
    return cluster


def test_training_is_not_over_while_a_lost_worker_may_return() -> None:
    cluster = done_but_for_a_lost_worker()
    cluster.join(1, 1)
    cluster.push(1)
    assert cluster.server.finished and cluster.server.version == 4


def test_training_is_over_when_the_lost_worker_is_gone_for_good() -> None:
    cluster = done_but_for_a_lost_worker()
    cluster.handle(Leave(1, 1))
    assert cluster.server.finished and cluster.server.version == 3


def test_a_worker_that_may_return_is_part_of_a_checkpoint() -> None:
    cluster = done_but_for_a_lost_worker()
    facts = json.loads(json.dumps(server_facts(cluster.server), allow_nan=False))
    other = Cluster(Async(), quota=2)
    restore_server(other.server, facts, cluster.server.weights, cluster.server.rule_state)
    other.handle(Leave(1, 1))
    assert other.server.finished
    resumed = Cluster(Async(), quota=2)
    restore_server(resumed.server, facts, cluster.server.weights, cluster.server.rule_state)
    resumed.handle(Resume())
    assert not resumed.server.roster.returning and resumed.server.pending_workers == [1]
