"""Restores a run after a crash: the newest checkpoint, then every acknowledged push since, recomputed from the log.

A script's pushes are read instead, if `--durable` kept them. With `--recovery checkpoint`, only the newest checkpoint:
later records are undone and the lost pushes counted.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig, is_script
from paceline.core.buffers import BufferSizes, WorkerBuffers, view
from paceline.core.messages import Disposition, Input, Join, Push, Reply, Resume, SkipBatch
from paceline.core.server import PushGuard, Server
from paceline.errors import UserError
from paceline.interfaces import Report
from paceline.runs.arrival_log import RECORD_BYTES, LogContents, Record, next_incarnation, read_log, scan_log
from paceline.runs.checkpoint import Checkpoint, log_offsets, newest_checkpoint, restore, set_aside
from paceline.runs.durable_files import BackgroundWriter, SegmentWriter, read_segment, segments
from paceline.runs.folder import RunFolder
from paceline.runs.replay import MakePushSource, PushSource, Replay, ReplayThreads
from paceline.runs.result import NamedTensors
from paceline.runs.snapshots import drop_best_after, drop_snapshots_after, snapshots_of
from paceline.settings.features import Feature
from paceline.settings.strategies import keeps_own, on_ring, require_feature
from paceline.system.strict_json import from_json, to_json
from paceline.system.terminal import counted

SEGMENT_NAME = "pushes"  # of the files that hold the values of a script's pushes
MAX_FACTS = 4096  # bytes of a push's fields in front of its tensors


@dataclass(frozen=True)
class RecoveryResult:
    """Outcome of a recovery: the training clock, the Resume input to log, and what was recomputed."""

    now: float
    resume: Resume
    checkpoint: int | None
    pushes: int
    seconds: float
    incarnation: int  # the first that no worker has used, undone records included
    skip: SkipBatch | None = None  # the batch that ended the run, if it is to be passed over

    def resume_on(self, server: Server, config: RunConfig, brings_own: bool, report: Report) -> Resume:
        """The Resume input for a runtime that brings workers their own states, or does not.

        All workers with work left get theirs, or none does; that the optimizers of local steps begin anew is reported.
        """
        at_work = {worker for worker, member in server.members.items() if not member.inactive}
        if brings_own and at_work and at_work <= server.own_states.keys():
            return replace(self.resume, keeps=True)
        server.own_states = {}
        if server.version and keeps_own(config):
            report({"kind": "note", "text": "the optimizers of the workers' local steps begin anew, without a state"})
        return self.resume


class PushValues:
    """Keeps the values of a script's pushes (`--durable`): only the script could compute them again.

    Each segment begins at a checkpoint and is named after the length of the log there.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, log_nbytes: int) -> None:
        self._folder, self._files = folder, SegmentWriter(folder.path, SEGMENT_NAME)
        self._is_kept = config.durable and is_script(config)
        if self._is_kept:
            self._files.begin(log_nbytes)
        elif is_script(config):
            self.close(remove=True)  # a recovery needs the values of all pushes since the checkpoint

    def append(self, message: Input) -> None:
        """Hand a push to the operating system, before the server takes it and before its log record is written."""
        if self._is_kept and isinstance(message, Push):
            tensors = [value for value in message if isinstance(value, Tensor)]
            self._files.append([memoryview(_facts_of(message)), *map(view, tensors)])

    def sync(self) -> None:
        """Block until all pushes are on disk. Sync them before the log: then every synced record has its values."""
        self._files.sync()

    def begin_segment(self, log_nbytes: int) -> None:
        """Begin a segment at a checkpoint, and remove those that no checkpoint on disk needs."""
        if self._is_kept:
            self._files.begin(log_nbytes)
            self._files.remove_before(min(log_offsets(self._folder.checkpoints), default=0))

    def close(self, remove: bool = False) -> None:
        """Keep no more pushes; remove all segments if the run is over, or goes on without them."""
        self._is_kept = False
        self._files.close()
        for path in segments(self._folder.path, SEGMENT_NAME) if remove else ():
            path.unlink(missing_ok=True)


def _facts_of(push: Push) -> bytes:
    """The fields of a push as one line of JSON; of a tensor its type and length."""
    facts = push._asdict()
    for name, value in facts.items():
        if isinstance(value, Tensor):
            facts[name] = [str(value.dtype).removeprefix("torch."), value.numel()]
    return to_json({**facts, "loss": repr(push.loss)}).encode() + b"\n"  # JSON has no NaN


class KeptPushes:
    """What `PushValues` has kept, by worker, incarnation, optimizer and number of the push."""

    def __init__(self, folder: RunFolder) -> None:
        self._entries: dict[tuple[int, int, int, int], tuple[dict[str, Any], memoryview]] = {}
        for path in segments(folder.path, SEGMENT_NAME):
            for entry in read_segment(path):
                end = bytes(entry[:MAX_FACTS]).index(b"\n")
                facts = from_json(bytes(entry[:end]))
                key = facts["worker"], facts["incarnation"], facts["optimizer"], facts["seq"]
                self._entries[key] = facts, entry[end + 1 :]

    def __contains__(self, record: Record) -> bool:
        return (record.worker, record.incarnation, record.optimizer, record.seq) in self._entries

    def push(self, worker: int, incarnation: int, optimizer: int, seq: int) -> Push | None:
        """Read one push; None if it is not there."""
        found = self._entries.get((worker, incarnation, optimizer, seq))
        if found is None:
            return None
        facts, at, fields = found[0], 0, {}
        for name, value in facts.items():
            if isinstance(value, list):
                dtype = getattr(torch, value[0])
                nbytes = dtype.itemsize * value[1]
                content = bytearray(found[1][at : at + nbytes])
                fields[name] = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
                at += nbytes
        return Push(**{**facts, "loss": float(facts["loss"]), **fields})

    def sources(self, sizes: BufferSizes) -> MakePushSource:
        """Make the sources of a replay, with memories of these sizes."""
        return lambda join: KeptPushSource(self, join, WorkerBuffers.private(sizes))


class KeptPushSource:
    """A worker of a replay whose pushes were kept."""

    def __init__(self, kept: KeptPushes, join: Join, memory: WorkerBuffers) -> None:
        self._kept, self.join, self.memory = kept, join, memory
        self.pending: Reply | None = None

    def push(self) -> Push | None:
        """The push that answers the pending reply; None if it was not kept."""
        assert self.pending is not None
        reply, self.pending = self.pending, None
        return self._kept.push(self.join.worker, self.join.incarnation, reply.optimizer, reply.serial)

    def load_state(self, local_state: Tensor) -> None:
        """Never called: a script keeps its own state to itself."""
        raise AssertionError("a script keeps its own state to itself")


def kept_pushes(config: RunConfig, folder: RunFolder, report: Report) -> KeptPushes | None:
    """The pushes since the newest checkpoint; None if they were not kept, or not all of them.

    A record at the end of the log whose values did not reach the disk was never acknowledged: it is cut off.
    """
    path = folder.arrivals_file
    if config.recovery != "log" or not segments(folder.path, SEGMENT_NAME) or not folder.has_log:
        return None
    kept, (checkpoint, _) = KeptPushes(folder), newest_checkpoint(folder.checkpoints, path.stat().st_size)
    log = scan_log(path, config, checkpoint.log_offset if checkpoint is not None else 0)
    pushes = [place for place in log.effective_indices if log.records[place].kind == "push"]
    missing = [place for place in pushes if log.records[place] not in kept]
    if missing and (log.behind or missing != pushes[-len(missing) :]):
        report(
            {"kind": "note", "text": f"{len(missing)} of the pushes in {folder.path}/{SEGMENT_NAME}-*.bin are damaged"}
        )
        return None
    if missing:
        report(
            {"kind": "note", "text": f"{path.name} ends in {len(missing)} pushes that were not acknowledged: ignored"}
        )
        os.truncate(path, log.begins + missing[0] * RECORD_BYTES)
    return kept


def rebuild(
    server: Server,
    make_worker: MakePushSource | None,
    model: NamedTensors,
    config: RunConfig,
    folder: RunFolder,
    report: Report,
) -> RecoveryResult:
    """Bring a fresh `server` to where the run resumes: the end of its log, or its newest checkpoint.

    Without `make_worker` the pushes of a script were not kept, and nobody can compute them: it is the checkpoint.
    A torn record at the end of the log was never acknowledged and is truncated. Snapshots since the checkpoint are
    taken again, including those the crash prevented.
    """
    began = time.perf_counter()
    skips, batch = config.recovery != "log" or make_worker is None, _batch_to_skip(config, folder, report)
    checkpoint = _newest_usable(config, folder, report, skips)
    log = _read_tail(config, folder, checkpoint, report, skips)
    before = torch.get_num_threads()
    if skips and checkpoint is not None:
        restore(server, checkpoint)
    effective = log.effective_records
    records = [] if skips else effective
    incarnation, _ = next_incarnation(folder.arrivals_file, config)
    if not on_ring(config):  # as the host's guard has learned from them
        server.guard = PushGuard(server.members, server.norms, server.updater, follows_log=True)
    replay = Replay(
        server, make_worker or _nobody, None if skips else checkpoint, ReplayThreads(config.threads or 1, before)
    )
    drop_snapshots_after(folder, checkpoint.version if checkpoint is not None else -1)
    resume = _undo(config, checkpoint, log, effective, report) if skips else Resume()
    pushes = sum(record.kind == "push" for record in records)
    if pushes:
        verb = "reading" if is_script(config) else "recomputing"
        report({"kind": "note", "text": f"{verb} {pushes} logged pushes since {_named(checkpoint)}"})
    writer = BackgroundWriter(background=False)
    snapshots = snapshots_of(config, folder, server, model, writer)
    replay.feed(records, lambda number: snapshots.take_if_due(server) if snapshots is not None else None)
    _report_failures(writer, report)
    torch.set_num_threads(before)
    if replay.mismatch is not None:
        first = f"first: worker {replay.mismatch.worker}'s push {replay.mismatch.push}"
        text = f"recomputed pushes differ from the logged ones on this machine ({first}): the run continues"
        report({"kind": "note", "text": text})
    if server.divergence is not None:
        ways = "--recovery checkpoint goes back to its newest checkpoint; or start a new run with a lower --lr"
        raise UserError(f"{folder.path} diverged at update {server.version}: {ways}")
    server.own_states = _saved_with(checkpoint) if skips and checkpoint is not None else replay.own_states()
    drop_best_after(folder, server.version)
    now = log.records[-1].now if log.records else (checkpoint.now if checkpoint is not None else 0.0)
    version = checkpoint.version if checkpoint is not None else None
    return RecoveryResult(now, resume, version, pushes, time.perf_counter() - began, incarnation, batch)


def _batch_to_skip(config: RunConfig, folder: RunFolder, report: Report) -> SkipBatch | None:
    """Return the batch that made a run diverge, if the user asked to pass over it."""
    if config.recovery != "skip-batch":
        return None
    require_feature(config, Feature.SKIP_BATCH, "--recovery skip-batch")
    if config.max_workers is not None:
        what = f"--max-workers {config.max_workers}: the resumed run divides the data again, into other batches"
        raise UserError(f"--recovery skip-batch: {what}; use --recovery checkpoint")
    result = folder.result() or {}
    if result.get("status") != "diverged":
        report({"kind": "note", "text": "no batch is passed over: the run did not diverge (--recovery skip-batch)"})
        return None
    if (found := result.get("divergence")) is None:
        why = "its weights overflowed, no single batch did it"
        raise UserError(f"--recovery skip-batch: {folder.path} names none: {why}; use --recovery checkpoint")
    return SkipBatch(int(found["worker"]), int(found["batch"]))


def _report_failures(writer: BackgroundWriter, report: Report) -> None:
    for what, error in writer.changes():
        if error is not None:
            report({"kind": "note", "text": f"{what} could not be rewritten ({error.strerror or error})"})


def _named(checkpoint: Checkpoint | None) -> str:
    return f"checkpoint {checkpoint.version}" if checkpoint is not None else "the start"


def _newest_usable(config: RunConfig, folder: RunFolder, report: Report, skips: bool) -> Checkpoint | None:
    """Return the newest readable checkpoint within the log; set newer ones aside."""
    nbytes = folder.arrivals_file.stat().st_size if folder.arrivals_file.exists() else None
    checkpoint, complaints = newest_checkpoint(folder.checkpoints, nbytes)
    for text in complaints:
        report({"kind": "note", "text": text})
    if complaints:
        set_aside(folder.checkpoints, checkpoint.version if checkpoint is not None else -1)
    if on_ring(config) and keeps_own(config) and not skips:
        return None  # its checkpoint has the local state of worker 0 only: recompute the others' from the whole log
    return checkpoint


def _read_tail(
    config: RunConfig, folder: RunFolder, checkpoint: Checkpoint | None, report: Report, skips: bool
) -> LogContents:
    """Return the log since the checkpoint; truncate the file after the last intact record."""
    path, start = folder.arrivals_file, checkpoint.log_offset if checkpoint is not None else 0
    log = scan_log(path, config, start) if skips else read_log(path, config, start)
    if log.behind:
        kept = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, kept)
        what = f"the next {log.torn} bytes are ignored, {kept.name} keeps them"
        report({"kind": "note", "text": f"{path.name} is damaged at byte {log.ends}: {what}"})
    elif log.torn:
        what = "a torn record" if log.torn < RECORD_BYTES else f"{log.torn} bytes without an intact record"
        report({"kind": "note", "text": f"{path.name} ends in {what}: ignored"})
    if log.torn:
        os.truncate(path, log.ends)
    return log


def _saved_with(checkpoint: Checkpoint) -> dict[int, Tensor]:
    """The workers' own states in a checkpoint."""
    return {int(worker): saved for kind in ("own.", "local_state.") for worker, saved in checkpoint.group(kind).items()}


def _nobody(join: Join) -> PushSource:
    raise AssertionError("only a script computes its pushes")


def _undo(
    config: RunConfig, checkpoint: Checkpoint | None, log: LogContents, effective: list[Record], report: Report
) -> Resume:
    """Return the Resume input that undoes the records since the checkpoint; report the number of lost pushes."""
    lost = sum(_lost(record) for record in (*effective, *log.behind))
    if lost:
        asked = f"--recovery {config.recovery}" if config.recovery != "log" else None
        why = asked or "only 'paceline run --durable' keeps the pushes of a script"
        what = f"{counted(lost, 'acknowledged push')} since {'is' if lost == 1 else 'are'} lost ({why})"
        report({"kind": "note", "text": f"continuing from {_named(checkpoint)}: {what}"})
    return Resume(len(log.records), lost)


def _lost(record: Record) -> int:
    """Return the number of pushes lost with a record: itself, or those an earlier resume had given up."""
    if record.kind == "resume":
        return record.reply
    return int(record.kind == "push" and record.disposition == Disposition.TAKEN)
