"""Damaged files: what is torn, corrupted or foreign is seen, and the older good thing is used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.messages import Resume
from paceline.errors import UserError
from paceline.runs.arrival_log import RECORD_BYTES, ArrivalLog, fingerprint, read_arrivals
from paceline.runs.checkpoint import Checkpoint, newest_checkpoint, restore, take_checkpoint, write_checkpoint
from paceline.runs.durable_files import BackgroundWriter
from paceline.runs.events import EventLog, read_events
from paceline.runs.recovery import rebuild
from paceline.tasks.supervised import SupervisedTask
from tests.support import recorded_runs
from tests.support.recorded_runs import Record, RecordedRun, assert_same, checkpoint_now, ignore, small_config


def recorded(record: Record, strategy: str = "async") -> RecordedRun:
    """A run that was killed in its middle: a log, two checkpoints, no end."""
    run = record(strategy=strategy, workers=2)
    run.join_all()
    for _ in range(2):
        run.push_at_random(5)
        while not run.server.can_checkpoint:
            run.push_at_random(1)
        sent = {worker: instance.memory for worker, instance in run.instances.items()}
        write_checkpoint(run.folder.checkpoints, take_checkpoint(run.server, sent, run.host.log.nbytes, 1.5))
    run.push_at_random(4)
    while not run.server.can_checkpoint:
        run.push_at_random(1)
    run.close()
    return run


def test_a_log_of_another_config_is_refused(record: Record) -> None:
    run = recorded(record)
    other = dataclasses.replace(run.config, lr=0.2)
    assert fingerprint(other) != fingerprint(run.config)
    with pytest.raises(UserError, match=r"belongs to another config"):
        read_arrivals(run.folder.arrivals_file, other)


def test_the_config_read_back_from_the_folder_has_the_same_fingerprint(record: Record) -> None:
    run = recorded(record)
    assert run.folder.config() == run.config
    assert fingerprint(run.folder.config()) == fingerprint(run.config)


def test_a_file_that_is_no_log_and_a_log_that_is_not_there_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, workers=2)
    with pytest.raises(UserError, match="does not exist"):
        read_arrivals(tmp_path / "arrivals.log", config)
    (tmp_path / "arrivals.log").write_bytes(b"something else\n" * 5)
    with pytest.raises(UserError, match="not an arrivals log"):
        read_arrivals(tmp_path / "arrivals.log", config)


def test_a_torn_record_is_left_out(record: Record) -> None:
    run = recorded(record)
    path = run.folder.arrivals_file
    content = path.read_bytes()
    whole, length = read_arrivals(path, run.config)
    for missing in range(1, RECORD_BYTES):
        path.write_bytes(content[:-missing])
        assert read_arrivals(path, run.config) == (whole[:-1], length - RECORD_BYTES), f"{missing} bytes missing"


def test_any_flipped_bit_in_the_last_record_is_seen(record: Record) -> None:
    run = recorded(record)
    path = run.folder.arrivals_file
    content = path.read_bytes()
    whole, length = read_arrivals(path, run.config)
    for bit in range(8 * RECORD_BYTES):
        flipped = bytearray(content)
        flipped[length - RECORD_BYTES + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read_arrivals(path, run.config) == (whole[:-1], length - RECORD_BYTES), f"bit {bit} flipped"


def test_a_reopened_log_goes_on_where_it_was(record: Record) -> None:
    run = recorded(record)
    before, _ = read_arrivals(run.folder.arrivals_file, run.config)
    log = ArrivalLog(run.folder.arrivals_file, run.config)
    log.append(Resume(), run.server.handle(Resume()).disposition, 2.5)
    log.close()
    after, _ = read_arrivals(run.folder.arrivals_file, run.config)
    assert after[:-1] == before
    assert (after[-1].kind, after[-1].now) == ("resume", 2.5)


def test_a_log_that_ends_before_the_checkpoint_is_refused(record: Record) -> None:
    """Appending to it would put records where the checkpoint believes that others lie."""
    run = recorded(record)
    checkpoint, _ = newest_checkpoint(run.folder.checkpoints)
    assert checkpoint is not None
    path = run.folder.arrivals_file
    path.write_bytes(path.read_bytes()[: checkpoint.log_offset - RECORD_BYTES])
    with pytest.raises(UserError):
        read_arrivals(path, run.config, checkpoint.log_offset)


@pytest.mark.parametrize("strategy", ["async", "sync", "bounded:1"])
def test_rebuilding_from_the_newest_checkpoint_gives_back_every_acknowledged_push(
    record: Record, strategy: str
) -> None:
    run = recorded(record, strategy)
    server = run.new_server()
    rebuilt = rebuild(server, run.make_worker, run.task, run.config, run.folder, ignore)
    assert_same(server, run.server)
    assert rebuilt.resume == Resume()
    assert rebuilt.now == read_arrivals(run.folder.arrivals_file, run.config)[0][-1].now


def test_rebuilding_cuts_a_torn_record_off_and_says_so(record: Record) -> None:
    run = recorded(record)
    path, notes = run.folder.arrivals_file, []
    length = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\x02torn")
    rebuild(run.new_server(), run.make_worker, run.task, run.config, run.folder, lambda row: notes.append(row["text"]))
    assert path.stat().st_size == length
    assert any("torn record" in note for note in notes)


@pytest.mark.parametrize(
    ("recovery", "why"),
    [
        ("log", "only 'paceline run --durable' keeps the pushes of a script"),
        ("checkpoint", "--recovery checkpoint"),
    ],
)
def test_lost_pushes_name_the_flag_that_was_given_or_the_one_that_keeps_them(
    record: Record, recovery: str, why: str
) -> None:
    run, notes = recorded(record), []
    config = dataclasses.replace(run.config, recovery=recovery)
    newest = newest_checkpoint(run.folder.checkpoints)[0]
    rebuilt = rebuild(run.new_server(), None, run.task, config, run.folder, lambda row: notes.append(row["text"]))
    lost = rebuilt.resume.lost
    assert newest is not None and lost > 1
    assert notes == [f"continuing from checkpoint {newest.version}: {lost} acknowledged pushes since are lost ({why})"]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_byte_of_a_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x40
    path.write_bytes(content)


def write_rubbish(path: Path) -> None:
    path.write_bytes(b"\x00" * 100)


def drop_a_fact(path: Path) -> None:
    facts = json.loads(path.read_text())
    del facts["log_offset"]
    path.write_text(json.dumps(facts))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tensors cut short": ("tensors.safetensors", cut_short),
    "tensors of rubbish": ("tensors.safetensors", write_rubbish),
    "tensors missing": ("tensors.safetensors", Path.unlink),
    "a byte of a weight flipped": ("tensors.safetensors", flip_a_byte_of_a_weight),
    "facts cut short": ("facts.json", cut_short),
    "facts without one": ("facts.json", drop_a_fact),
    "facts missing": ("facts.json", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupted_newest_checkpoint_falls_back_to_the_older_one(record: Record, damage: str) -> None:
    run = recorded(record)
    older, newer = sorted(run.folder.checkpoints.iterdir())
    name, do = DAMAGES[damage]
    do(newer / name)
    checkpoint, complaints = newest_checkpoint(run.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.version == int(older.name)
    assert len(complaints) == 1
    assert newer.name in complaints[0]
    server = run.new_server()
    rebuild(server, run.make_worker, run.task, run.config, run.folder, ignore)
    assert_same(server, run.server)


def test_with_no_readable_checkpoint_the_log_alone_is_enough(record: Record) -> None:
    run = recorded(record)
    for path in run.folder.checkpoints.iterdir():
        write_rubbish(path / "facts.json")
    server = run.new_server()
    rebuild(server, run.make_worker, run.task, run.config, run.folder, ignore)
    assert_same(server, run.server)


def small_checkpoint(version: int) -> Checkpoint:
    return Checkpoint({"version": version}, {"weights": torch.full((3,), float(version))}, 10 * version, 0.5 * version)


def test_a_cut_comes_back_as_it_was_written_and_old_ones_go(tmp_path: Path) -> None:
    for version in (3, 10, 200, 1000):
        write_checkpoint(tmp_path / "checkpoints", small_checkpoint(version))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000000000200", "000000001000"]
    checkpoint, complaints = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert (checkpoint.version, checkpoint.log_offset, checkpoint.now, complaints) == (1000, 10_000, 500.0, [])
    assert torch.equal(checkpoint.tensors["weights"], torch.full((3,), 1000.0))


def test_a_half_written_checkpoint_is_never_taken_for_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write_checkpoint(folder, small_checkpoint(5))
    (folder / ".000000000009.tmp").mkdir()
    checkpoint, complaints = newest_checkpoint(folder)
    assert checkpoint is not None
    assert (checkpoint.version, complaints) == (5, [])
    assert newest_checkpoint(tmp_path / "nowhere") == (None, [])


def test_a_cut_is_a_copy(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(3)
    checkpoint = take_checkpoint(run.server, {w: instance.memory for w, instance in run.instances.items()}, 0, 0.0)
    before = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    run.run_to_the_end()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in before.items())
    assert {name.partition(".")[0] for name in before} == {"weights", "rule", "sent", "state"}


def test_the_writer_keeps_a_failure_instead_of_raising_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    writer = BackgroundWriter()
    writer.submit("a checkpoint", lambda: write_checkpoint(tmp_path / "checkpoints", small_checkpoint(1)))
    writer.wait()
    ((what, failure),) = writer.changes()
    assert what == "a checkpoint" and isinstance(failure, OSError)
    assert not writer.busy and not writer.changes()


def test_what_cannot_be_written_is_told_once_and_again_when_that_changes() -> None:
    writer = BackgroundWriter(background=False)

    def fail(number: int) -> None:
        raise OSError(number, "why")

    for number in (28, 28, 5):
        writer.submit("a checkpoint", lambda number=number: fail(number))
    writer.submit("something else", lambda: None)
    assert [(what, error and error.errno) for what, error in writer.changes()] == [
        ("a checkpoint", 28),
        ("a checkpoint", 5),
    ]
    writer.submit("a checkpoint", lambda: None)
    writer.submit("a checkpoint", lambda: None)
    assert writer.changes() == [("a checkpoint", None)]


def test_events_come_back_and_a_torn_row_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("first", 0.1234567, worker=1)
        log.write("second", 1.0)
    path.write_bytes(path.read_bytes() + b'{"kind": "tor')
    assert list(read_events(path)) == [
        {"kind": "first", "now": 0.123457, "worker": 1},
        {"kind": "second", "now": 1.0},
    ]


def test_events_written_after_a_crash_in_mid_row_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "first", "now": 0.0}\n{"kind": "tor')
    with EventLog(path) as log:
        log.write("run_resumed", 1.0)
        log.write("progress", 2.0)
    assert [row["kind"] for row in read_events(path)] == ["first", "run_resumed", "progress"]


def test_a_checkpoint_of_another_model_is_told_by_its_weights(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script or the task was changed, not the settings."""
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push(0)
    checkpoint = checkpoint_now(run)
    task = SupervisedTask(nn.Linear(5, 3), F.cross_entropy, run.task.train)
    monkeypatch.setattr(recorded_runs, "small_task", lambda: task)
    other = record(strategy="async", workers=2, name="other")
    then, now = run.server.weights.numel(), other.server.weights.numel()
    with pytest.raises(UserError, match=rf"another model \({then} floats\) than .* builds \({now} floats\): restore"):
        restore(other.server, checkpoint)
