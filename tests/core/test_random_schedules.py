"""The server under every policy, over random orders of pushes, leaves, new incarnations, repeats and ghosts."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.assembly.core import make_rule
from paceline.config import RunConfig
from paceline.core.messages import Disposition, Join, Leave, Push
from paceline.core.schedules import Budget
from paceline.core.server import server_facts
from paceline.interfaces import pack
from paceline.settings.rules import RULES
from tests.support.toy_cluster import MOST_SAMPLES, POLICIES, ToyCluster, samples_of, started

LONG = Budget(samples=10**9, epoch_samples=100)
LENGTH = 120


def seeded(seed: int) -> list[int]:
    """A long schedule in which every event is equally likely; hypothesis alone prefers short ones."""
    order = Random(seed)
    return [order.randrange(1000) for _ in range(LENGTH)]


schedules = st.lists(st.integers(0, 999), max_size=LENGTH) | st.integers(0, 2**32).map(seeded)
sizes = st.integers(1, 5)
policies = st.sampled_from(sorted(POLICIES))


def shared(samples: int) -> Budget:
    return Budget(samples, epoch_samples=40)


@pytest.mark.long
@given(num_workers=sizes, bound=st.sampled_from([0, 2]), schedule=schedules)
def test_bounded_answers_a_worker_exactly_while_it_is_at_most_s_steps_ahead_of_the_slowest(
    num_workers: int, bound: int, schedule: list[int]
) -> None:
    """SSP: let c(w) be the steps of w applied so far, a newcomer starting at the least c of the live workers.

    Right after every event, w is held back if and only if c(w) - min(c) > S; so no worker is ever released to compute
    step c(w) + 1 while some live worker has applied fewer than c(w) - S.
    """
    cluster = started(f"bounded:{bound}", num_workers, LONG)
    clocks = dict.fromkeys(range(num_workers), 0)
    for choice in schedule:
        before = len(cluster.history)
        cluster.play([choice])
        for happened in cluster.history[before:]:
            match happened.message:
                case Join(worker):
                    clocks[worker] = min(clocks.values(), default=0)
                case Leave(worker):
                    del clocks[worker]
            for update in happened.updates:
                assert update.alone is not None
                clocks[update.alone] += 1
        slowest = min(clocks.values(), default=0)
        assert cluster.held_back() == sorted(w for w, clock in clocks.items() if clock - slowest > bound)


@pytest.mark.long
@given(num_workers=sizes, bound=st.sampled_from([0, 2]), schedule=schedules)
def test_bounded_bounds_staleness_while_nobody_comes_or_goes(num_workers: int, bound: int, schedule: list[int]) -> None:
    """From a release at c(w) to the push after it, each other worker moves from c(w) - S to c(w) + S + 1 at most."""
    cluster = started(f"bounded:{bound}", num_workers, LONG)
    cluster.play(schedule, churn=False)
    assert max(cluster.server.staleness, default=0) <= (num_workers - 1) * (2 * bound + 1)


@pytest.mark.long
@given(num_workers=sizes, schedule=schedules)
def test_a_sync_round_holds_every_live_worker_once_and_is_never_stale(num_workers: int, schedule: list[int]) -> None:
    cluster = started("sync", num_workers, LONG)
    cluster.play(schedule)
    for happened in cluster.history:
        assert all(update.workers == happened.live for update in happened.updates)
    assert set(cluster.server.staleness) <= {0}
    assert cluster.server.version == len(cluster.rule.updates)
    assert cluster.pushes(Disposition.DROPPED) == []


@pytest.mark.long
@given(num_workers=sizes, spare=st.sampled_from([1, 2]), schedule=schedules)
def test_a_backup_round_closes_with_exactly_the_live_workers_but_b(
    num_workers: int, spare: int, schedule: list[int]
) -> None:
    cluster = started(f"backup:{spare}", num_workers, LONG)
    cluster.play(schedule)
    for happened in cluster.history:
        for update in happened.updates:
            assert len(update.workers) == max(1, len(happened.live) - spare)
            assert update.workers <= happened.live
            assert update.staleness == 0


@pytest.mark.long
@given(num_workers=sizes, schedule=schedules)
def test_async_answers_every_push_at_once(num_workers: int, schedule: list[int]) -> None:
    cluster = started("async", num_workers, LONG)
    cluster.play(schedule)
    assert cluster.held_back() == []
    for happened in cluster.history:
        if isinstance(happened.message, Push) and happened.outcome.disposition == Disposition.TAKEN:
            assert [reply.worker for reply in happened.outcome.replies] == [happened.message.worker]
            assert [update.alone for update in happened.updates] == [happened.message.worker]


@given(policy=policies, num_workers=sizes, schedule=schedules)
def test_every_push_is_applied_once_or_counted_as_dropped(policy: str, num_workers: int, schedule: list[int]) -> None:
    cluster = started(policy, num_workers, LONG)
    cluster.play(schedule)
    server = cluster.server
    applied = sum(len(update.workers) for update in cluster.rule.updates)
    held = len(cluster.held_back()) if policy.startswith(("sync", "backup")) else 0
    counted = cluster.pushes(Disposition.TAKEN, Disposition.DROPPED)
    assert applied + server.dropped + held == len(counted)
    assert sum(member.pushes for member in server.members.values()) == len(counted)
    assert server.staleness.total() == applied
    assert server.samples == sum(samples_of(w, b) for w, batches in cluster.batches.items() for b in batches)


@pytest.mark.long
@given(policy=policies, num_workers=sizes, schedule=schedules)
def test_batches_are_applied_in_order_and_a_dropped_one_is_dealt_again(
    policy: str, num_workers: int, schedule: list[int]
) -> None:
    cluster = started(policy, num_workers, LONG)
    cluster.play(schedule)
    for batches in cluster.batches.values():
        assert batches == list(range(len(batches)))
    dealt: dict[tuple[int, int, int], int] = {}
    for happened in cluster.history:
        if happened.outcome.disposition == Disposition.DROPPED:
            (reply,) = happened.outcome.replies
            push = happened.message
            assert isinstance(push, Push)
            assert reply.worker == push.worker
            assert reply.batch == dealt[push.worker, push.incarnation, push.reply]
        dealt |= {(r.worker, r.incarnation, r.serial): r.batch for r in happened.outcome.replies}


@pytest.mark.long
@given(policy=policies, num_workers=sizes, schedule=schedules)
def test_a_repeated_push_is_answered_with_the_last_reply_and_changes_nothing(
    policy: str, num_workers: int, schedule: list[int]
) -> None:
    cluster = started(policy, num_workers, shared(60))
    cluster.play(schedule)
    for worker, toy in cluster.live.items():
        if toy.last is None:
            continue
        before = cluster.server.weights.clone(), cluster.server.version, cluster.server.samples
        outcome = cluster.repeat(worker)
        assert outcome.disposition == Disposition.REPEATED
        assert torch.equal(cluster.server.weights, before[0])
        assert (cluster.server.version, cluster.server.samples) == before[1:]
        waiting = toy.pending is None and not toy.finished
        assert len(outcome.replies) == (0 if waiting else 1)
        if toy.pending is not None and not cluster.server.finished:
            assert outcome.replies == (toy.pending,)
        if toy.finished:
            assert outcome.replies[0].finished


@pytest.mark.long
@given(policy=policies, num_workers=sizes, schedule=schedules)
def test_a_dead_incarnation_is_rejected_and_changes_nothing(policy: str, num_workers: int, schedule: list[int]) -> None:
    cluster = started(policy, num_workers, LONG)
    cluster.play(schedule)
    for worker in list(cluster.live):
        cluster.leave(worker)
    for worker in cluster.missing():
        cluster.join(worker)
    members = {worker: (m.accepted, m.seq, m.pushes) for worker, m in cluster.server.members.items()}
    weights, version = cluster.server.weights.clone(), cluster.server.version
    for ghost in cluster.ghosts:
        if ghost.pending is not None or ghost.last is not None:
            outcome = cluster.haunt(ghost)
            assert (outcome.disposition, outcome.replies) == (Disposition.REJECTED, ())
    assert torch.equal(cluster.server.weights, weights)
    assert cluster.server.version == version
    assert members == {worker: (m.accepted, m.seq, m.pushes) for worker, m in cluster.server.members.items()}


@pytest.mark.long
@given(policy=policies, num_workers=sizes, samples=st.integers(1, 120), schedule=schedules)
def test_a_shared_budget_ends_within_one_update_and_everybody_is_told(
    policy: str, num_workers: int, samples: int, schedule: list[int]
) -> None:
    cluster = started(policy, num_workers, shared(samples))
    cluster.play(schedule)
    cluster.drain()
    assert cluster.server.finished
    assert samples <= cluster.server.samples < samples + num_workers * MOST_SAMPLES
    before_last = cluster.server.samples - sum(
        samples_of(worker, cluster.batches[worker][-1]) for worker in cluster.rule.updates[-1].workers
    )
    assert before_last < samples
    assert cluster.server.late == len(cluster.pushes(Disposition.LATE))


@pytest.mark.long
@given(policy=policies, num_workers=sizes, steps=st.integers(1, 40), schedule=schedules)
def test_steps_count_versions(policy: str, num_workers: int, steps: int, schedule: list[int]) -> None:
    cluster = started(policy, num_workers, Budget(1, epoch_samples=40, steps=steps))
    cluster.play(schedule)
    cluster.drain()
    assert cluster.server.version == steps == len(cluster.rule.updates)


quota_lists = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@pytest.mark.long
@given(policy=policies, quotas=quota_lists, schedule=schedules)
def test_own_quotas_give_each_worker_exactly_its_number_of_applied_pushes(
    policy: str, quotas: list[int], schedule: list[int]
) -> None:
    cluster = started(policy, len(quotas), Budget(10, epoch_samples=40, per_worker=True), quotas)
    cluster.play(schedule, churn=False)
    cluster.drain()
    assert {worker: len(batches) for worker, batches in cluster.batches.items()} == dict(enumerate(quotas))
    assert cluster.server.num_live == 0


@pytest.mark.long
@given(policy=policies, quotas=quota_lists, schedule=schedules)
def test_a_lost_worker_goes_on_with_the_rest_of_its_quota_unless_all_others_have_finished_without_it(
    policy: str, quotas: list[int], schedule: list[int]
) -> None:
    cluster = started(policy, len(quotas), Budget(10, epoch_samples=40, per_worker=True), quotas)
    cluster.play(schedule)
    over_already = cluster.server.finished
    unfinished = {w for w in range(len(quotas)) if len(cluster.batches.get(w, [])) < quotas[w]}
    if over_already:
        gone = {happened.message.worker for happened in cluster.history if isinstance(happened.message, Leave)}
        assert unfinished <= gone
    cluster.drain()
    counts = {worker: len(cluster.batches.get(worker, [])) for worker in range(len(quotas))}
    for worker, quota in enumerate(quotas):
        assert counts[worker] == quota or (over_already and worker in unfinished and counts[worker] < quota)


@pytest.mark.long
@given(policy=policies, quotas=quota_lists, schedule=schedules)
def test_a_run_of_own_quotas_is_over_when_the_last_worker_has_finished(
    policy: str, quotas: list[int], schedule: list[int]
) -> None:
    cluster = started(policy, len(quotas), Budget(10, epoch_samples=40, per_worker=True), quotas)
    cluster.play(schedule, churn=False)
    assert cluster.server.finished == all(toy.finished for toy in cluster.live.values())
    cluster.drain()
    assert cluster.server.finished


@given(policy=policies, num_workers=sizes, first=schedules, then=schedules, local_state=st.booleans())
def test_a_server_restored_from_its_facts_goes_on_identically(
    policy: str, num_workers: int, first: list[int], then: list[int], local_state: bool
) -> None:
    budget = Budget(90, epoch_samples=40, per_worker=local_state)
    cluster = started(policy, num_workers, budget, [9] * num_workers if local_state else None)
    cluster.play(first)
    while not cluster.server.can_checkpoint:
        cluster.push(cluster.ready()[0])
    cluster.fork()
    cluster.play(then)  # every call compares the replies and the weights of the two, bit for bit
    cluster.drain()
    assert cluster.twin is not None
    assert cluster.twin.finished == cluster.server.finished
    if cluster.server.can_checkpoint:
        assert server_facts(cluster.twin) == server_facts(cluster.server)


@pytest.mark.long
@pytest.mark.parametrize("rule", [name for name, traits in RULES.items() if not traits.drops])
@given(num_workers=sizes, bound=st.sampled_from(["async", "bounded:2"]), first=schedules, then=schedules)
@settings(max_examples=6)
def test_every_rule_knows_who_is_here_and_goes_on_identically_from_its_saved_state(
    rule: str, num_workers: int, bound: str, first: list[int], then: list[int]
) -> None:
    config = RunConfig(
        rule=f"{rule}:3" if RULES[rule].letter else rule, average="none", momentum=0.5, outer_momentum=0.5
    )
    cluster = ToyCluster(
        bound,
        num_workers,
        LONG,
        make_rule=lambda max_workers: make_rule(config, pack([("a", (max_workers,), True)]), max_workers),
    )
    for worker in range(num_workers):
        cluster.join(worker)
    cluster.play(first)
    cluster.fork()
    cluster.play(then)
    assert torch.isfinite(cluster.server.evaluated).all()
    for worker in list(cluster.live):
        cluster.leave(worker)
    assert not cluster.rule.here


@given(policy=policies, num_workers=sizes, order=st.randoms(use_true_random=False), lost=st.sets(st.integers(0, 4)))
def test_nobody_is_answered_before_all_have_joined_or_are_known_lost(
    policy: str, num_workers: int, order: Random, lost: set[int]
) -> None:
    cluster = ToyCluster(policy, num_workers, LONG)
    workers = list(range(num_workers))
    order.shuffle(workers)
    for worker in workers[:-1]:
        outcome = cluster.handle(Leave(worker, 0)) if worker in lost else cluster.join(worker)
        assert outcome.replies == ()
        assert not cluster.server.started
    last = workers[-1]
    outcome = cluster.handle(Leave(last, 0)) if last in lost else cluster.join(last)
    assert cluster.server.started
    assert [reply.worker for reply in outcome.replies] == sorted(cluster.live)


@given(num_workers=st.integers(2, 5), comings=st.integers(1, 3))
def test_a_worker_that_comes_and_goes_before_the_start_does_not_start_the_run(num_workers: int, comings: int) -> None:
    cluster = ToyCluster("async", num_workers, LONG)
    for _ in range(comings):
        assert cluster.join(0).replies == ()
        assert cluster.leave(0).replies == ()
    assert cluster.join(0).replies == ()
    for worker in range(1, num_workers - 1):
        assert cluster.join(worker).replies == ()
    assert [reply.worker for reply in cluster.join(num_workers - 1).replies] == list(range(num_workers))


@given(policy=policies, num_workers=sizes, schedule=schedules)
def test_live_workers_never_deadlock(policy: str, num_workers: int, schedule: list[int]) -> None:
    cluster = started(policy, num_workers, LONG)
    for choice in schedule:
        cluster.play([choice])
        assert cluster.ready() or not cluster.live, f"{cluster.held_back()} wait for nobody"
