"""`arrivals.log`: every input of the server in order, one 36-byte record with a checksum each, before the reply.

A header line names the format and the config. Records that a resume undid stay in the file and no longer count.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from paceline.config import UPKEEP, RunConfig, max_workers_of, to_toml
from paceline.core import messages
from paceline.core.messages import (
    Discard,
    Disposition,
    Drain,
    EstimatedStatistics,
    Expel,
    GuardInput,
    Join,
    Leave,
    OwnLoopInput,
    Push,
    ReadOptimizer,
    ReadWeights,
    Resume,
    SetLocalSteps,
    SkipBatch,
    Stop,
)
from paceline.errors import UserError
from paceline.runs.durable_files import sync_folder

_RECORD = struct.Struct("<BBHIIIIfd")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
_JOIN, _PUSH, _LEAVE, _STOP, _RESUME, _STEPS, _DRAIN = range(1, 8)
_READ, _STATISTICS, _EXPEL, _DISCARD, _SKIP, _OPTIMIZER = range(9, 15)
_PUSH_OF = 128  # plus the number of the optimizer, if that is not the first
_NO_QUOTA = 0xFFFFFFFF
PUSH_KIND, RESUME_KIND = _PUSH, _RESUME  # record kinds as the first byte of a record stores them
MAGIC = b"paceline arrivals 1 "
MAX_HEADER = 200


@dataclass(frozen=True, slots=True)
class Record:
    """One logged input. A push record holds no tensors: a replay recomputes them."""

    kind: str
    worker: int
    incarnation: int
    seq: int
    reply: int
    samples: int
    loss: float
    now: float
    disposition: Disposition
    optimizer: int = 0

    @property
    def message(self) -> Join | Leave | GuardInput | SetLocalSteps | OwnLoopInput | Drain | Stop | Resume:
        """The input itself; for every kind but a push."""
        match self.kind:
            case "join":
                quota = None if self.seq == _NO_QUOTA else self.seq
                return Join(self.worker, self.incarnation, quota, self.reply, bool(self.samples))
            case "leave":
                return Leave(self.worker, self.incarnation, bool(self.seq), bool(self.reply))
            case "expel" | "discard" | "skip":
                return self._guard_input
            case "steps":
                return SetLocalSteps(self.worker, self.seq)
            case "read":
                return ReadWeights(self.worker, bool(self.seq))
            case "optimizer":
                return ReadOptimizer(self.worker, self.seq)
            case "statistics":
                return EstimatedStatistics(self.worker, self.samples)
            case "drain":
                return Drain(self.worker)
            case "resume":
                return Resume(undone=self.seq, lost=self.reply, keeps=bool(self.samples))
        assert self.kind == "stop", self.kind
        return Stop()

    @property
    def _guard_input(self) -> GuardInput:
        if self.kind == "expel":
            return Expel(self.worker, self.incarnation)
        if self.kind == "discard":
            return Discard(self.worker, self.incarnation, self.seq)
        return SkipBatch(self.worker, self.seq)


def fingerprint(config: RunConfig) -> str:
    """Return a hash of all settings that shape a run, to detect a log of another config."""
    return hashlib.sha256(to_toml(config, left_out=UPKEEP).encode()).hexdigest()[:16]


class ArrivalLog:
    """Appends records to the log."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._failure: OSError | None = None
        self.nbytes = os.fstat(self._fd).st_size
        if not self.nbytes:
            try:
                self._write(MAGIC + fingerprint(config).encode() + b"\n")
                self.sync()
                sync_folder(path.parent)
            except OSError:
                self.close()
                raise

    def append(self, message: messages.Input, disposition: Disposition, now: float) -> None:
        """Append one record and hand it to the operating system before returning."""
        match message:
            case Push(worker, incarnation, seq, reply, samples, loss):
                kind = _PUSH if not message.optimizer else _PUSH_OF + message.optimizer
                fields = (kind, disposition, worker, incarnation, seq, reply, samples, loss, now)
            case Join(worker, incarnation, quota, threads, own_loop):
                amount = _NO_QUOTA if quota is None else quota
                fields = (_JOIN, disposition, worker, incarnation, amount, threads, own_loop, 0.0, now)
            case Leave(worker, incarnation, done, returns):
                fields = (_LEAVE, disposition, worker, incarnation, int(done), int(returns), 0, 0.0, now)
            case Expel() | Discard() | SkipBatch():
                kind, incarnation, seq = _guard_fields(message)
                fields = (kind, disposition, message.worker, incarnation, seq, 0, 0, 0.0, now)
            case SetLocalSteps(worker, steps):
                fields = (_STEPS, disposition, worker, 0, steps, 0, 0, 0.0, now)
            case ReadWeights() | ReadOptimizer() | EstimatedStatistics():
                kind, seq, samples = _own_loop_fields(message)
                fields = (kind, disposition, message.worker, 0, seq, 0, samples, 0.0, now)
            case Drain(worker):
                fields = (_DRAIN, disposition, worker, 0, 0, 0, 0, 0.0, now)
            case Stop():
                fields = (_STOP, disposition, 0, 0, 0, 0, 0, 0.0, now)
            case Resume(undone, lost, keeps):
                fields = (_RESUME, disposition, 0, 0, undone, lost, int(keeps), 0.0, now)
        record = _RECORD.pack(*fields)
        self._write(record + _CHECK.pack(zlib.crc32(record)))

    def _write(self, content: bytes) -> None:
        """Append all of `content`, or nothing."""
        written = os.write(self._fd, content)
        if written != len(content):
            os.truncate(self._fd, self.nbytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.nbytes += written

    def sync(self) -> None:
        """Block until all appended records are on disk. The system reports a failed sync once, so remember it."""
        if self._failure is not None:
            raise self._failure
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._failure = error
            raise

    def close(self) -> None:
        os.close(self._fd)


def _own_loop_fields(message: OwnLoopInput) -> tuple[int, int, int]:
    """The kind, seq and samples of a record."""
    match message:
        case ReadWeights(_, final):
            return _READ, int(final), 0
        case ReadOptimizer(_, optimizer):
            return _OPTIMIZER, optimizer, 0
        case EstimatedStatistics(_, samples):
            return _STATISTICS, 0, samples


def _guard_fields(message: GuardInput) -> tuple[int, int, int]:
    """The kind, incarnation and seq of a record."""
    match message:
        case Expel(_, incarnation):
            return _EXPEL, incarnation, 0
        case Discard(_, incarnation, seq):
            return _DISCARD, incarnation, seq
        case SkipBatch(_, batch):
            return _SKIP, 0, batch


_KINDS = {_JOIN: "join", _PUSH: "push", _LEAVE: "leave", _STOP: "stop", _RESUME: "resume", _STEPS: "steps"}
_KINDS |= {_DRAIN: "drain", _READ: "read", _STATISTICS: "statistics", _OPTIMIZER: "optimizer"}
_KINDS |= {_EXPEL: "expel", _DISCARD: "discard", _SKIP: "skip"}
_VERDICTS = frozenset(Disposition)
SEARCH_NBYTES = 1 << 16  # how far after a damaged byte to search for records at shifted offsets


@dataclass(frozen=True)
class LogContents:
    """Contents of a log file: its intact records, their byte range, and the bytes after them."""

    records: list[Record]
    begins: int
    ends: int
    torn: int  # bytes after the last intact record
    behind: list[Record]
    """Intact records among these bytes: none after a crash, some if the file was damaged in the middle."""

    @property
    def effective_indices(self) -> list[int]:
        """Indices of the records that count: all but those that a later resume undid."""
        kept: list[int] = []
        for place, record in enumerate(self.records):
            if record.kind == "resume":
                while kept and kept[-1] >= place - record.seq:
                    kept.pop()
            kept.append(place)
        return kept

    @property
    def effective_records(self) -> list[Record]:
        """The records that count."""
        return [self.records[place] for place in self.effective_indices]


def read_log(path: Path, config: RunConfig, start: int = 0, way_on: str | None = None) -> LogContents:
    """Read the records from byte `start` on; ignore a torn tail, and refuse a log damaged elsewhere.

    `way_on` ends the error; by default it is how to resume the run.
    """
    log = scan_log(path, config, start)
    if log.behind:
        resume = f"nothing was changed; 'paceline resume {path.parent} --recovery checkpoint' continues without them"
        where = f"{path} is damaged at byte {log.ends}, before {len(log.behind)} intact records, so not by a crash"
        raise UserError(f"{where}: {way_on or resume}")
    return log


def read_arrivals(path: Path, config: RunConfig, start: int = 0) -> tuple[list[Record], int]:
    """Return all intact records from byte `start` on, and the length of the intact part of the file."""
    log = scan_log(path, config, start)
    return log.records, log.ends


def next_incarnation(path: Path, config: RunConfig) -> tuple[int, float]:
    """Return the incarnation for the workers of a resumed run, and the last time of its training clock."""
    content, header = _open(path, config)
    incarnation, now = 0, 0.0
    for at in range(header, len(content) - RECORD_BYTES + 1, RECORD_BYTES):
        if content[at] == _JOIN and _is_whole(content, at):
            incarnation = max(incarnation, _record(content, at, path, config).incarnation)
    for at in range(header + (len(content) - header) // RECORD_BYTES * RECORD_BYTES, header, -RECORD_BYTES):
        if _is_whole(content, at - RECORD_BYTES):
            now = _record(content, at - RECORD_BYTES, path, config).now
            break
    return incarnation + 1, now


def has_push(path: Path) -> bool:
    """Return whether a log holds a push, or is damaged and may have held one; without one nothing was trained."""
    content = path.read_bytes() if path.exists() else b""
    header = content.find(b"\n") + 1
    if len(content) > MAX_HEADER and not header:
        return True
    places = range(header, len(content) - RECORD_BYTES + 1, RECORD_BYTES) if header else ()
    return any(content[at] == _PUSH or content[at] >= _PUSH_OF or not _is_whole(content, at) for at in places)


def scan_log(path: Path, config: RunConfig, start: int = 0) -> LogContents:
    """Like `read_log`, but return a damaged log instead of refusing it."""
    content, header = _open(path, config)
    if start > len(content):
        raise UserError(
            f"{path} has {len(content)} bytes, the checkpoint was taken at byte {start}: the end of the log is "
            "missing; remove that checkpoint to continue from an older one"
        )
    begins = ends = max(start, header)
    while _is_whole(content, ends):
        ends += RECORD_BYTES
    records = [_record(content, at, path, config) for at in range(begins, ends, RECORD_BYTES)]
    behind = [_record(content, at, path, config) for at in _whole_behind(content, ends)]
    return LogContents(records, begins, ends, len(content) - ends, behind)


def _is_whole(content: bytes, at: int) -> bool:
    """Return whether a record with a valid checksum starts at byte `at`."""
    if at + RECORD_BYTES > len(content):
        return False
    check = int.from_bytes(content[at + _RECORD.size : at + RECORD_BYTES], "little")
    return zlib.crc32(content[at : at + _RECORD.size]) == check


def _whole_behind(content: bytes, damage: int) -> list[int]:
    """Return the offsets of intact records after the damage: at the record stride, or shifted if bytes were lost."""
    found = [at for at in range(damage, len(content), RECORD_BYTES) if _is_whole(content, at)]
    moved = range(damage, min(damage + SEARCH_NBYTES, len(content)))
    first = next((at for at in moved if _is_whole(content, at)), None) if not found else None
    if first is None:
        return found
    return [at for at in range(first, len(content), RECORD_BYTES) if _is_whole(content, at)]


def _open(path: Path, config: RunConfig) -> tuple[bytes, int]:
    """Return the file's bytes and the length of its header line; refuse another format or another config."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: this run has no log to replay") from None
    if not content:
        raise UserError(
            f"{path} is empty: the run never started, or its log is lost; "
            f"'paceline train {path.parent / 'config.toml'} --name NAME' starts it again"
        )
    length = content.find(b"\n") + 1
    if not content[:length].startswith(MAGIC):
        raise UserError(f"{path} is not an arrivals log of this version ({MAGIC.decode().strip()})")
    require_same_config(path, config)
    return content, length


def require_same_config(path: Path, config: RunConfig) -> None:
    """Refuse a config other than the one that the log was made with; a log that is not there knows none."""
    try:
        with path.open("rb") as file:
            header = file.readline(MAX_HEADER)
    except FileNotFoundError:
        return
    if header.startswith(MAGIC) and header.endswith(b"\n") and header[len(MAGIC) : -1] != fingerprint(config).encode():
        raise UserError(
            f"{path} belongs to another config than the config.toml beside it: one of them was changed or is damaged"
        )


def _record(content: bytes, offset: int, path: Path, config: RunConfig) -> Record:
    """Parse a record with a valid checksum; refuse an unknown kind (another version) or worker (another run)."""
    kind, disposition, worker, incarnation, seq, reply, samples, loss, now = _RECORD.unpack_from(content, offset)
    optimizer = max(0, kind - _PUSH_OF)
    kind = _PUSH if optimizer else kind
    if kind not in _KINDS or disposition not in _VERDICTS:
        what = f"kind {kind}" if kind not in _KINDS else f"verdict {disposition}"
        raise UserError(f"{path} holds a record of unknown {what} at byte {offset}: another version wrote it")
    if worker >= max_workers_of(config):
        raise UserError(f"{path} names worker {worker} at byte {offset}, the config has {max_workers_of(config)}")
    fields = worker, incarnation, seq, reply, samples, loss, now, Disposition(disposition), optimizer
    return Record(_KINDS[kind], *fields)
