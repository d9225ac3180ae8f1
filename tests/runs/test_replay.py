"""A recorded run executed again: from its start, and from a cut in its middle, to the same bits."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.core import make_policy
from paceline.assembly.run import make_roster
from paceline.core.messages import Disposition, EstimatedStatistics, Join, Push, ReadOptimizer, ReadWeights, Reply, Stop
from paceline.core.own_loop.settings import LoopLayout, Number, OwnLoops
from paceline.core.own_loop.torch_optimizer import TorchOptimizer
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Schedule, Training
from paceline.core.server import Exchange, Server, server_facts
from paceline.core.worker import LocalWorker
from paceline.errors import RunFailed
from paceline.runs import arrival_log as arrivals
from paceline.runs.checkpoint import newest_checkpoint, write_checkpoint
from paceline.runs.events import read_events
from paceline.runtimes.local.in_process import run_inline
from paceline.runtimes.server.runtime import LocalRuntime
from tests.support.recorded_runs import (
    Record,
    RecordedRun,
    assert_same,
    checkpoint_now,
    records_of,
    small_config,
    small_task,
)
from tests.support.rings import long_but

pytestmark = pytest.mark.long  # left to `make test`

STRATEGIES = ["async", "sync", "backup:1", "bounded:1"]


@pytest.mark.parametrize("seed", long_but([0], range(4)))
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replay_gives_the_weights_of_the_run_bit_for_bit(
    record: Record, strategy: str, workers: int, seed: int
) -> None:
    run = record(seed, strategy=strategy, workers=workers)
    run.join_all()
    run.push_at_random(7)
    run.leave(1)
    run.push_at_random(5)
    checkpoint = checkpoint_now(run)
    run.join(1)
    run.run_to_the_end()
    again = run.replay()
    again.feed(records_of(run))
    assert run.server.version > 5
    assert_same(again.server, run.server)
    write_checkpoint(run.folder.checkpoints, checkpoint)
    found, complaints = newest_checkpoint(run.folder.checkpoints)
    assert found is not None
    assert complaints == []
    tail = run.replay(checkpoint=found)
    tail.feed(records_of(run, found.log_offset))
    assert_same(tail.server, run.server)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("own", long_but([True], [False, True]))
def test_a_replay_from_every_cut_of_a_run_ends_in_the_same_place(record: Record, optimizer: str, own: bool) -> None:
    mode = "own" if own else "shared"
    settings = {"strategy": "bounded:1", "workers": 3, "epochs": 1.0, "optimizer": optimizer, "epoch_mode": mode}
    run = record(**settings)
    run.join_all()
    checkpoints = []
    while not run.server.finished:
        checkpoints.append(checkpoint_now(run))
        run.push_at_random(1)
    run.run_to_the_end()
    assert len(checkpoints) > 8
    for checkpoint in checkpoints:
        again = run.replay(checkpoint=checkpoint)
        again.feed(records_of(run, checkpoint.log_offset))
        assert_same(again.server, run.server)


def test_a_cut_between_a_rejoin_and_its_first_push_starts_the_newcomer_from_fresh_statistics(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(8)
    run.leave(0)
    run.join(0)
    checkpoint = checkpoint_now(run)
    run.run_to_the_end()
    again = run.replay(checkpoint=checkpoint)
    again.feed(records_of(run, checkpoint.log_offset))
    assert_same(again.server, run.server)


def test_a_run_of_the_inline_runtime_replays(record: Record) -> None:
    replies: deque[Reply] = deque()
    run = record(runtime=LocalRuntime(replies.append), strategy="async", workers=3)
    joins = [Join(worker, 0, None, 1) for worker in range(3)]
    run_inline(run.host, replies, [run.make_worker(join) for join in joins], lambda: None)
    run.close()
    assert run.server.finished
    assert max(run.server.staleness) == 2
    again = run.replay()
    again.feed(records_of(run))
    assert_same(again.server, run.server)


def test_a_stopped_run_replays_up_to_the_stop(record: Record) -> None:
    run = record(strategy="sync", workers=2)
    run.join_all()
    run.push_at_random(7)
    run.host.stop("interrupted")
    run.close()
    again = run.replay()
    again.feed(records_of(run))
    assert torch.equal(again.server.weights, run.server.weights)
    assert again.server.finished


def test_a_log_with_a_repeated_push_replays(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    pushed = run.instances[0].push()
    assert pushed is not None
    run.host.handle(pushed)
    run.push(1)
    run.host.handle(pushed)
    run.run_to_the_end()
    assert [record.disposition for record in records_of(run)].count(Disposition.REPEATED) == 1
    again = run.replay()
    again.feed(records_of(run))
    assert_same(again.server, run.server)


def test_a_log_with_a_rejected_join_replays(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(5)
    run.host.handle(Join(0, 1))
    run.run_to_the_end()
    again = run.replay()
    again.feed(records_of(run))
    assert_same(again.server, run.server)


def test_a_log_with_pushes_of_a_dead_incarnation_replays(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(4)
    ghost = run.instances[0].push()
    assert ghost is not None
    run.leave(0)
    run.host.handle(ghost)
    run.join(0)
    run.host.handle(ghost)
    run.run_to_the_end()
    assert [record.disposition for record in records_of(run)].count(Disposition.REJECTED) == 2
    again = run.replay()
    again.feed(records_of(run))
    assert_same(again.server, run.server)


def test_a_repeated_push_is_answered_with_the_weights_its_reply_names(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    pushed = run.instances[0].push()
    assert pushed is not None
    run.host.handle(pushed)
    reply = run.instances[0].pending
    assert reply is not None
    sent = run.instances[0].memory.weights.clone()
    run.push(1)
    run.instances[0].pending = None
    run.host.handle(pushed)
    repeated = run.instances[0].pending
    assert repeated is not None
    assert (repeated.serial, repeated.version) == (reply.serial, reply.version)
    assert torch.equal(run.instances[0].memory.weights, sent)
    run.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_flipped_verdict_is_reported(record: Record, strategy: str) -> None:
    run = record(strategy=strategy, workers=2, epochs=0.5)
    run.join_all()
    run.run_to_the_end()
    records = records_of(run)
    for number, record in enumerate(records):
        flipped = Disposition.DROPPED if record.disposition == Disposition.TAKEN else Disposition.TAKEN
        changed = [*records[:number], dataclasses.replace(record, disposition=flipped), *records[number + 1 :]]
        with pytest.raises(RunFailed, match=f"differs from the log at record {number} "):
            run.replay().feed(changed)


@pytest.mark.parametrize("field", ["seq", "reply"])
def test_a_push_under_another_number_is_reported(record: Record, field: str) -> None:
    run = record(strategy="async", workers=2, epochs=0.5)
    run.join_all()
    run.run_to_the_end()
    records = records_of(run)
    records[5] = dataclasses.replace(records[5], **{field: 99})
    with pytest.raises(RunFailed, match="record 5") as caught:
        run.replay().feed(records)
    assert "\n" not in str(caught.value), "an error is one line, not a page of tensors"


def test_a_push_that_counted_but_nobody_can_make_is_reported(record: Record) -> None:
    run = record(strategy="sync", workers=2, epochs=0.5)
    run.join_all()
    run.run_to_the_end()
    records = records_of(run)
    assert records[2].kind == "push"
    with pytest.raises(RunFailed, match="record 3"):
        run.replay().feed([*records[:3], records[2], *records[3:]])


def test_progress_is_told_of_every_record(record: Record) -> None:
    run = record(strategy="sync", workers=2, epochs=0.5)
    run.join_all()
    run.run_to_the_end()
    seen: list[int] = []
    run.replay().feed(records_of(run), seen.append)
    assert seen == list(range(len(records_of(run))))


def test_a_diverged_run_replays_to_the_same_divergence(record: Record) -> None:
    run = record(strategy="async", workers=2, lr=1e30, momentum=0.0)
    run.join_all()
    run.push_at_random(1000)
    run.close()
    assert run.server.divergence is not None
    again = run.replay()
    again.feed(records_of(run))
    assert again.server.divergence is not None
    assert again.server.divergence.worker == run.server.divergence.worker
    assert again.server.divergence.version == run.server.divergence.version
    assert torch.equal(again.server.weights.nan_to_num(7.0), run.server.weights.nan_to_num(7.0))


def test_messages_keep_their_meaning_in_the_log(record: Record) -> None:
    run = record(strategy="async", workers=2, epochs=0.5, epoch_mode="own")
    run.join_all()
    run.push(1)
    run.leave(0)
    run.host.stop("interrupted")
    run.close()
    records = records_of(run)
    assert [record.kind for record in records] == ["join", "join", "push", "leave", "stop"]
    assert records[0].message == Join(0, 0, run.work.quotas[0], threads=1)
    assert records[4].message == Stop()
    push = records[2]
    assert (push.worker, push.incarnation, push.seq, push.reply, push.samples) == (1, 0, 0, 0, 4)
    assert not isinstance(push, Push)
    assert [record.now for record in records] == sorted(record.now for record in records)


def test_what_an_own_loop_reads_and_estimates_is_logged_and_changes_nothing(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(3)
    before = server_facts(run.server)
    inputs = [ReadWeights(1), ReadOptimizer(1), ReadWeights(0, final=True), EstimatedStatistics(1, 27)]
    for message in inputs:
        run.host.handle(message)
    assert server_facts(run.server) == before
    run.run_to_the_end()
    records = arrivals.read_arrivals(run.folder.arrivals_file, run.config)[0]
    assert [one.message for one in records if one.kind in ("read", "optimizer", "statistics")] == inputs
    replay = run.replay()
    replay.feed(records)
    assert_same(replay.server, run.server)


class LoopRun(RecordedRun):
    """Workers that push as users' own loops do: with the settings of an optimizer that the server steps."""

    lrs: Callable[[int, int], float]

    def new_server(self) -> Server:
        task, config = small_task(), self.config
        groups = (tuple(range(len(task.layout.parameters))),)
        loop = LoopLayout(0, (Number(0, "lr"), Number(0, "betas", 0)), groups)
        optimizer = TorchOptimizer(lambda made: torch.optim.Adam(made[0]), task.layout, loop)
        parts = make_policy(config), Training(self.work.budget, Schedule(1.0)), make_roster(config)
        exchange = Exchange(own_loops=OwnLoops(loop, [optimizer]))
        return Server(task.initial(), Plain(optimizer), *parts, exchange)

    def make_worker(self, join: Join) -> LocalWorker:
        instance, number = super().make_worker(join), join.worker
        compute, flags = instance.push, [1.0] * len(self.task.layout.parameters)
        instance.memory.loop = torch.zeros(2 + len(flags), dtype=torch.float64)

        def push() -> Push | None:
            pushed = compute()
            if pushed is None:
                return None
            instance.memory.loop[:] = torch.tensor([self.lrs(number, pushed.seq), 0.9, *flags], dtype=torch.float64)
            return pushed._replace(loop=instance.memory.loop, weight=0.0 if pushed.seq == 2 else None)

        instance.push = push  # type: ignore[method-assign]
        return instance


@pytest.fixture
def record_loops(tmp_path: Path) -> Iterator[Callable[..., LoopRun]]:
    """Make recorded runs of own loops, with the learning rate of each worker and push."""
    runs: list[LoopRun] = []

    def make(lrs: Callable[[int, int], float], **settings: Any) -> LoopRun:
        runs.append(LoopRun(small_config(tmp_path, **settings)))
        runs[-1].lrs = lrs
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_scripts_whose_settings_disagree_are_told_so_once(record_loops: Callable[..., LoopRun]) -> None:
    run = record_loops(lambda worker, seq: 0.5 if worker and seq > 1 else 0.125, strategy="sync", workers=2)
    run.join_all()
    run.run_to_the_end()
    (note,) = run.notes
    assert "lr of worker 0 is 0.125, that of worker 1 0.5: a round uses the settings of the lowest-numbered" in note
    (event,) = (row for row in read_events(run.folder.events_file) if row["kind"] == "settings_disagreement")
    assert (event["used"], event["other"], event["setting"], event["values"]) == (0, 1, "lr", [0.125, 0.5])
    replay = run.replay()
    replay.feed(arrivals.read_arrivals(run.folder.arrivals_file, run.config)[0])
    assert_same(replay.server, run.server)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_settings_that_change_and_skipped_steps_are_replayed_and_kept_by_a_checkpoint(
    record_loops: Callable[..., LoopRun], strategy: str
) -> None:
    run = record_loops(lambda worker, seq: (1 + worker) / (30 * (seq + 1)), strategy=strategy, workers=2)
    run.join_all()
    run.push_at_random(7)
    run.checkpoint()
    run.push_at_random(3)
    run.run_to_the_end()
    assert run.server.skipped == 2 and run.server.version < run.server.taken
    assert run.server.lr == run.server.own_loops.newest[0][0].item() < 0.01
    records = arrivals.read_arrivals(run.folder.arrivals_file, run.config)[0]
    replay = run.replay()
    replay.feed(records)
    assert_same(replay.server, run.server)
    checkpoint, _ = newest_checkpoint(run.folder.checkpoints)
    assert checkpoint is not None and checkpoint.facts["loops"].keys() == {"0", "1"}
    tail = run.replay(checkpoint=checkpoint)
    assert tail.server.rule_state.keys() == run.server.rule_state.keys() and tail.server.version < run.server.version
    tail.feed(arrivals.read_arrivals(run.folder.arrivals_file, run.config, checkpoint.log_offset)[0])
    assert_same(tail.server, run.server)
