"""Replays a run from its log: the same server, fed the same inputs in the same order, gives the same weights."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Discard, Disposition, Input, Join, Push, Reply, Resume
from paceline.core.server import Server
from paceline.errors import RunFailed
from paceline.runs.arrival_log import Record
from paceline.runs.checkpoint import Checkpoint, restore, settled_state, weights_and_rule


class PushSource(Protocol):
    """Recomputes the pushes of one worker: a `LocalWorker` in this process, or a script in another."""

    join: Join
    memory: WorkerBuffers
    pending: Reply | None

    def push(self) -> Push | None: ...

    def load_state(self, local_state: Tensor) -> None: ...


MakePushSource = Callable[[Join], PushSource]


@dataclass(frozen=True)
class Mismatch:
    """The first difference between a replay and its run: the update, the push, and the value that differs."""

    update: int
    worker: int | None
    push: int | None
    what: str
    recorded: float | str
    replayed: float | str

    def row(self) -> dict[str, Any]:
        """Return JSON values, with NaN and infinity as strings."""
        fields = asdict(self).items()
        return {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields}


class ReplayThreads(NamedTuple):
    """Threads of a worker whose join record states none, and of the server."""

    worker: int
    server: int


class ReplayMismatch(RunFailed):
    """The replay cannot continue: the next record cannot happen here."""

    def __init__(self, text: str, mismatch: Mismatch) -> None:
        super().__init__(text)
        self.mismatch = mismatch


def same_float32(one: float, other: float) -> bool:
    """Return whether two numbers have the same bits as float32; all NaNs are equal.

    >>> same_float32(0.1, ctypes.c_float(0.1).value), same_float32(0.0, -0.0)
    (True, False)
    """
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return bytes(ctypes.c_float(one)) == bytes(ctypes.c_float(other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two float32 vectors have the same bits, NaNs included."""
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))


def recompute_push(
    server: Server,
    memories: Mapping[int, WorkerBuffers],
    make_source: MakePushSource | None,
    why_not: str,
    push: Push,
) -> Push | str:
    """Compute again what a worker has pushed, from the weights that it was sent; or return why that is impossible.

    The server calls this before it takes the push, so that the newest reply to the worker is the one it answers.
    """
    worker, member, memory = push.worker, server.members[push.worker], memories[push.worker]
    if make_source is None:
        return why_not
    if server.codecs.push is not None or memory.sizes.local_state:
        return "a push depends on the worker's earlier ones (error feedback, or an optimizer in the worker)"
    held = server.differences.held if server.differences is not None else {}
    threads = torch.get_num_threads()
    try:
        with torch.inference_mode(False):
            source = make_source(Join(worker, member.incarnation, member.quota, member.threads))
            source.memory.weights.copy_(held.get(worker, memory.weights))
            if worker in server.worker_states:
                source.memory.state.copy_(server.worker_states[worker])
            source.pending = server.last_answer(worker)
            torch.set_num_threads(member.threads or threads)
            again = source.push()
    except Exception as error:  # a user's task may raise anything, and the push decides without it
        return f"{type(error).__name__} in the attempt"
    finally:
        torch.set_num_threads(threads)
    assert again is not None, "the newest reply of a worker that pushes is not its last"
    return again


def _ignore(reply: Reply) -> None:
    """Do nothing: a worker in this process finds its reply in `pending`."""


class Replay:
    """Feeds logged inputs to a server; the sources from `make_source` recompute the pushes.

    `mismatch` holds the first difference. `compare_with` holds the run's checkpoints by the number of records before
    them. With `threads`, pushes and updates use as many threads as in the run, because some sums depend on it.
    """

    def __init__(
        self,
        server: Server,
        make_source: MakePushSource,
        checkpoint: Checkpoint | None = None,
        threads: ReplayThreads | None = None,
        send: Callable[[Reply], None] = _ignore,
        compare_with: Mapping[int, Checkpoint] | None = None,
    ) -> None:
        self.server, self.fed = server, 0
        self.sources: dict[int, PushSource] = {}
        self.mismatch: Mismatch | None = None
        self._make_source, self._send, self._threads = make_source, send, threads
        self._compare_with = compare_with or {}
        if checkpoint is not None:
            restore(server, checkpoint)
            self._restore_sources(checkpoint)

    def _restore_sources(self, checkpoint: Checkpoint) -> None:
        """Restore the source of every live worker: its weights, states and unanswered reply."""
        sent, states, local_state = map(checkpoint.group, ("sent.", "state.", "local_state."))
        for worker, member in self.server.members.items():
            if not member.live or member.inactive:
                continue
            source = self._make_source(Join(worker, member.incarnation, member.quota, member.threads))
            source.memory.weights.copy_(sent[str(worker)])
            if str(worker) in states and member.seq >= 0:
                source.memory.state.copy_(states[str(worker)])
            if str(worker) in local_state:
                source.load_state(local_state[str(worker)])
            self.sources[worker] = source
            if not member.waiting:
                source.pending = self.server.last_answer(worker)
                self._send(source.pending)

    def feed(
        self, records: Iterable[Record], progress: Callable[[int], None] | None = None, until: int | None = None
    ) -> None:
        """Apply the records in order, up to version `until`; raise if one cannot happen as logged."""
        for number, record in enumerate(records):
            if until is not None and self.server.version >= until:
                return
            self._apply(record, number)
            self.fed += 1
            if self.fed in self._compare_with:
                self._compare(self._compare_with[self.fed])
            if progress is not None:
                progress(number)

    def _apply(self, record: Record, number: int) -> None:
        message: Input | None = self._push(record, number) if record.kind == "push" else record.message
        if isinstance(message, Discard) and record.disposition == Disposition.TAKEN:
            self._compute_discarded(record)
        if message is None:
            return
        if isinstance(message, Resume):
            self.server.own_states = self.own_states() if message.keeps else {}
            self.sources.clear()
        version = self.server.version
        self._use_threads(self._threads and self._threads.server)
        outcome = self.server.handle(message)
        if outcome.disposition != record.disposition:
            was, now = record.disposition.name, outcome.disposition.name
            text = f"worker {record.worker}'s {record.kind} was {was}, is now {now}"
            raise self._mismatch_error(record, number, text, "verdict", was, now, version)
        if isinstance(message, Join) and outcome.disposition == Disposition.TAKEN:
            self.sources[record.worker] = self._make_source(message)
        for reply in outcome.replies:
            source = self.sources[reply.worker]
            self.server.send_weights(reply, source.memory)
            if not reply.optimizer:
                source.pending = reply
            self._send(reply)

    def own_states(self) -> dict[int, Tensor]:
        """What the workers' own states are at a resume, by worker."""
        found = dict(self.server.own_states)  # of workers that no reply has brought theirs since the last resume
        for worker, source in self.sources.items():
            saved = settled_state(self.server.members[worker], source.memory)
            if saved is not None and worker not in found:
                found[worker] = saved.clone()
        return found

    def _push(self, record: Record, number: int) -> Push | None:
        """Recompute the push of a record; return None for one that changed nothing in the run."""
        source = self.sources.get(record.worker)
        pending = source.pending if source is not None and source.join.incarnation == record.incarnation else None
        if record.optimizer:
            pending = self._pending_of(record)
        if pending is None or record.seq < pending.serial:
            if record.disposition in (Disposition.REPEATED, Disposition.REJECTED):
                return None  # a duplicate, or from an unknown worker
            raise self._no_push(record, number, f"worker {record.worker} had nothing to push")
        if (record.seq, record.reply) != (pending.serial, pending.serial):
            what = f"pushed {record.seq} for reply {record.reply}, but its reply is {pending.serial}"
            raise self._no_push(record, number, f"worker {record.worker} {what}")
        assert source is not None
        self._use_threads(self._threads and (source.join.threads or self._threads.worker))
        push = self._push_of(source, pending)
        if push is None:
            raise self._no_push(record, number, f"worker {record.worker} ended before its push {record.seq}")
        if (push.optimizer, push.seq, push.reply) != (record.optimizer, record.seq, record.reply):
            raise self._no_push(record, number, f"worker {record.worker} pushed {push.seq}, in the run {record.seq}")
        if push.samples != record.samples:
            self._record_mismatch(record, "samples", record.samples, push.samples)
        if not same_float32(push.loss, record.loss):
            self._record_mismatch(record, "loss", record.loss, push.loss)
        return push

    def _pending_of(self, record: Record) -> Reply | None:
        """The reply that a worker's push for one of several optimizers follows."""
        server = self.server.by_optimizer[record.optimizer]
        member = server.members.get(record.worker)
        is_due = member is not None and member.incarnation == record.incarnation and not member.waiting
        return server.last_answer(record.worker)._replace(optimizer=record.optimizer) if is_due else None

    @staticmethod
    def _push_of(source: PushSource, pending: Reply) -> Push | None:
        """Get the push that answers `pending`. One for a further optimizer leaves the first's reply unanswered."""
        first, source.pending = source.pending, pending
        push = source.push()
        if pending.optimizer:
            source.pending = first
        return push

    def _compute_discarded(self, record: Record) -> None:
        """Compute a push that its run discarded: the worker's own state goes on from there, and is taken back."""
        source = self.sources[record.worker]
        self._use_threads(self._threads and (source.join.threads or self._threads.worker))
        if source.pending is not None:
            source.push()

    def _record_mismatch(self, record: Record, what: str, recorded: float, replayed: float) -> None:
        if self.mismatch is None:
            self.mismatch = Mismatch(self.server.version, record.worker, record.seq, what, recorded, replayed)

    def _no_push(self, record: Record, number: int, text: str) -> ReplayMismatch:
        return self._mismatch_error(record, number, text, "push", "made", "missing", self.server.version)

    def _mismatch_error(
        self, record: Record, number: int, text: str, what: str, recorded: str, replayed: str, version: int
    ) -> ReplayMismatch:
        seq = record.seq if record.kind == "push" else None
        mismatch = Mismatch(version, record.worker, seq, what, recorded, replayed)
        self.mismatch = self.mismatch or mismatch
        return ReplayMismatch(f"replay differs from the log at record {number} (update {version}): {text}", mismatch)

    def _compare(self, checkpoint: Checkpoint) -> None:
        """Compare the server with a checkpoint taken at this point of the log."""
        version, here, there = self.server.version, weights_and_rule(self.server), checkpoint.tensors
        same = checkpoint.version == version and here.keys() <= there.keys()
        same = same and all(same_bits(tensor, there[name]) for name, tensor in here.items())
        if self.mismatch is None and not same:
            recorded = f"those of checkpoint {checkpoint.version}"
            self.mismatch = Mismatch(version, None, None, "weights", recorded, "others")

    @staticmethod
    def _use_threads(count: int | None) -> None:
        if count and torch.get_num_threads() != count:
            torch.set_num_threads(count)
