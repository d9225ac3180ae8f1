"""The values of a script's pushes on disk: written, read back, torn, and removed when no checkpoint needs them."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes
from paceline.core.messages import Disposition, Join, Leave, Push, Reply
from paceline.runs.arrival_log import RECORD_BYTES, ArrivalLog, read_log
from paceline.runs.checkpoint import Checkpoint, write_checkpoint
from paceline.runs.durable_files import SegmentWriter, read_segment, segments
from paceline.runs.folder import RunFolder
from paceline.runs.recovery import KeptPushes, PushValues, kept_pushes

CONFIG = RunConfig(task="script:loop", workers=2, durable=True)


def push(worker: int, seq: int, incarnation: int = 0, **fields: Any) -> Push:
    update = torch.arange(5.0) + 10 * worker + seq
    return Push(worker, incarnation, seq, seq, 4, 0.1, update, torch.full((2,), 0.5))._replace(**fields)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def log_all(folder: RunFolder, values: PushValues, pushes: list[Push], config: RunConfig = CONFIG) -> int:
    """Keep and log pushes; return the length of the log."""
    log = ArrivalLog(folder.arrivals_file, config)
    for one in pushes:
        values.append(one)
        log.append(one, Disposition.TAKEN, 1.0)
    values.sync()
    log.close()
    return log.nbytes


def files(folder: RunFolder) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in segments(folder.path, "pushes")]


def test_pushes_are_read_back_bit_for_bit(folder: RunFolder) -> None:
    odd = torch.tensor([math.nan, math.inf, -0.0, 1e-45, 0.1])
    written = [push(0, 0), push(1, 0, loss=math.nan, update=odd), push(0, 1, 3, weight=0.1, state=torch.empty(0))]
    values = PushValues(folder, CONFIG, 0)
    for one in written:
        values.append(one)
    values.append(Leave(0, 0))
    values.close()
    kept = KeptPushes(folder)
    for one in written:
        found = kept.push(one.worker, one.incarnation, one.optimizer, one.seq)
        assert found is not None and found._replace(loss=0, update=0, state=0) == one._replace(
            loss=0, update=0, state=0
        )
        assert repr(found.loss) == repr(one.loss)
        assert torch.equal(found.update.view(torch.int32), one.update.view(torch.int32))
        assert torch.equal(found.state, one.state)
    assert kept.push(0, 0, 0, 1) is None
    source = kept.sources(BufferSizes(5, 2))(Join(1, 0))
    source.pending = Reply(1, 0, 0, 0, 0)
    assert source.push() is not None and source.pending is None


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_a_torn_end_is_ignored_and_its_records_are_cut_off(folder: RunFolder, cut: int) -> None:
    rows: list[dict[str, Any]] = []
    values = PushValues(folder, CONFIG, 0)
    whole = log_all(folder, values, [push(0, 0), push(1, 0), push(0, 1)])
    values.close()
    (path,) = segments(folder.path, "pushes")
    os.truncate(path, path.stat().st_size - cut)
    assert len(list(read_segment(path))) == 2
    assert kept_pushes(CONFIG, folder, rows.append) is not None
    assert folder.arrivals_file.stat().st_size == whole - RECORD_BYTES
    assert [record.seq for record in read_log(folder.arrivals_file, CONFIG).records] == [0, 0]
    assert "ends in 1 pushes that were not acknowledged" in rows[0]["text"]


def test_damage_in_the_middle_leaves_the_checkpoint_alone(folder: RunFolder) -> None:
    rows: list[dict[str, Any]] = []
    values = PushValues(folder, CONFIG, 0)
    log_all(folder, values, [push(0, 0)])
    values.begin_segment(1)
    whole = log_all(folder, values, [push(1, 0)])
    values.close()
    first, _ = segments(folder.path, "pushes")
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    assert kept_pushes(CONFIG, folder, rows.append) is None and "damaged" in rows[0]["text"]
    assert folder.arrivals_file.stat().st_size == whole


def test_segments_that_no_checkpoint_needs_are_removed(folder: RunFolder) -> None:
    values = PushValues(folder, CONFIG, 0)
    for number in (100, 200, 300):
        checkpoint = Checkpoint({"version": number}, {}, log_offset=number, now=0.0)
        values.begin_segment(number)
        write_checkpoint(folder.checkpoints, checkpoint, keep=2)
    assert files(folder) == [100, 200, 300], (
        "of the checkpoint that was just written, the older segment still lies here"
    )
    values.begin_segment(400)
    assert files(folder) == [200, 300, 400]
    values.close()


def test_who_resumes_at_the_same_place_overwrites_nothing(folder: RunFolder) -> None:
    for _ in range(2):
        values = PushValues(folder, CONFIG, 36)
        values.append(push(0, 0))
        values.close()
    assert files(folder) == [36, 37]


def test_without_durable_nothing_is_kept(folder: RunFolder) -> None:
    values = PushValues(folder, CONFIG, 0)
    values.append(push(0, 0))
    values.close()
    plain = PushValues(folder, RunConfig(task="script:loop"), 100)
    plain.append(push(0, 1))
    plain.begin_segment(200)
    assert not files(folder)
    log_all(folder, plain, [push(0, 1)])
    assert kept_pushes(CONFIG, folder, lambda row: None) is None


def test_an_entry_that_does_not_fit_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SegmentWriter(tmp_path, "pushes")
    writer.begin(0)
    writer.append([memoryview(b"whole")])
    write = os.write

    def full(fd: int, content: memoryview) -> int:
        if bytes(content) == b"ond":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append([memoryview(b"second")])
    monkeypatch.undo()
    writer.append([memoryview(b"third")])
    writer.close()
    (path,) = segments(tmp_path, "pushes")
    assert [bytes(entry) for entry in read_segment(path)] == [b"whole", b"third"]
