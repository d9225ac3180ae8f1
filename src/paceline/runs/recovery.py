"""Back to where a run was: the newest checkpoint, then every acknowledged push since, computed again from the log.

Or, with `--recovery checkpoint`, the newest checkpoint alone: what came after it is taken back, and counted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.config import RunConfig
from paceline.core.messages import Join, Resume, Verdict
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.runs.arrival_log import RECORD_BYTES, Log, Record, look_into, next_life, read_log
from paceline.runs.background_writer import Writer
from paceline.runs.checkpoint import Cut, newest_cut, restore, set_aside
from paceline.runs.folder import RunFolder
from paceline.runs.replay import Replay, Threads
from paceline.runs.result import Trained
from paceline.runs.snapshots import forget_best, go_back, snapshots_of
from paceline.settings.strategies import keeps_own, on_ring


@dataclass(frozen=True)
class Rebuilt:
    """What it took to be back: the training clock there, the input that says how, and the recomputed pushes."""

    now: float
    resume: Resume
    checkpoint: int | None
    pushes: int
    seconds: float
    incarnation: int
    """The first that no worker has had, not even in what was taken back."""


def rebuild(
    server: Server,
    make_seat: Callable[[Join], Seat],
    model: Trained,
    config: RunConfig,
    folder: RunFolder,
    report: Report,
) -> Rebuilt:
    """Bring a fresh `server` to where the run goes on: the end of its log, or its newest checkpoint.

    A torn record at the log's end (a crash in mid-write) was never acknowledged and is cut off. Snapshots since the
    checkpoint are made again, so none is missing that the crash came too early for.
    """
    began = time.perf_counter()
    skips = config.recovery == "checkpoint"
    cut = _newest_usable(config, folder, report, skips)
    log = _read_tail(config, folder, cut, report, skips)
    before = torch.get_num_threads()
    if skips and cut is not None:
        restore(server, cut)
    standing = [log.records[place] for place in log.standing]
    records = [] if skips else standing
    incarnation, _ = next_life(folder.arrivals_file, config)
    replay = Replay(server, make_seat, None if skips else cut, Threads(config.threads or 1, before))
    go_back(folder, cut.version if cut is not None else -1)
    resume = _take_back(cut, log, standing, report) if skips else Resume()
    pushes = sum(record.kind == "push" for record in records)
    if pushes:
        report({"kind": "note", "text": f"computing {pushes} logged pushes since {_named(cut)} again"})
    writer = Writer(background=False)
    snapshots = snapshots_of(config, folder, server, model, writer)
    replay.feed(records, lambda number: snapshots.look(server) if snapshots is not None else None)
    _complain(writer, report)
    torch.set_num_threads(before)
    if replay.departure is not None:
        what = f"first worker {replay.departure.worker}'s push {replay.departure.push}"
        report({"kind": "note", "text": f"logged pushes come out otherwise on this machine ({what}): the run goes on"})
    if server.divergence is not None:
        raise UserError(f"{folder.path} diverged at update {server.version}: start a new run with a lower --lr instead")
    forget_best(folder, server.version)
    now = log.records[-1].now if log.records else (cut.now if cut is not None else 0.0)
    version = cut.version if cut is not None else None
    return Rebuilt(now, resume, version, pushes, time.perf_counter() - began, incarnation)


def _complain(writer: Writer, report: Report) -> None:
    for what, error in writer.changes():
        if error is not None:
            report({"kind": "note", "text": f"{what} could not be written again ({error.strerror or error})"})


def _named(cut: Cut | None) -> str:
    return f"checkpoint {cut.version}" if cut is not None else "the start"


def _newest_usable(config: RunConfig, folder: RunFolder, report: Report, skips: bool) -> Cut | None:
    """The newest checkpoint that can be read and that the log reaches; newer ones are set aside."""
    nbytes = folder.arrivals_file.stat().st_size if folder.arrivals_file.exists() else None
    cut, complaints = newest_cut(folder.checkpoints, nbytes)
    for text in complaints:
        report({"kind": "note", "text": text})
    if complaints:
        set_aside(folder.checkpoints, cut.version if cut is not None else -1)
    if on_ring(config) and keeps_own(config) and not skips:
        return None  # a ring's checkpoint has only the first worker's own state: the others' come from the whole log
    return cut


def _read_tail(config: RunConfig, folder: RunFolder, cut: Cut | None, report: Report, skips: bool) -> Log:
    """The log since the checkpoint, its file cut off behind the last whole record."""
    path, start = folder.arrivals_file, cut.log_offset if cut is not None else 0
    log = look_into(path, config, start) if skips else read_log(path, config, start)
    if log.behind:
        kept = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, kept)
        text = (
            f"{path.name} is damaged at byte {log.ends}: the {log.torn} bytes behind are left out, {kept.name} has all"
        )
        report({"kind": "note", "text": text})
    elif log.torn:
        what = "a torn record" if log.torn < RECORD_BYTES else f"{log.torn} bytes that hold no whole record"
        report({"kind": "note", "text": f"{path.name} ends in {what}: left out"})
    if log.torn:
        os.truncate(path, log.ends)
    return log


def _take_back(cut: Cut | None, log: Log, standing: list[Record], report: Report) -> Resume:
    """The input that undoes what was logged since the checkpoint; says how much that is."""
    lost = sum(_lost(record) for record in (*standing, *log.behind))
    resume = Resume(len(log.records), lost)
    if lost:
        text = f"going on from {_named(cut)}: {lost} acknowledged pushes since are lost (--recovery checkpoint)"
        report({"kind": "note", "text": text})
    return resume


def _lost(record: Record) -> int:
    """Pushes that are lost with a record: itself, or those that it had given up before."""
    if record.kind == "resume":
        return record.reply
    return int(record.kind == "push" and record.verdict == Verdict.TAKEN)
