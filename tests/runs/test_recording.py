"""Logs that cannot be replayed: each is one clear line, and nothing in the run folder changes."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.runs.arrival_log import RECORD_BYTES
from paceline.runs.checkpoint import take_checkpoint, write_checkpoint
from paceline.runs.compare_replay import checkpoints_by_record, compare
from paceline.runs.folder import RunFolder
from paceline.runs.recording import ScriptCall, open_recording
from tests.support.recorded_runs import Record, RecordedRun, ignore, small_task

pytestmark = pytest.mark.long  # left to `make test`

BODY = struct.Struct("<BBHIIIIfd")


def made(record: Record) -> RecordedRun:
    run = record(strategy="async", workers=2, epochs=1.0)
    run.join_all()
    run.push_at_random(10_000)
    run.host.finish()
    run.close()
    return run


def header_of(content: bytes) -> int:
    return content.find(b"\n") + 1


def with_field(content: bytes, field: int, value: int) -> bytes:
    """The log with one field of its third record changed, under a checksum that is right."""
    at = header_of(content) + 2 * RECORD_BYTES
    fields = list(BODY.unpack(content[at : at + BODY.size]))
    fields[field] = value
    body = BODY.pack(*fields)
    return content[:at] + body + struct.pack("<I", zlib.crc32(body)) + content[at + RECORD_BYTES :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda c: b"", "is empty: the run never started"),
    "only a header": (lambda c: c[: header_of(c)], "holds no record: the run never started"),
    "half a header": (lambda c: c[:30], "is not an arrivals log of this version"),
    "something else": (lambda c: b"\xff\xfe\n" + c, "is not an arrivals log of this version"),
    "another format": (lambda c: c.replace(b"arrivals 1", b"arrivals 2", 1), "is not an arrivals log of this version"),
    "another config": (lambda c: c.replace(c[20:36], b"0" * 16, 1), "belongs to another config"),
    "a config in no alphabet": (lambda c: c.replace(c[20:36], b"\xff" * 16, 1), "belongs to another config"),
    "damage in the middle": (lambda c: c[:300] + bytes([c[300] ^ 1]) + c[301:], "is damaged at byte"),
    "a hole": (lambda c: c[:300] + c[310:], "is damaged at byte"),
    "an unknown kind": (lambda c: with_field(c, 0, 99), "a record of unknown kind 99 at byte"),
    "an unknown verdict": (lambda c: with_field(c, 1, 77), "a record of unknown verdict 77 at byte"),
    "an unknown worker": (lambda c: with_field(c, 2, 5), "names worker 5 at byte"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_log_that_cannot_be_replayed_is_one_clear_line(record: Record, name: str) -> None:
    run = made(record)
    do, expected = DAMAGES[name]
    path = run.folder.arrivals_file
    path.write_bytes(do(path.read_bytes()))
    before = {file: file.read_bytes() for file in run.folder.path.iterdir() if file.is_file()}
    with pytest.raises(UserError, match=expected) as caught:
        open_recording(run.folder.path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert {file: file.read_bytes() for file in run.folder.path.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("status", "way_on"),
    [
        ("finished", "the run is finished, its weights and its result are not affected, but it cannot be replayed"),
        ("diverged", "'paceline resume .* --recovery checkpoint' continues without them"),
        (None, "'paceline resume .* --recovery checkpoint' continues without them"),
    ],
)
def test_a_damaged_log_advises_what_the_run_allows(record: Record, status: str | None, way_on: str) -> None:
    run = made(record)
    path = run.folder.arrivals_file
    content = path.read_bytes()
    path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    if status is None:
        run.folder.result_file.unlink()
    else:
        run.folder.write_result({**(run.folder.result() or {}), "status": status})
    with pytest.raises(UserError, match=f"is damaged at byte .*: (nothing was changed; )?{way_on}$"):
        open_recording(run.folder.path)


def test_a_file_of_a_run_is_not_its_folder(record: Record, tmp_path: Path) -> None:
    run = made(record)
    with pytest.raises(UserError, match=rf"result\.json is in a run folder, but is none: give {run.folder.path}$"):
        open_recording(run.folder.result_file)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(UserError, match="not a run folder: it is a file; 'paceline list"):
        open_recording(tmp_path / "file.txt")


def test_a_simulation_of_times_alone_has_nothing_to_replay(record: Record) -> None:
    run = made(record)
    run.folder.arrivals_file.unlink()
    run.folder.update_config(dataclasses.replace(run.config, timing_only=True))
    with pytest.raises(UserError, match="simulated only times"):
        open_recording(run.folder.path)


def test_a_run_without_a_log(record: Record) -> None:
    run = made(record)
    run.folder.arrivals_file.unlink()
    with pytest.raises(UserError, match="does not exist: this run has no log to replay"):
        open_recording(run.folder.path)


def test_a_torn_tail_is_left_out_with_a_note_and_stays_in_the_file(record: Record) -> None:
    run = made(record)
    path = run.folder.arrivals_file
    path.write_bytes(path.read_bytes()[:-5])
    length = path.stat().st_size
    recording = open_recording(run.folder.path)
    assert recording.notes() == [f"arrivals.log ends in a torn record of {RECORD_BYTES - 5} bytes, which is ignored"]
    with pytest.raises(
        UserError, match=r"ends at update \d+ .*result\.json says \d+ .*: the end of the log is missing"
    ):
        compare(run.replay(), recording, small_task(), ignore)
    assert path.stat().st_size == length


def test_a_log_cut_between_two_records_is_told_by_the_result(record: Record) -> None:
    run = made(record)
    path = run.folder.arrivals_file
    path.write_bytes(path.read_bytes()[: -4 * RECORD_BYTES])
    recording = open_recording(run.folder.path)
    assert recording.notes() == []
    with pytest.raises(UserError, match=rf"result\.json says {run.server.version} .*: the end of the log is missing"):
        compare(run.replay(), recording, small_task(), ignore)


def test_a_log_cut_before_a_checkpoint_is_told_by_the_checkpoint(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(8)
    sent = {worker: instance.memory for worker, instance in run.instances.items()}
    write_checkpoint(run.folder.checkpoints, take_checkpoint(run.server, sent, run.host.log.nbytes, 1.0))
    run.close()
    path = run.folder.arrivals_file
    path.write_bytes(path.read_bytes()[:-RECORD_BYTES])
    with pytest.raises(UserError, match=r"checkpoint 8 was taken at byte \d+: the end of the log is missing"):
        checkpoints_by_record(open_recording(run.folder.path))


@pytest.mark.parametrize("content", ["[]", "{}", "{"])
def test_a_result_that_is_none(record: Record, content: str) -> None:
    run = made(record)
    run.folder.result_file.write_text(content)
    with pytest.raises(UserError, match="the run folder is damaged"):
        open_recording(run.folder.path)


def test_output_alone_and_output_into_nowhere(record: Record) -> None:
    run = made(record)
    with pytest.raises(UserError, match="add --until N"):
        open_recording(run.folder.path, output=run.folder.path / "x")
    with pytest.raises(UserError, match="does not exist"):
        open_recording(run.folder.path, 2, run.folder.path / "nowhere/x")


def test_a_script_that_is_missing_or_changed(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: RunFolder = made(record).folder
    monkeypatch.chdir(folder.path)
    with pytest.raises(UserError, match="does not record which script created it"):
        ScriptCall.load(folder)
    (folder.path / "loop.py").write_text("pass\n")
    ScriptCall.of(["loop.py", "6"]).save(folder)
    monkeypatch.chdir("/")
    call = ScriptCall.load(folder)
    assert call.path == folder.path / "loop.py" and call.command == ["loop.py", "6"] and not call.changed
    call.path.write_text("print()\n")
    assert call.changed
    call.path.unlink()
    with pytest.raises(UserError, match=r"loop\.py of this run no longer exists: put it back, it computes the steps"):
        ScriptCall.load(folder)
    for content in ("{", "{}", "[]"):
        folder.script_file.write_text(content)
        with pytest.raises(UserError, match="cannot be read"):
            ScriptCall.load(folder)
