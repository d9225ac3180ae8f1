"""Single promises of the server, each on the smallest case that shows it."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.core.messages import Disposition, Join, Leave, Push, Resume, Stop
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server, server_facts
from paceline.interfaces import Policy
from tests.support.toy_cluster import POLICIES, ToyCluster, started

LONG = Budget(samples=10**9, epoch_samples=100)
EMPTY = torch.empty(0)
BROKEN = [math.nan, math.inf, -math.inf]


def server_of(policy: Policy, num_workers: int) -> Server:
    """A server of four weights on which every worker has joined."""
    server = Server(torch.ones(4), Plain(Sgd()), policy, Training(LONG, Schedule(0.5)), Roster(num_workers))
    for worker in range(num_workers):
        server.handle(Join(worker, 0))
    return server


def push(worker: int, values: list[float], seq: int = 0, loss: float = 1.0, samples: int = 1) -> Push:
    return Push(worker, 0, seq, seq, samples, loss, torch.tensor(values), EMPTY)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_push_with_a_nan_or_an_infinity_is_never_applied_and_its_worker_is_named(broken: float) -> None:
    server = server_of(Async(), 2)
    server.handle(push(0, [1.0, 1.0, 1.0, 1.0]))
    outcome = server.handle(push(1, [0.0, broken, 0.0, 0.0], loss=7.0))
    assert outcome.disposition == Disposition.REJECTED
    assert server.weights.tolist() == [0.5] * 4
    assert server.version == 1
    assert server.samples == 1
    assert server.divergence is not None
    assert (server.divergence.worker, server.divergence.version, server.divergence.loss) == (1, 1, 7.0)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_diverged_run_is_over_for_everybody(broken: float) -> None:
    server = server_of(Async(), 2)
    told = server.handle(push(0, [broken] * 4)).replies
    assert [(reply.worker, reply.finished) for reply in told] == [(0, True)]
    late = server.handle(push(1, [1.0] * 4))
    assert late.disposition == Disposition.LATE
    assert late.replies[0].finished
    assert server.weights.tolist() == [1.0] * 4


def test_infinities_that_cancel_are_seen_too() -> None:
    server = server_of(Async(), 1)
    server.handle(push(0, [math.inf, -math.inf, 0.0, 0.0]))
    assert server.divergence is not None
    assert server.weights.tolist() == [1.0] * 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("broken", BROKEN)
def test_in_a_round_the_broken_worker_is_named_whoever_closes_it(order: tuple[int, ...], broken: float) -> None:
    server = server_of(Barrier(), 3)
    replies = []
    for worker in order:
        values = [broken, 0.0, 0.0, 0.0] if worker == 1 else [1.0] * 4
        replies += server.handle(push(worker, values)).replies
    assert server.divergence is not None
    assert server.divergence.worker == 1
    assert server.weights.tolist() == [1.0] * 4
    assert server.version == 0
    assert sorted((reply.worker, reply.finished) for reply in replies) == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize("policy", [Async, Barrier])
def test_a_huge_but_finite_gradient_whose_sum_overflows_is_applied(policy: type[Async] | type[Barrier]) -> None:
    huge = 3.0e38
    server = server_of(policy(), 2)
    for worker in (0, 1):
        assert server.handle(push(worker, [huge, huge, 0.0, 0.0])).disposition == Disposition.TAKEN
        assert math.isinf(torch.tensor([huge, huge]).sum().item())
    assert server.divergence is None
    assert server.version == (2 if policy is Async else 1)
    assert server.weights[0].item() < -1e38


def test_a_broken_push_that_is_dropped_as_stale_does_not_end_the_run() -> None:
    server = server_of(Barrier(spare=1), 2)
    server.handle(push(0, [1.0] * 4))
    assert server.version == 1
    assert server.handle(push(1, [math.nan] * 4)).disposition == Disposition.DROPPED
    assert server.divergence is None
    assert not server.finished


def test_the_mean_of_a_round_is_weighted_by_samples() -> None:
    server = server_of(Barrier(), 2)
    server.handle(push(1, [4.0, 0.0, 0.0, 0.0], samples=3))
    server.handle(push(0, [0.0, 4.0, 0.0, 0.0], samples=1))
    assert server.weights.tolist() == [1.0 - 0.5 * 3.0, 1.0 - 0.5 * 1.0, 1.0, 1.0]
    assert server.samples == 4


def test_the_mean_of_a_round_is_the_same_bits_in_whatever_order_the_pushes_come() -> None:
    torch.manual_seed(0)
    updates = [torch.randn(4) for _ in range(3)]
    found = []
    for order in [(0, 1, 2), (2, 0, 1), (1, 2, 0)]:
        server = server_of(Barrier(), 3)
        for worker in order:
            server.handle(Push(worker, 0, 0, 0, worker + 1, 1.0, updates[worker], EMPTY))
        found.append(server.weights)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_push_from_a_reply_that_was_never_given_is_rejected() -> None:
    server = server_of(Async(), 1)
    assert server.handle(push(0, [1.0] * 4, seq=5)).disposition == Disposition.REJECTED
    assert server.handle(push(3, [1.0] * 4)).disposition == Disposition.REJECTED
    assert server.weights.tolist() == [1.0] * 4


def test_one_reply_is_worth_one_push() -> None:
    server = server_of(Barrier(), 2)
    server.handle(push(0, [1.0] * 4))
    second = Push(0, 0, 1, 0, 1, 1.0, torch.full((4,), 9.0), EMPTY)
    assert server.handle(second).disposition == Disposition.REJECTED
    server.handle(push(1, [1.0] * 4))
    assert server.weights.tolist() == [0.5] * 4


def test_a_live_incarnation_is_not_replaced_by_a_second_join() -> None:
    server = server_of(Async(), 2)
    for incarnation in (0, 1):
        outcome = server.handle(Join(0, incarnation))
        assert (outcome.disposition, outcome.replies) == (Disposition.REJECTED, ())
    assert server.handle(push(0, [1.0] * 4)).disposition == Disposition.TAKEN


def test_an_old_incarnation_cannot_come_back() -> None:
    server = server_of(Async(), 2)
    server.handle(Leave(0, 0))
    assert server.handle(Join(0, 0)).disposition == Disposition.REJECTED
    assert server.handle(Join(0, 1)).disposition == Disposition.TAKEN


def test_the_leave_of_an_old_incarnation_does_not_remove_the_new_one() -> None:
    server = server_of(Async(), 2)
    server.handle(Leave(0, 0))
    server.handle(Join(0, 1))
    assert server.handle(Leave(0, 0)).disposition == Disposition.REJECTED
    assert server.num_live == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_stop_tells_everybody_who_waits_and_the_others_at_their_next_push(policy: str) -> None:
    cluster = started(policy, 3, LONG)
    cluster.push(0)
    cluster.handle(Stop())
    assert cluster.held_back() == []
    for worker in cluster.ready():
        assert cluster.push(worker).disposition == Disposition.LATE
    assert all(toy.finished for toy in cluster.live.values())


def test_a_push_held_when_the_run_is_stopped_is_counted_as_dropped() -> None:
    cluster = started("sync", 3, LONG)
    cluster.push(0)
    cluster.push(1)
    cluster.handle(Stop())
    assert cluster.server.version == 0
    assert cluster.server.dropped == 2


def test_a_push_held_when_the_run_is_resumed_is_counted_as_dropped() -> None:
    cluster = started("sync", 3, LONG)
    cluster.push(0)
    cluster.server.handle(Resume())
    assert cluster.server.dropped == 1


def test_a_stop_before_the_start_ends_the_run_for_those_who_came_and_those_who_come_later() -> None:
    cluster = ToyCluster("async", 3, LONG)
    cluster.join(0)
    assert [reply.finished for reply in cluster.handle(Stop()).replies] == [True]
    assert [reply.finished for reply in cluster.join(1).replies] == [True]
    assert [reply.finished for reply in cluster.join(2).replies] == [True]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_resumed_run_draws_a_new_starting_line_and_goes_on_where_it_was(policy: str) -> None:
    cluster = started(policy, 3, LONG)
    for worker in (0, 1, 2):
        cluster.push(worker)
    version, batches = cluster.server.version, {w: len(b) for w, b in cluster.batches.items()}
    assert cluster.handle(Resume()).replies == ()
    cluster.live.clear()
    assert cluster.server.num_live == 0
    assert cluster.join(2).replies == ()
    assert cluster.join(0).replies == ()
    replies = cluster.join(1).replies
    assert [(reply.worker, reply.version, reply.serial) for reply in replies] == [(w, version, 0) for w in (0, 1, 2)]
    assert {reply.worker: reply.batch for reply in replies} == {w: batches.get(w, 0) for w in (0, 1, 2)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_run_whose_budget_is_spent_is_still_over_when_it_is_resumed(policy: str) -> None:
    """A crash between the last update and the result must not buy another update."""
    cluster = started(policy, 2, Budget(20, epoch_samples=20))
    cluster.drain()
    samples, version = cluster.server.samples, cluster.server.version
    cluster.handle(Resume())
    cluster.live.clear()
    cluster.drain()
    assert (cluster.server.samples, cluster.server.version) == (samples, version)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_run_whose_quotas_are_all_met_is_still_over_when_it_is_resumed(policy: str) -> None:
    cluster = started(policy, 2, Budget(20, epoch_samples=20, per_worker=True), quotas=[3, 4])
    cluster.drain()
    cluster.handle(Resume())
    assert cluster.server.finished


def test_a_leave_heard_of_before_the_resume_does_not_open_the_new_starting_line() -> None:
    cluster = started("async", 2, LONG)
    cluster.handle(Resume())
    cluster.live.clear()
    cluster.handle(Leave(1, 0))
    assert cluster.join(0).replies == ()


def test_a_cut_is_refused_while_a_push_is_held() -> None:
    cluster = started("sync", 2, LONG)
    cluster.push(0)
    assert not cluster.server.can_checkpoint
    with pytest.raises(AssertionError, match="no push is held"):
        server_facts(cluster.server)


def test_the_learning_rate_follows_the_samples_applied() -> None:
    weights = torch.zeros(1)
    schedule = Schedule(1.0, "exponential", 0.5)
    server = Server(weights, Plain(Sgd()), Async(), Training(Budget(30, epoch_samples=10), schedule), Roster(1))
    server.handle(Join(0, 0))
    steps = []
    for seq in range(3):
        before = weights.item()
        server.handle(Push(0, 0, seq, seq, 10, 0.0, torch.ones(1), EMPTY))
        steps.append(before - weights.item())
    assert steps == [1.0, 0.5, 0.25]
    assert server.finished


def test_staleness_is_the_versions_since_the_reply_a_push_was_computed_from() -> None:
    cluster = started("async", 3, LONG)
    for worker in (0, 1, 0, 0, 2):
        cluster.push(worker)
    assert [update.staleness for update in cluster.rule.updates] == [0, 1, 1, 0, 4]
    assert dict(cluster.server.staleness) == {0: 2, 1: 2, 4: 1}


def test_the_rule_is_told_who_pushed_and_how_many_are_live() -> None:
    cluster = started("sync", 3, LONG)
    for worker in (2, 0, 1):
        cluster.push(worker)
    cluster.leave(1)
    cluster.push(0)
    cluster.push(2)
    assert [(update.alone, update.num_live) for update in cluster.rule.updates] == [(None, 3), (None, 2)]
