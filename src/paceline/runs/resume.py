"""Back to where a run was: the newest checkpoint, then every acknowledged push since, computed again from the log."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from paceline.assemble import keeps_own, on_ring
from paceline.config import RunConfig
from paceline.core.messages import Join
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.errors import UserError
from paceline.runs.arrivals import read_log
from paceline.runs.checkpoint import newest_cut
from paceline.runs.folder import RunFolder
from paceline.runs.replay import Replay, Threads
from paceline.runs.result import Trained
from paceline.runs.snapshots import go_back, snapshots_of
from paceline.runs.writing import Writer


def rebuild(
    server: Server,
    make_seat: Callable[[Join], Seat],
    model: Trained,
    config: RunConfig,
    folder: RunFolder,
    report: Callable[[dict[str, Any]], None],
) -> float:
    """Bring a fresh `server` to the end of the run's log; returns the training clock there.

    A torn record at the log's end (a crash in mid-write) was never acknowledged and is cut off. Snapshots since the
    checkpoint are made again, so none is missing that the crash came too early for.
    """
    cut, complaints = newest_cut(folder.checkpoints)
    for text in complaints:
        report({"kind": "note", "text": text})
    if on_ring(config) and keeps_own(config):
        cut = None  # a ring's checkpoint has only the first worker's own state: the others' come from the whole log
    start = cut.log_offset if cut is not None else 0
    log = read_log(folder.arrivals_file, config, start)
    records = log.records
    if log.torn:
        report({"kind": "note", "text": f"{folder.arrivals_file.name} ends in a torn record: it is left out"})
        os.truncate(folder.arrivals_file, log.ends)
    pushes = sum(record.kind == "push" for record in records)
    if pushes:
        since = f"checkpoint {cut.version}" if cut is not None else "the start"
        report({"kind": "note", "text": f"computing {pushes} logged pushes since {since} again"})
    before = torch.get_num_threads()
    replay = Replay(server, make_seat, cut, Threads(config.threads or 1, before))
    go_back(folder, cut.version if cut is not None else -1)
    writer = Writer(background=False)
    snapshots = snapshots_of(config, folder, server, model, writer)
    replay.feed(records, lambda number: snapshots.look(server) if snapshots is not None else None)
    for what, error in writer.failures():
        report({"kind": "note", "text": f"{what} could not be written again ({error.strerror or error})"})
    torch.set_num_threads(before)
    if replay.departure is not None:
        what = f"first worker {replay.departure.worker}'s push {replay.departure.push}"
        report({"kind": "note", "text": f"logged pushes come out otherwise on this machine ({what}): the run goes on"})
    if server.divergence is not None:
        raise UserError(f"{folder.path} diverged at update {server.version}: start a new run with a lower --lr instead")
    return records[-1].now if records else (cut.now if cut is not None else 0.0)
