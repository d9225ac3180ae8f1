"""Snapshots: taken where they are due, equal to a replay's weights there, and the same set after a crash."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path

import pytest
import torch

from paceline.core.messages import Resume, Stop
from paceline.errors import UserError
from paceline.runs.arrival_log import read_arrivals
from paceline.runs.durable_files import MAX_WAITING, BackgroundWriter
from paceline.runs.recovery import rebuild
from paceline.runs.result import trained_tensors
from paceline.runs.snapshots import drop_snapshots_after, read_index, read_snapshot
from tests.support.recorded_runs import Record, RecordedRun, assert_same, ignore, small_task
from tests.support.rings import long_but

STRATEGIES = ["classic", "sync", "async", "bounded:1", "backup:1"]


def recorded(record: Record, strategy: str, per_epoch: float = 3.0, **settings: object) -> RecordedRun:
    run = record(strategy=strategy, workers=1 if strategy == "classic" else 3, snapshots=per_epoch, **settings)
    run.join_all()
    return run


def contents(run: RecordedRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.folder.snapshots.iterdir()}


@pytest.mark.parametrize("strategy", long_but(["async"], STRATEGIES))
def test_each_snapshot_is_what_a_replay_has_there(record: Record, strategy: str) -> None:
    run = recorded(record, strategy, 2.0, epoch_mode="own" if strategy in ("sync", "bounded:1") else "shared")
    run.run_to_the_end()
    entries = read_index(run.folder)
    assert {entry.file_name for entry in entries} | {"index.json"} == set(contents(run))
    assert (entries[0].version, entries[-1].version) == (0, run.server.version)
    records, _ = read_arrivals(run.folder.arrivals_file, run.config)
    for entry in entries:
        again = run.replay()
        again.feed(records, until=entry.version)
        expected = trained_tensors(again.server, small_task())
        found = read_snapshot(run.folder, entry)
        assert found.keys() == expected.keys() and "norm.running_var" in found
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), entry


@pytest.mark.parametrize("per_epoch", [0.5, 2.5, 1000.0])
def test_one_is_due_when_samples_first_reach_it(record: Record, per_epoch: float) -> None:
    run = recorded(record, "async", per_epoch, epochs=2.0)
    reached = [0]
    while not run.server.finished:
        run.push_at_random(1)
        reached.append(run.server.samples)
    run.close()
    size = run.server.budget.epoch_samples
    marks = {
        next(s for s in reached if s >= k * size / per_epoch)
        for k in range(math.ceil(2.2 * per_epoch) + 1)
        if reached[-1] >= k * size / per_epoch
    }
    assert [entry.samples for entry in read_index(run.folder)] == sorted(marks | {reached[-1]})
    assert [entry.epochs for entry in read_index(run.folder)] == [
        round(s / size, 6) for s in sorted(marks | {reached[-1]})
    ]


@pytest.mark.parametrize("strategy", long_but(["async"], ["sync", "async"]))
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_resumed_run_makes_what_a_crash_came_too_early_for(
    record: Record, strategy: str, with_checkpoint: bool
) -> None:
    run = recorded(record, strategy)
    run.push_at_random(12)
    while not run.server.can_checkpoint:
        run.push_at_random(1)
    run.host.checkpoint()
    cut_at = run.server.version
    run.push_at_random(15)
    run.close()
    before, entries = contents(run), read_index(run.folder)
    later = [entry for entry in entries if entry.version > cut_at]
    assert 2 <= len(later) < len(entries)
    (run.folder.snapshots / later[0].file_name).unlink()  # as if never written
    (run.folder.snapshots / later[1].file_name).write_bytes(b"half")
    (run.folder.snapshots / "999999999999.safetensors").write_bytes(b"of another life")
    if not with_checkpoint:
        shutil.rmtree(run.folder.checkpoints)
        (run.folder.snapshots / "index.json").unlink()
    server = run.new_server()
    rebuild(server, run.make_worker, run.task, run.config, run.folder, ignore)
    assert_same(server, run.server)
    assert contents(run) == before


def test_the_end_of_a_stopped_run_is_kept_until_it_goes_on(record: Record) -> None:
    run = recorded(record, "sync", 1.0)
    run.push_at_random(8)
    run.host.handle(Stop())
    run.close()
    versions = [entry.version for entry in read_index(run.folder)]
    assert versions == [0, run.server.version] and read_index(run.folder)[-1].extra
    server = run.new_server()
    rebuild(server, run.make_worker, run.task, run.config, run.folder, ignore)
    server.handle(Resume())
    assert [entry.version for entry in read_index(run.folder)] == [0]
    assert [path.name for path in run.folder.snapshots.glob("*.safetensors")] == ["000000000000.safetensors"]


def test_a_run_without_the_flag_keeps_none(record: Record) -> None:
    run = record(strategy="classic", workers=1)
    run.join_all()
    run.run_to_the_end()
    assert not run.folder.snapshots.exists()
    drop_snapshots_after(run.folder, 3)
    assert read_index(run.folder) == []


def test_a_damaged_snapshot_or_index_is_one_clear_line(record: Record) -> None:
    run = recorded(record, "classic", 1.0)
    run.run_to_the_end()
    entry = read_index(run.folder)[1]
    path = run.folder.snapshots / entry.file_name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="its checksum is wrong"):
        read_snapshot(run.folder, entry)
    (run.folder.snapshots / "index.json").write_text('{"snapshots": [{"version": 1')
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        read_index(run.folder)


def test_a_slow_disk_holds_the_run_back_only_when_many_copies_wait() -> None:
    release, done = threading.Event(), []
    writer = BackgroundWriter()
    for number in range(MAX_WAITING):
        writer.submit("a job", lambda number=number: (release.wait(), done.append(number)))
    assert writer.busy and not done
    release.set()
    writer.submit("a job", lambda: done.append("last"))
    writer.close()
    assert done == [*range(MAX_WAITING), "last"]


def test_a_folder_that_cannot_be_written_does_not_end_the_run(record: Record) -> None:
    run = record(strategy="classic", workers=1, snapshots=1.0)
    Path(run.folder.snapshots).write_text("a file where the folder should be")
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    run.close()
    assert result["status"] == "finished"
    told = [row for row in run.rows if "a snapshot could not be written" in str(row.get("text"))]
    assert len(told) == 1
