"""Disks that are full or read-only, crashes in the middle of a write, and what they leave: one line, no half file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runs import folder as folder_module
from paceline.runs import snapshots
from paceline.runs.arrival_log import ArrivalLog
from paceline.runs.checkpoint import newest_checkpoint
from paceline.runs.durable_files import write_atomically
from paceline.runs.events import EventLog
from paceline.runs.folder import RunFolder
from tests.support.recorded_runs import Record, small_config

FULL, READ_ONLY = errno.ENOSPC, errno.EROFS
CLASSIC = (
    *("train", "--strategy", "classic", "--steps", "8", "--batch-size", "8", "--lr", "0.01", "--name", "it"),
    *("--threads", "1", "--score", "none"),
)
FIRST_WRITES = {"open": (ArrivalLog, "__init__"), "header": (ArrivalLog, "_write"), "event": (EventLog, "write")}


class Broken:
    """Stands in for a function that writes, and fails like a disk."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(("code", "found"), [(FULL, "no space is left"), (READ_ONLY, "Read-only file system")])
@pytest.mark.parametrize("place", sorted(FIRST_WRITES))
def test_a_run_that_cannot_begin_ends_in_one_line_and_leaves_no_folder(
    place: str,
    code: int,
    found: str,
    small_sample: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(*FIRST_WRITES[place], Broken(code))
    assert main([*CLASSIC, "--runs", str(tmp_path / "runs")]) == 2
    complaints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paceline: ")]
    assert len(complaints) == 1 and found in complaints[0] and complaints[0].endswith("then start it again")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("place", ["write_atomically", "sync_folder"])
def test_a_folder_that_cannot_be_filled_does_not_keep_its_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, place, Broken(FULL))
        with pytest.raises(UserError, match="cannot be written: No space left on device; try --runs DIR"):
            RunFolder.create(small_config(tmp_path / "runs", workers=2))
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_fills_at_the_end_is_named_with_the_way_on(
    small_sample: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the run is resumed, and its replay is identical."""
    monkeypatch.setenv("COLUMNS", "1000")
    write = EventLog.write

    def full(log: EventLog, kind: str, now: float, **fields: object) -> int:
        return write(log, kind, now, **fields) if kind != "run_ended" else Broken(FULL)()

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "write", full)
        assert main([*CLASSIC, "--runs", str(tmp_path)]) == 2
    assert f"make room, then 'paceline resume {tmp_path}/it' continues from there" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "it")]) == 0
    assert main(["replay", str(tmp_path / "it")]) == 0
    assert "identical to the run" in capsys.readouterr().out


def test_a_failed_sync_of_the_log_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports it once, perhaps to the thread that writes checkpoints: no later reply may rely on the log."""
    log = ArrivalLog(tmp_path / "arrivals.log", RunConfig())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", Broken(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            log.sync()
    with pytest.raises(OSError, match="Input/output error"):
        log.sync()
    log.close()


def test_best_weights_that_could_not_be_written_are_not_in_the_result(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(strategy="async", workers=2, lr=0.4, epochs=2.0, eval_every=0.5)
    monkeypatch.setattr(snapshots, "write_atomically", Broken(FULL))
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    assert not run.folder.best_file.exists() and result["best"] is None


def left_behind(folder: RunFolder, pid: int) -> list[Path]:
    """What a killed process may leave."""
    checkpoint = folder.checkpoints / ".000000000009.tmp"
    removed = folder.checkpoints / ".000000000003.old.tmp"
    for path in (checkpoint, removed):
        path.mkdir(parents=True)
        (path / "tensors.safetensors").write_bytes(b"half")
    files = [folder.path / f".result.json.{pid}.tmp", folder.checkpoints / f".best.safetensors.{pid}.tmp"]
    for path in files:
        path.write_bytes(b"half")
    return [checkpoint, removed, *files]


def test_what_a_killed_process_left_is_swept_at_the_next_start(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(3)
    run.checkpoint()
    left = left_behind(run.folder, pid=1 << 22)  # no process has this number
    writing = run.folder.path / f".trace.json.gz.{os.getppid()}.tmp"
    writing.write_bytes(b"of a command that is alive")
    run.resume()
    assert not [path for path in left if path.exists()] and writing.exists()
    assert newest_checkpoint(run.folder.checkpoints)[0] is not None


def test_a_checkpoint_that_is_being_removed_is_none(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(strategy="async", workers=2, keep=1)
    run.join_all()
    run.push_at_random(2)
    run.checkpoint()
    run.push_at_random(2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if the process were killed here
    run.checkpoint()
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == [".000000000002.old.tmp", "000000000004"]


def test_a_rename_is_followed_by_a_sync_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append("folder" if is_folder and (tmp_path / "it").exists() else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(tmp_path / "it", b"content")
    assert synced == ["file", "folder"]


def test_a_new_run_and_its_log_are_synced_with_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    folder = RunFolder.create(small_config(tmp_path / "runs", workers=2))
    assert synced[-2:] == [folder.path, folder.path.parent]
    synced.clear()
    ArrivalLog(folder.arrivals_file, folder.config()).close()
    assert synced == [folder.path]


def test_a_config_is_replaced_whole_and_the_folder_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(small_config(tmp_path, workers=2))
    before = folder.config_file.read_bytes()
    with folder.locked():
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Broken(FULL))
            with pytest.raises(OSError):
                folder.update_config(small_config(tmp_path, workers=3))
        assert folder.config_file.read_bytes() == before
        folder.update_config(small_config(tmp_path, workers=3))
        assert folder.config().workers == 3 and RunFolder(folder.path).is_locked()
