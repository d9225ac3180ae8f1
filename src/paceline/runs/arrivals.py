"""`arrivals.log`: every input that changed the server, in order, 36 bytes each, written before any reply leaves.

A header line names the format and the config; each record carries a checksum, so a torn tail is seen and left out.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunConfig, places_of, to_toml
from paceline.core.messages import Drain, Input, Join, Leave, Push, Resume, Steps, Stop, Verdict
from paceline.errors import UserError

_RECORD = struct.Struct("<BBHIIIIfd")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
_JOIN, _PUSH, _LEAVE, _STOP, _RESUME, _STEPS, _DRAIN = 1, 2, 3, 4, 5, 6, 7
_NO_QUOTA = 0xFFFFFFFF
_MAGIC = b"paceline arrivals 1 "


@dataclass(frozen=True, slots=True)
class Record:
    """One logged input. A push has no tensors here: they are computed again from its address."""

    kind: str
    worker: int
    incarnation: int
    seq: int
    reply: int
    samples: int
    loss: float
    now: float
    verdict: Verdict

    @property
    def message(self) -> Join | Leave | Steps | Drain | Stop | Resume:
        """The input itself, for all kinds but a push."""
        match self.kind:
            case "join":
                quota = None if self.seq == _NO_QUOTA else self.seq
                return Join(self.worker, self.incarnation, quota, threads=self.reply)
            case "leave":
                return Leave(self.worker, self.incarnation)
            case "steps":
                return Steps(self.worker, self.seq)
            case "drain":
                return Drain(self.worker)
            case "resume":
                return Resume()
        assert self.kind == "stop", self.kind
        return Stop()


def fingerprint(config: RunConfig) -> str:
    """A hash of all settings that shape a run, to tell a log that belongs to another config."""
    return hashlib.sha256(to_toml(config).encode()).hexdigest()[:16]


class ArrivalLog:
    """Appends records to the log."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.nbytes = os.fstat(self._fd).st_size
        if not self.nbytes:
            self.nbytes += os.write(self._fd, _MAGIC + fingerprint(config).encode() + b"\n")

    def append(self, message: Input, verdict: Verdict, now: float) -> None:
        """One record, handed to the system before this returns."""
        match message:
            case Push(worker, incarnation, seq, reply, samples, loss):
                fields = (_PUSH, verdict, worker, incarnation, seq, reply, samples, loss, now)
            case Join(worker, incarnation, quota, threads):
                amount = _NO_QUOTA if quota is None else quota
                fields = (_JOIN, verdict, worker, incarnation, amount, threads, 0, 0.0, now)
            case Leave(worker, incarnation):
                fields = (_LEAVE, verdict, worker, incarnation, 0, 0, 0, 0.0, now)
            case Steps(worker, steps):
                fields = (_STEPS, verdict, worker, 0, steps, 0, 0, 0.0, now)
            case Drain(worker):
                fields = (_DRAIN, verdict, worker, 0, 0, 0, 0, 0.0, now)
            case Stop():
                fields = (_STOP, verdict, 0, 0, 0, 0, 0, 0.0, now)
            case Resume():
                fields = (_RESUME, verdict, 0, 0, 0, 0, 0, 0.0, now)
        record = _RECORD.pack(*fields)
        written = os.write(self._fd, record + _CHECK.pack(zlib.crc32(record)))
        if written != RECORD_BYTES:
            os.truncate(self._fd, self.nbytes)
            raise OSError(28, "No space left on device")
        self.nbytes += written

    def close(self) -> None:
        os.close(self._fd)


_KINDS = {_JOIN: "join", _PUSH: "push", _LEAVE: "leave", _STOP: "stop", _RESUME: "resume", _STEPS: "steps"}
_KINDS[_DRAIN] = "drain"
_VERDICTS = frozenset(Verdict)


@dataclass(frozen=True)
class Log:
    """What a log file holds: its whole records, the bytes they begin and end at, and how many bytes lie behind."""

    records: list[Record]
    begins: int
    ends: int
    torn: int


def read_log(path: Path, config: RunConfig, start: int = 0) -> Log:
    """The records from byte `start` on. A torn record at the end is left out; a log damaged elsewhere is refused."""
    log = _read(path, config, start)
    if log.torn >= RECORD_BYTES:
        raise UserError(
            f"{path} is damaged at byte {log.ends}, with {log.torn} bytes behind it, which no crash does: "
            "nothing was changed"
        )
    return log


def read_arrivals(path: Path, config: RunConfig, start: int = 0) -> tuple[list[Record], int]:
    """All whole records from byte `start` on, and the length of the good part of the file."""
    log = _read(path, config, start)
    return log.records, log.ends


def _read(path: Path, config: RunConfig, start: int) -> Log:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: this run has no log to replay") from None
    header = _check_header(path, content, config)
    if start > len(content):
        raise UserError(
            f"{path} has {len(content)} bytes, the checkpoint was taken at byte {start}: the log lost its end; "
            "remove that checkpoint to go on from an older one"
        )
    records: list[Record] = []
    begins = offset = max(start, header)
    while offset + RECORD_BYTES <= len(content):
        body = content[offset : offset + _RECORD.size]
        (check,) = _CHECK.unpack_from(content, offset + _RECORD.size)
        if zlib.crc32(body) != check:
            break
        records.append(_record(body, path, offset, config))
        offset += RECORD_BYTES
    return Log(records, begins, offset, len(content) - offset)


def _check_header(path: Path, content: bytes, config: RunConfig) -> int:
    """The length of the header line, which must be of this format and of this config."""
    if not content:
        raise UserError(f"{path} is empty: the run never started, or its log was lost")
    length = content.find(b"\n") + 1
    header = content[:length]
    if not header.startswith(_MAGIC):
        raise UserError(f"{path} is not an arrivals log of this version ({_MAGIC.decode().strip()})")
    if header[len(_MAGIC) :].strip() != fingerprint(config).encode():
        raise UserError(f"{path} belongs to another config than the config.toml beside it")
    return length


def _record(body: bytes, path: Path, offset: int, config: RunConfig) -> Record:
    """A record whose checksum is right; what it says may still be from a later version, or about another run."""
    kind, verdict, worker, incarnation, seq, reply, samples, loss, now = _RECORD.unpack(body)
    if kind not in _KINDS or verdict not in _VERDICTS:
        what = f"kind {kind}" if kind not in _KINDS else f"verdict {verdict}"
        raise UserError(f"{path} holds a record of unknown {what} at byte {offset}: another version wrote it")
    if worker >= places_of(config):
        raise UserError(f"{path} names worker {worker} at byte {offset}, the config has {places_of(config)}")
    return Record(_KINDS[kind], worker, incarnation, seq, reply, samples, loss, now, Verdict(verdict))
