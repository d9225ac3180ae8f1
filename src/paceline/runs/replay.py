"""A run executed again from its log: the same Server, fed the same inputs in the same order, gives the same weights."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.buffers import Memory
from paceline.core.messages import Input, Join, Outcome, Push, Reply, Verdict
from paceline.core.server import Server
from paceline.errors import RunFailed
from paceline.runs.arrival_log import Record
from paceline.runs.checkpoint import Cut, restore


class Chair(Protocol):
    """Where pushes are computed again: a Seat in this process, or a script in another."""

    join: Join
    memory: Memory
    pending: Reply | None

    def push(self) -> Push | None: ...

    def recall(self, own: Tensor) -> None: ...


MakeSeat = Callable[[Join], Chair]


@dataclass(frozen=True)
class Departure:
    """Where a replay first came out otherwise than the run: at which update, in which push, and in what."""

    update: int
    worker: int | None
    push: int | None
    what: str
    recorded: float | str
    replayed: float | str

    def row(self) -> dict[str, Any]:
        """As JSON values, which know no NaN."""
        numbers = {name: str(value) for name, value in asdict(self).items() if _is_odd(value)}
        return {**asdict(self), **numbers}


class Threads(NamedTuple):
    """How many threads a worker computes on whose join did not say, and how many the server."""

    worker: int
    server: int


class Departed(RunFailed):
    """A replay that cannot go on: what the log says next cannot happen here."""

    def __init__(self, text: str, departure: Departure) -> None:
        super().__init__(text)
        self.departure = departure


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def same_float32(one: float, other: float) -> bool:
    """Whether two numbers have the same bits as float32; every NaN is the same.

    >>> same_float32(0.1, ctypes.c_float(0.1).value), same_float32(0.0, -0.0)
    (True, False)
    """
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return bytes(ctypes.c_float(one)) == bytes(ctypes.c_float(other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two float32 vectors are the same, NaNs included."""
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))


class Replay:
    """Feeds logged inputs to a server; pushes are computed again by `make_seat`'s seats.

    The first thing that comes out otherwise is kept in `departure`. `marks` are the run's checkpoints, by the number
    of records before them. With `threads`, pushes and updates each use as many as in the run: some sums depend on it.
    """

    def __init__(
        self,
        server: Server,
        make_seat: MakeSeat,
        cut: Cut | None = None,
        threads: Threads | None = None,
        send: Callable[[Reply], None] = lambda reply: None,  # a worker of this process has it in `pending`
        marks: Mapping[int, Cut] | None = None,
    ) -> None:
        self.server = server
        self.seats: dict[int, Chair] = {}
        self.departure: Departure | None = None
        self.fed = 0
        self._make_seat, self._send = make_seat, send
        self._threads = threads
        self._marks = marks or {}
        if cut is not None:
            restore(server, cut)
            self._seat_the_living(cut)

    def _seat_the_living(self, cut: Cut) -> None:
        """Put every live worker back to where the cut found it: weights, states, its unanswered push."""
        sent, states, own = cut.group("sent."), cut.group("state."), cut.group("own.")
        for worker, member in self.server.members.items():
            if not member.live or member.done:
                continue
            seat = self._make_seat(Join(worker, member.incarnation, member.quota, member.threads))
            seat.memory.weights.copy_(sent[str(worker)])
            if str(worker) in states and member.seq >= 0:
                seat.memory.state.copy_(states[str(worker)])
            if str(worker) in own:
                seat.recall(own[str(worker)])
            self.seats[worker] = seat
            if not member.waiting:
                seat.pending = self.server.last_answer(worker)
                self._send(seat.pending)

    def feed(
        self, records: Iterable[Record], progress: Callable[[int], None] | None = None, until: int | None = None
    ) -> None:
        """Take the records in order, up to version `until`; what cannot happen as logged is an error that names it."""
        for number, record in enumerate(records):
            if until is not None and self.server.version >= until:
                return
            self._take(record, number)
            self.fed += 1
            if self.fed in self._marks:
                self._compare(self._marks[self.fed])
            if progress is not None:
                progress(number)

    def _take(self, record: Record, number: int) -> None:
        message: Input
        if record.kind == "push":
            pushed = self._push(record, number)
            if pushed is None:
                return
            message = pushed
        else:
            message = record.message
        version = self.server.version
        self._use_threads(self._threads and self._threads.server)
        outcome = self.server.handle(message)
        if outcome.verdict != record.verdict:
            was, now = record.verdict.name, outcome.verdict.name
            text = f"worker {record.worker}'s {record.kind} was {was}, is now {now}"
            raise self._departed(record, number, text, "verdict", was, now, version)
        if isinstance(message, Join) and outcome.verdict == Verdict.TAKEN:
            self.seats[record.worker] = self._make_seat(message)
        self._deliver(outcome)

    def _push(self, record: Record, number: int) -> Push | None:
        """The push of a record, computed again; None for one that changed nothing, then as now."""
        seat = self.seats.get(record.worker)
        pending = seat.pending if seat is not None and seat.join.incarnation == record.incarnation else None
        if pending is None or record.seq < pending.serial:
            if record.verdict in (Verdict.REPEATED, Verdict.REJECTED):
                return None  # seen before, or from nobody we know
            raise self._no_push(record, number, f"worker {record.worker} had nothing to push")
        if (record.seq, record.reply) != (pending.serial, pending.serial):
            place = f"for reply {record.reply}, and is at {pending.serial}"
            raise self._no_push(record, number, f"worker {record.worker} pushed {record.seq} {place}")
        assert seat is not None
        self._use_threads(self._threads and (seat.join.threads or self._threads.worker))
        push = seat.push()
        if push is None:
            raise self._no_push(record, number, f"worker {record.worker} ended where its push {record.seq} was due")
        if (push.seq, push.reply) != (record.seq, record.reply):
            raise self._no_push(record, number, f"worker {record.worker} pushed {push.seq}, in the run {record.seq}")
        if push.samples != record.samples:
            self._note(record, "samples", record.samples, push.samples)
        if not same_float32(push.loss, record.loss):
            self._note(record, "loss", record.loss, push.loss)
        return push

    def _note(self, record: Record, what: str, recorded: float, replayed: float) -> None:
        if self.departure is None:
            self.departure = Departure(self.server.version, record.worker, record.seq, what, recorded, replayed)

    def _no_push(self, record: Record, number: int, text: str) -> Departed:
        return self._departed(record, number, text, "push", "made", "not to be had", self.server.version)

    def _departed(
        self, record: Record, number: int, text: str, what: str, recorded: str, replayed: str, version: int
    ) -> Departed:
        seq = record.seq if record.kind == "push" else None
        departure = Departure(version, record.worker, seq, what, recorded, replayed)
        self.departure = self.departure or departure
        return Departed(f"replay departs from the log at record {number} (update {version}): {text}", departure)

    def _compare(self, cut: Cut) -> None:
        """Against a checkpoint of the run, when the log has come to where it was taken."""
        version = self.server.version
        here = {"weights": self.server.weights, **{f"rule.{k}": t for k, t in self.server.rule_state.items()}}
        same = cut.version == version and all(
            name in cut.tensors and same_bits(tensor, cut.tensors[name]) for name, tensor in here.items()
        )
        if self.departure is None and not same:
            recorded = f"those of checkpoint {cut.version}"
            self.departure = Departure(version, None, None, "weights", recorded, "others")

    def _deliver(self, outcome: Outcome) -> None:
        for reply in outcome.replies:
            seat = self.seats[reply.worker]
            self.server.hand_out(reply, seat.memory)
            seat.pending = reply
            self._send(reply)

    @staticmethod
    def _use_threads(count: int | None) -> None:
        if count and torch.get_num_threads() != count:
            torch.set_num_threads(count)
