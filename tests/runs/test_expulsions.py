"""A worker whose push the server computes otherwise is expelled, and the run goes on; a true divergence ends it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from paceline.core.messages import Disposition, Join, Push
from paceline.core.server import guard
from paceline.reports.sentences import event_sentence
from paceline.runs.arrival_log import scan_log
from paceline.runs.result import status_of
from tests.support.recorded_runs import Record, RecordedRun, assert_same
from tests.support.rings import long_but

pytestmark = pytest.mark.long  # left to `make test`

LOCAL = {"momentum": 0.0, "path": "star"}
NAN = {"factor": math.nan}
EVERY = [("async", {}), ("sync", {}), ("backup:1", {}), ("bounded:1", {}), ("local:2", LOCAL), ("diloco:2", LOCAL)]
OTHER_WAYS = [("async", {"pull_codec": "int8"}), ("async", {"max_workers": 4}), ("sync", {"robust": True})]


def events(run: RecordedRun, kind: str) -> list[dict[str, Any]]:
    rows = map(json.loads, run.folder.events_file.read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def send(run: RecordedRun, worker: int, factor: float = 1.0, **fields: Any) -> None:
    """Let a worker that is ready push what it computes times `factor`."""
    push = run.instances[worker].push()
    assert push is not None
    if factor != 1.0:
        push.update.mul_(factor)
    run.host.handle(push._replace(**fields))


def begin(record: Record, strategy: str, pushes: int = 8, recomputes: bool = True, **settings: Any) -> RecordedRun:
    """A run of three workers after some pushes, at a moment when worker 1 is ready to push."""
    run = record(**{"strategy": strategy, "workers": 3, "epochs": 3.0, **settings})
    if recomputes:
        run.host.verify_with(run.make_worker)
    run.join_all()
    run.push_at_random(pushes)
    while run.instances[1].pending is None:
        run.push_at_random(1)
    return run


def end(run: RecordedRun) -> None:
    """Go on without those that were expelled; then the log alone gives the same server."""
    for worker, member in run.server.members.items():
        if member.expelled:
            run.instances.pop(worker, None)
    run.run_to_the_end()
    again = run.replay()
    again.feed(scan_log(run.folder.arrivals_file, run.config).effective_records)
    assert again.mismatch is None
    assert_same(again.server, run.server)


@pytest.mark.parametrize(("strategy", "settings"), EVERY + OTHER_WAYS)
@pytest.mark.parametrize("broken", long_but([NAN], [NAN, {"factor": math.inf}, {"loss": math.inf}]), ids=str)
def test_a_worker_with_a_broken_push_of_its_own_making_is_expelled(
    record: Record, strategy: str, settings: dict[str, Any], broken: dict[str, Any]
) -> None:
    run = begin(record, strategy, **settings)
    send(run, 1, **broken)
    assert run.server.members[1].expelled and not run.server.finished
    assert torch.isfinite(run.server.weights).all()
    end(run)
    assert status_of(run.server, None) == "finished"
    (row,) = events(run, "expelled")
    assert row["worker"] == 1 and "the server's computation of it is finite" in row["why"]
    assert [note for note in run.notes if "expelled" in note] == [f"worker 1 is expelled: {row['why']}"]
    assert run.host.lost == [1]


def test_a_round_closes_without_the_worker_that_was_expelled_last(record: Record) -> None:
    run = begin(record, "sync", pushes=0)
    version = run.server.version
    for worker in (0, 2):
        run.push(worker)
    send(run, 1, math.nan)
    assert run.server.version == version + 1
    assert all(run.instances[worker].pending is not None for worker in (0, 2))


def test_a_push_that_the_server_computes_alike_ends_the_run(record: Record) -> None:
    run = begin(record, "async")
    run.instances[1].memory.weights.fill_(math.nan)  # as if training had led there
    run.push(1)
    assert run.server.finished and run.server.divergence is not None and run.server.divergence.worker == 1
    assert not events(run, "expelled")
    assert any("the server's own computation of it is not finite either" in note for note in run.notes)


@pytest.mark.parametrize(
    ("strategy", "settings", "why"),
    [
        ("async", {"codec": "topk:.5"}, "depends on the worker's earlier ones"),
        ("local:2", {"path": "star"}, "depends on the worker's earlier ones"),
    ],
)
def test_a_push_that_cannot_be_computed_again_ends_the_run_and_says_why(
    record: Record, strategy: str, settings: dict[str, Any], why: str
) -> None:
    run = begin(record, strategy, **settings)
    for worker in (0, 2, 1):
        if run.instances[worker].pending is not None:
            send(run, worker, loss=math.inf if worker == 1 else 1.0)
    assert run.server.divergence is not None and run.server.divergence.worker == 1
    assert any("cannot compute it again" in note and why in note for note in run.notes)


def test_a_worker_on_a_gpu_and_one_whose_task_fails_here_are_not_judged(record: Record) -> None:
    run = begin(record, "async")
    run.host.on_gpu.add(1)
    send(run, 1, math.nan)
    assert run.server.divergence is not None and any("computed on a GPU" in note for note in run.notes)

    def fail(join: Join) -> Any:
        raise ZeroDivisionError

    other = begin(record, "async", name="other")
    other.host.verify_with(fail)
    send(other, 1, math.nan)
    assert other.server.divergence is not None and any("ZeroDivisionError" in note for note in other.notes)


def test_an_expelled_worker_stays_out_until_the_run_is_resumed(record: Record) -> None:
    run = begin(record, "async")
    send(run, 1, math.nan)
    assert run.server.handle(Join(1, 5)).disposition == Disposition.REJECTED
    run.resume()
    run.host.verify_with(run.make_worker)
    run.join_all()
    assert run.server.members[1].live
    end(run)


@pytest.mark.parametrize("crashes", ["log", "checkpoint"])
def test_a_run_that_expelled_a_worker_recovers_and_replays(record: Record, crashes: str) -> None:
    run = begin(record, "async")
    run.checkpoint()
    run.push_at_random(3)
    while run.instances[1].pending is None:
        run.push_at_random(1)
    send(run, 1, math.nan)
    run.instances.pop(1)
    run.push_at_random(4)
    before = run.server
    run.resume(recovery=crashes)
    assert (run.server.version == before.version) == (crashes == "log")
    assert run.server.norms.facts() == before.norms.facts() or crashes == "checkpoint"
    run.join_all()
    end(run)


@pytest.mark.parametrize("strategy", ["async", "sync", "bounded:2", "local:2"])
def test_an_immense_push_is_told_once_and_counts(record: Record, strategy: str) -> None:
    run = begin(record, strategy, **(LOCAL if strategy == "local:2" else {}))
    for _ in range(2):
        while run.instances[1].pending is None:
            run.push_at_random(1)
        send(run, 1, 1e4)
    rows = events(run, "suspicious")
    assert rows and {row["worker"] for row in rows} == {1}
    assert len([note for note in run.notes if "suspicious" in note]) == 1
    assert event_sentence(rows[0]) == f"Worker 1 looks suspicious: {rows[0]['why']}"
    assert not run.server.dropped and not run.server.members[1].expelled


def test_a_lone_worker_is_not_suspected_of_its_steps(record: Record) -> None:
    run = record(strategy="async", workers=1, epochs=3.0)
    run.join_all()
    run.push_at_random(8)
    send(run, 0, 1e4)
    told = [note for note in run.notes if "times the usual largest" in note]
    assert len(told) == 1 and told[0].startswith("worker 0: its push") and told[0].endswith("steps may be too long")


def test_under_robust_an_immense_push_that_the_server_computes_otherwise_expels(record: Record) -> None:
    run = begin(record, "async", robust=True)
    before = run.server.weights.clone()
    send(run, 1, 1e30)
    assert run.server.members[1].expelled and torch.equal(run.server.weights, before)
    end(run)


@pytest.mark.parametrize("strategy", ["async", "sync", "bounded:1"])
@pytest.mark.parametrize("codec", [None, "topk:.5"])
def test_under_robust_a_push_that_cannot_be_checked_is_discarded_and_the_third_expels(
    record: Record, strategy: str, codec: str | None
) -> None:
    run = begin(record, strategy, recomputes=codec is not None, robust=True, codec=codec)
    version, weights = run.server.version, run.server.weights.clone()
    for number in range(3):
        assert not run.server.members[1].expelled
        reply = run.instances[1].pending
        assert reply is not None
        push = run.instances[1].push()
        assert push is not None
        run.host.handle(_immense(run, push))
        if number < 2:
            again = run.instances[1].pending
            assert again is not None and again.batch == reply.batch, "it computes the same batch again"
    assert run.server.members[1].expelled and run.server.dropped == 2
    assert (run.server.version, True) == (version, torch.equal(run.server.weights, weights))
    end(run)
    assert len(events(run, "suspicious")) == 3 and len(events(run, "expelled")) == 1


def _immense(run: RecordedRun, push: Push) -> Push:
    """The same push, 1e6 times as large, encoded if pushes are."""
    codec = run.server.codecs.push
    if codec is None:
        return push._replace(update=push.update * 1e6)
    dense = torch.full_like(run.server.weights, 1e6)
    payload = torch.zeros(codec.capacity, dtype=torch.uint8)
    return push._replace(update=payload[: codec.encode(dense, codec.start(0), payload)])


def test_one_honest_push_between_starts_the_count_again(record: Record) -> None:
    run = begin(record, "async", recomputes=False, robust=True)
    for number in range(8):
        send(run, 1, 1.0 if number % 3 == 2 else 1e6)
    assert not run.server.members[1].expelled
    run.run_to_the_end()


def test_under_robust_a_gradient_that_really_is_immense_counts(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BOUND", 0.01)
    run = begin(record, "async", robust=True)
    end(run)
    assert events(run, "suspicious") and not events(run, "expelled") and not run.server.dropped


def test_a_round_that_leaves_broken_pushes_out_goes_on_and_says_so_once(record: Record) -> None:
    """Nobody can compute these pushes again, and the median is that of the others."""
    run = begin(record, "sync", pushes=0, recomputes=False, aggregate="median")
    run.host.verify_with(None, "only your own loop computes its pushes")
    while not run.server.finished:
        for worker in range(3):
            if run.instances[worker].pending is not None and not run.server.finished:
                send(run, worker, math.nan if worker == 1 else 1.0)
    run.close()
    assert status_of(run.server, None) == "finished" and run.server.version > 5
    (note,) = [note for note in run.notes if "worker 1" in note]
    assert "holds a NaN or an infinity, and the server cannot compute it again: only your own loop" in note
    assert len(events(run, "not_finite")) <= 20


@pytest.mark.parametrize(("strategy", "settings"), EVERY)
def test_an_ordinary_run_has_nothing_suspicious(record: Record, strategy: str, settings: dict[str, Any]) -> None:
    settings = {**settings, "warmup": 0.5, "schedule": "cosine"}
    run = record(strategy=strategy, workers=3, epochs=6.0, robust=True, **settings)
    run.join_all()
    run.run_to_the_end()
    assert not events(run, "suspicious") and not run.server.dropped * (strategy != "backup:1")
