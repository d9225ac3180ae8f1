"""After a crash: nothing acknowledged is lost, or what is lost is counted; what is damaged is left out, and said."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.messages import Disposition, Resume
from paceline.core.server import Server
from paceline.errors import UserError
from paceline.runs.arrival_log import RECORD_BYTES, LogContents, fingerprint, read_log, scan_log
from paceline.runs.arrival_log import Record as Logged
from paceline.runs.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, set_aside, write_checkpoint
from paceline.runs.compare_replay import compare
from paceline.runs.events import read_events
from paceline.runs.recording import open_recording
from tests.support.recorded_runs import Record, RecordedRun, assert_same, small_config

pytestmark = pytest.mark.long  # left to `make test`


def killed(record: Record, **settings: object) -> RecordedRun:
    """A run that was killed some pushes after its second checkpoint."""
    run = record(**{"strategy": "async", "workers": 2, **settings})
    run.join_all()
    for _ in range(2):
        run.push_at_random(4)
        run.checkpoint()
    run.push_at_random(5)
    return run


def replayed(run: RecordedRun) -> Server:
    """What the whole log makes, every resume in it included."""
    recording = open_recording(run.folder.path)
    again = run.replay()
    outcome = compare(again, recording, run.task, run.rows.append)
    assert outcome["first_departure"] is None
    return again.server


@pytest.mark.parametrize("strategy", ["async", "sync", "bounded:1", "backup:1"])
@pytest.mark.parametrize("recovery", ["log", "checkpoint"])
def test_a_run_that_crashed_twice_replays_to_the_same_bits(record: Record, strategy: str, recovery: str) -> None:
    run = killed(record, strategy=strategy, codec="int8")
    for _ in range(2):
        run.resume(recovery=recovery)
        run.join_all()
        run.push_at_random(3)
    run.run_to_the_end()
    assert_same(replayed(run), run.server)
    assert (run.server.lost > 0) == (recovery == "checkpoint")


def test_going_on_from_a_checkpoint_takes_back_what_came_after_it(record: Record) -> None:
    run = killed(record)
    checkpoint, _ = newest_checkpoint(run.folder.checkpoints)
    assert checkpoint is not None
    before = run.server.version
    rebuilt = run.resume(recovery="checkpoint")
    assert (run.server.version, rebuilt.checkpoint) == (checkpoint.version, checkpoint.version)
    assert torch.equal(run.server.weights, checkpoint.tensors["weights"])
    assert rebuilt.resume == Resume(undone=5, lost=before - checkpoint.version)
    assert rebuilt.pushes == 0
    assert f"continuing from checkpoint {checkpoint.version}: 5 acknowledged pushes since are lost" in run.notes[-1]
    recovered = [row for row in read_events(run.folder.events_file) if row["kind"] == "recovered"]
    assert [row["lost_pushes"] for row in recovered] == [5]


def test_what_is_lost_twice_is_counted_once(record: Record) -> None:
    """The second crash comes before the next checkpoint: its rollback covers the first."""
    run = killed(record)
    run.resume(recovery="checkpoint")
    run.join_all()
    run.push_at_random(3)
    run.resume()
    assert run.server.lost == 5 + 3
    run.join_all()
    run.checkpoint()
    run.push_at_random(2)
    run.resume()
    run.join_all()
    run.run_to_the_end()
    assert run.server.lost == 5 + 3 + 2
    assert_same(replayed(run), run.server)


def test_without_a_checkpoint_yet_everything_is_taken_back(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(4)
    run.resume(recovery="checkpoint")
    assert (run.server.version, run.server.lost) == (0, 4)
    run.join_all()
    run.run_to_the_end()
    assert_same(replayed(run), run.server)


def test_after_a_rollback_recovery_by_the_log_goes_over_it(record: Record) -> None:
    """The log since the checkpoint holds records that no longer count; they are not computed again."""
    run = killed(record)
    run.resume(recovery="checkpoint")
    run.join_all()
    run.push_at_random(4)
    expected = run.server
    rebuilt = run.resume(recovery="log")
    assert rebuilt.pushes == 4
    assert (run.server.version, run.server.lost) == (expected.version, 5)
    run.join_all()
    run.run_to_the_end()
    assert_same(replayed(run), run.server)


def made_up(kind: str, undone: int = 0) -> Logged:
    return Logged(kind, 0, 0, undone, 0, 0, 0.0, 0.0, Disposition.TAKEN)


@pytest.mark.parametrize("seed", range(20))
def test_what_stands_is_what_a_file_would_hold_that_is_cut_off_at_each_rollback(seed: int) -> None:
    chance = random.Random(seed)
    records: list[Logged] = []
    ends: list[list[int]] = [[]]  # what stood after each record, by place
    for place in range(30):
        undone = chance.randrange(place + 1) if chance.random() < 0.2 else 0
        stood = ends[place - undone]
        if any(earlier not in ends[place] for earlier in stood):
            undone, stood = 0, ends[place]  # one goes back only to a moment that stands
        records.append(made_up("resume" if undone else "push", undone))
        ends.append([*stood, place])
    assert LogContents(records, 0, 0, 0, []).effective_indices == ends[-1]


def test_settings_about_files_are_no_part_of_what_a_log_belongs_to(tmp_path: Path) -> None:
    one = small_config(tmp_path, workers=2)
    other = small_config(tmp_path, workers=2, keep=5, restart=3, recovery="checkpoint", durable=True)
    assert fingerprint(one) == fingerprint(other) != fingerprint(small_config(tmp_path, workers=3))


def small_checkpoint(version: int) -> Checkpoint:
    return Checkpoint({"version": version}, {"weights": torch.full((3,), float(version))}, 10 * version, 0.5 * version)


def names(folder: Path) -> list[str]:
    return sorted(path.name.lstrip("0") for path in folder.iterdir())


def test_tensors_of_any_shape_and_type_come_back(tmp_path: Path) -> None:
    tensors = {
        "weights": torch.randn(3, 4),
        "none": torch.empty(0),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor([1, -2]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "mask": torch.tensor([True, False]),
        "half": torch.randn(3).to(torch.bfloat16),
    }
    found = read_checkpoint(write_checkpoint(tmp_path, Checkpoint({"version": 1}, tensors, 0, 0.0))).tensors
    assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4, 5):
        write_checkpoint(tmp_path, small_checkpoint(version), keep=3)
    assert names(tmp_path) == ["3", "4", "5"]
    write_checkpoint(tmp_path, small_checkpoint(6), keep=1)
    assert names(tmp_path) == ["6"]


def test_a_checkpoint_is_never_removed_for_one_that_cannot_be_read(tmp_path: Path) -> None:
    """After a rollback the next checkpoint has a lower version than one that is damaged."""
    for version in (3, 8):
        write_checkpoint(tmp_path, small_checkpoint(version), keep=2)
    (tmp_path / f"{8:012d}" / "tensors.safetensors").write_bytes(b"")
    set_aside(tmp_path, 3)
    assert names(tmp_path) == ["3", "8.unused"]
    write_checkpoint(tmp_path, small_checkpoint(5), keep=1)
    assert names(tmp_path) == ["5", "8.unused"]
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint is not None and (checkpoint.version, complaints) == (5, [])


@pytest.mark.parametrize("text", ["[]", "null", '"facts"', '{"facts_sha256": 1}'])
def test_facts_that_are_json_and_nothing_else_are_passed_over(tmp_path: Path, text: str) -> None:
    for version in (3, 8):
        write_checkpoint(tmp_path, small_checkpoint(version))
    (tmp_path / f"{8:012d}" / "facts.json").write_text(text)
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.version == 3
    assert len(complaints) == 1 and "000000000008 cannot be read" in complaints[0]


def test_a_changed_digit_in_the_facts_is_seen_and_so_is_a_changed_name_of_their_checksum(tmp_path: Path) -> None:
    facts = write_checkpoint(tmp_path, small_checkpoint(8)) / "facts.json"
    facts.write_text(facts.read_text().replace('"log_offset": 80', '"log_offset": 81'))
    with pytest.raises(ValueError, match="checksum of its facts is wrong"):
        read_checkpoint(facts.parent)
    facts.write_text(facts.read_text().replace("facts_sha256", "facts_sha25v"))
    with pytest.raises(KeyError, match="facts_sha256"):
        read_checkpoint(facts.parent)


def zeros_at_the_end(content: bytes) -> bytes:
    return content + b"\0" * 4096  # as a file system leaves it whose power was cut


def rubbish_at_the_end(content: bytes) -> bytes:
    return content + bytes(range(1, 101))


def last_records_damaged(content: bytes) -> bytes:
    return content[: -2 * RECORD_BYTES] + b"\x55" * (2 * RECORD_BYTES)


@pytest.mark.parametrize("damage", [zeros_at_the_end, rubbish_at_the_end, last_records_damaged])
def test_a_damaged_end_of_the_log_is_left_out_and_said(record: Record, damage: Callable[[bytes], bytes]) -> None:
    run = killed(record)
    path = run.folder.arrivals_file
    content = path.read_bytes()
    path.write_bytes(damage(content))
    rebuilt = run.resume()
    assert "bytes without an intact record: ignored" in run.notes[0]
    assert rebuilt.pushes == (3 if damage is last_records_damaged else 5)
    run.join_all()
    run.run_to_the_end()
    assert_same(replayed(run), run.server)


def rubbish_in_the_middle(content: bytes) -> bytes:
    return content[: -4 * RECORD_BYTES] + b"\x55" * RECORD_BYTES + content[-3 * RECORD_BYTES :]


def bytes_missing_in_the_middle(content: bytes) -> bytes:
    return content[: -4 * RECORD_BYTES + 7] + content[-3 * RECORD_BYTES - 11 :]


@pytest.mark.parametrize("damage", [rubbish_in_the_middle, bytes_missing_in_the_middle])
def test_a_log_damaged_in_its_middle_is_refused_with_a_way_on(record: Record, damage: Callable[[bytes], bytes]) -> None:
    run = killed(record)
    path = run.folder.arrivals_file
    content = damage(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"before 3 intact records.* --recovery checkpoint' continues without them"):
        run.resume()
    assert path.read_bytes() == content
    run.resume(recovery="checkpoint")
    assert path.with_name("arrivals.log.damaged").read_bytes() == content
    assert run.server.lost == 4  # one was damaged beyond knowing
    run.join_all()
    run.run_to_the_end()
    assert_same(replayed(run), run.server)


def test_damage_before_the_newest_checkpoint_is_in_nobodys_way_but_a_replays(record: Record) -> None:
    run = killed(record)
    path = run.folder.arrivals_file
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    expected = run.server
    run.resume()
    assert run.server.version == expected.version
    with pytest.raises(UserError, match="is damaged at byte"):
        read_log(path, run.config)


def test_a_log_that_lost_its_end_makes_an_older_checkpoint_the_newest(record: Record) -> None:
    run = killed(record)
    older, newer = sorted(run.folder.checkpoints.iterdir())
    path = run.folder.arrivals_file
    path.write_bytes(path.read_bytes()[: read_checkpoint(newer).log_offset - RECORD_BYTES])
    rebuilt = run.resume()
    assert rebuilt.checkpoint == int(older.name)
    assert re.search(r"but the log ends at byte \d+; using an older one", run.notes[0])
    assert not newer.exists() and newer.with_name(f"{newer.name}.unused").exists()
    run.join_all()
    run.run_to_the_end()
    assert_same(replayed(run), run.server)


def test_a_healthy_log_has_nothing_behind_it(record: Record) -> None:
    run = killed(record)
    log = scan_log(run.folder.arrivals_file, run.config)
    assert (log.torn, log.behind) == (0, [])
    assert log.effective_indices == list(range(len(log.records)))
