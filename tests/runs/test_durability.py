"""What lies on disk when: the log before the reply, checkpoints beside the run, the best weights; and full disks."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.messages import Reply
from paceline.errors import UserError
from paceline.runs.arrival_log import RECORD_BYTES, read_log
from paceline.runs.checkpoint import newest_checkpoint, read_checkpoint
from paceline.runs.events import read_events
from paceline.runs.snapshots import read_best
from tests.support.recorded_runs import Record, RecordedRun


def watch_disk(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host does to its log and tells its workers, in order."""
    done: list[str] = []
    sync, deliver = run.host.log.sync, run.deliver

    def synced() -> None:
        done.append("sync")
        sync()

    def sent(reply: Reply) -> None:
        logged = read_log(run.folder.arrivals_file, run.config).records
        done.append(f"reply {reply.worker} after {len(logged)} records")
        deliver(reply)

    monkeypatch.setattr(run.host.log, "sync", synced)
    monkeypatch.setattr(run, "deliver", sent)
    return done


def test_a_reply_leaves_only_after_the_log_has_its_push(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="async", workers=2)
    done = watch_disk(run, monkeypatch)
    run.join_all()
    run.push(0)
    assert done == ["reply 0 after 2 records", "reply 1 after 2 records", "reply 0 after 3 records"]


def test_with_durable_the_log_is_synced_before_a_reply_leaves(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="async", workers=2, durable=True)
    done = watch_disk(run, monkeypatch)
    run.join_all()
    run.push(0)
    start = ["sync", "reply 0 after 2 records", "reply 1 after 2 records"]
    assert done == [*start, "sync", "reply 0 after 3 records"]


def test_a_round_is_synced_once(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="sync", workers=3, durable=True)
    run.join_all()
    done = watch_disk(run, monkeypatch)
    for worker in range(3):
        run.push(worker)
    assert done == ["sync", *(f"reply {worker} after 6 records" for worker in range(3))]


def test_inputs_that_come_together_are_synced_together(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="async", workers=3, durable=True)
    run.join_all()
    done = watch_disk(run, monkeypatch)
    assert run.runtime is not None
    monkeypatch.setattr(run.runtime, "groups_inputs", True)
    for worker in range(3):
        run.push(worker)
    assert not done and run.server.version == 3
    run.host.commit()
    assert not run.host.unsent
    assert done == ["sync", *(f"reply {worker} after 6 records" for worker in range(3))]


def test_the_log_is_on_disk_before_a_checkpoint_that_speaks_of_it(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    seen: list[int] = []
    monkeypatch.setattr(run.host.log, "sync", lambda: seen.append(len(list(run.folder.path.glob("checkpoints/*")))))
    run.checkpoint()
    assert seen == [0] and newest_checkpoint(run.folder.checkpoints)[0] is not None


def test_the_pause_of_each_checkpoint_is_in_the_events_and_in_the_result(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    for _ in range(3):
        run.push_at_random(2)
        run.host.checkpoint()
    run.resume()
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    pauses = [row["pause_seconds"] for row in read_events(run.folder.events_file) if row["kind"] == "checkpoint"]
    found = result["checkpoint_pause_seconds"]
    assert (found["count"], found["max"]) == (3, max(pauses))
    assert found["total"] == pytest.approx(sum(pauses)) and min(pauses) > 0
    assert (result["resumes"], result["lost_pushes"]) == (1, 0)


def test_checkpoints_are_copied_into_the_same_memory_and_stay_what_they_were(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(1)
    run.host._checkpoints.is_ready(run.config.checkpoint_every, run.host.memories)  # makes the buffers
    run.host._checkpoints.writer.wait()
    room = run.host._checkpoints._room._free[run.server.weights.shape, torch.float32]
    places = {tensor.data_ptr() for tensor in room}
    weights = []
    for _ in range(2):
        run.push_at_random(2)
        run.host.checkpoint()
        run.host._checkpoints.writer.wait()
        weights.append(run.server.weights.clone())
    assert {tensor.data_ptr() for tensor in room} == places
    checkpoints = [read_checkpoint(path) for path in sorted(run.folder.checkpoints.iterdir())]
    assert all(
        torch.equal(checkpoint.tensors["weights"], then) for checkpoint, then in zip(checkpoints, weights, strict=True)
    )


def evaluations(run: RecordedRun) -> list[dict[str, float]]:
    return [row for row in read_events(run.folder.events_file) if row["kind"] == "evaluation"]


def test_the_best_weights_scored_on_the_way_are_kept(record: Record) -> None:
    run = record(strategy="async", workers=2, lr=0.4, epochs=6.0, eval_every=0.5)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    scored = [(row["test_accuracy"], -row["test_loss"], row["samples"]) for row in evaluations(run)]
    accuracy, loss, samples = max([*scored, (result["test_accuracy"], -result["test_loss"], result["samples"])])
    best = read_best(run.folder)
    assert best is not None and best == result["best"]
    assert best["test_accuracy"] == pytest.approx(accuracy, abs=1e-4) and best["test_loss"] == -loss
    assert best["samples"] == samples < result["samples"], "the last weights are not to be the best ones here"
    again = run.replay()
    again.feed(read_log(run.folder.arrivals_file, run.config).records, until=best["updates"])
    expected = run.task.state_dict(again.server.evaluated, None)
    found = load_file(run.folder.best_file)
    assert all(torch.equal(found[name], expected[name]) for name in ("first.weight", "last.bias"))


def test_the_best_weights_outlive_a_crash_unless_the_run_goes_back_before_them(record: Record) -> None:
    run = record(strategy="async", workers=2, lr=0.4, epochs=6.0, eval_every=0.5)
    run.join_all()
    run.checkpoint()
    run.push_at_random(30)
    run.resume()
    best = read_best(run.folder)
    assert best is not None and best["updates"] <= run.server.version
    run.resume(recovery="checkpoint")
    assert run.server.version < best["updates"] and read_best(run.folder) is None


@contextlib.contextmanager
def files_limited_to(nbytes: int) -> Iterator[None]:
    """Every file of this process: writing more is an error of the system, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_at_a_checkpoint_is_said_and_the_last_good_one_stays(record: Record) -> None:
    run = record(strategy="async", workers=2, keep=1)
    run.join_all()
    run.push_at_random(3)
    run.checkpoint()
    run.push_at_random(3)
    with files_limited_to(run.folder.arrivals_file.stat().st_size + 20 * RECORD_BYTES):
        run.host.checkpoint()
        run.push_at_random(3)
        run.host._checkpoints.writer.wait()
    run.push_at_random(1)
    run.host._checkpoints.complain(run.host.clock.now())
    why = f"could not be written in {run.folder.path} (File too large)"
    assert run.notes == [f"a checkpoint {why}: the run goes on without it"]
    assert [path.name for path in run.folder.checkpoints.iterdir()] == [f"{3:012d}"]
    before = run.server
    assert run.resume().checkpoint == 3
    assert run.server.version == before.version == 10


def test_a_full_disk_at_the_log_ends_the_run_with_one_line_and_no_half_record(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(3)
    size = run.folder.arrivals_file.stat().st_size
    with files_limited_to(size + RECORD_BYTES // 2), pytest.raises(UserError) as caught:
        run.push(0)
    assert "at update 4: make room, then 'paceline resume" in str(caught.value)
    assert run.folder.arrivals_file.stat().st_size == size
    assert run.instances[0].pending is None, "a push that is not in the log must not be answered"
    run.resume()
    assert run.server.version == 3  # the fourth push was never acknowledged


def test_a_disk_that_fails_to_sync_ends_a_durable_run(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="async", workers=2, durable=True)
    run.join_all()

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(UserError, match=r"writing failed \(Input/output error\)"):
        run.push(0)
    assert run.instances[0].pending is None, "a push that is not on disk must not be answered"


def test_a_half_written_checkpoint_of_a_killed_run_is_in_nobodys_way(record: Record, tmp_path: Path) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(3)
    half = run.folder.checkpoints / f".{4:012d}.tmp"
    half.mkdir(parents=True)
    (half / "tensors.safetensors").write_bytes(b"half")
    run.push_at_random(1)
    run.checkpoint()
    assert [path.name for path in run.folder.checkpoints.iterdir()] == [f"{4:012d}"]
