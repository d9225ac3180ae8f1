"""A run executed again from its log, in one process: the same Server, fed the same inputs, gives the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.core.messages import Input, Join, Outcome, Push, Reply, Verdict
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.errors import RunFailed
from paceline.runs.arrivals import Record
from paceline.runs.checkpoint import Cut, restore

MakeSeat = Callable[[Join], Seat]


class Replay:
    """Feeds logged inputs to a server; pushes are computed again by seats in this process."""

    def __init__(self, server: Server, make_seat: MakeSeat, cut: Cut | None = None) -> None:
        self.server = server
        self.seats: dict[int, Seat] = {}
        self._make_seat = make_seat
        if cut is not None:
            restore(server, cut)
            self._seat_the_living(cut)

    def _seat_the_living(self, cut: Cut) -> None:
        """Put every live worker back to where the cut found it: its weights, its state, its unanswered push."""
        sent, states = cut.group("sent."), cut.group("state.")
        for worker, member in self.server.members.items():
            if not member.live or member.done:
                continue
            seat = self._make_seat(Join(worker, member.incarnation, member.quota))
            seat.weights.copy_(sent[str(worker)])
            if str(worker) in states and member.seq >= 0:
                seat.state.copy_(states[str(worker)])
            if not member.waiting:
                seat.pending = Reply(worker, member.incarnation, member.serial, member.version, member.accepted)
            self.seats[worker] = seat

    def feed(self, records: Iterable[Record], progress: Callable[[int], None] | None = None) -> None:
        """Take the records in order; the first that comes out otherwise than logged is an error that names it."""
        for number, record in enumerate(records):
            message: Input
            if record.kind == "push":
                pushed = self._push(record, number)
                if pushed is None:
                    continue
                message = pushed
            else:
                message = record.message
            outcome = self.server.handle(message)
            if outcome.verdict != record.verdict:
                raise RunFailed(
                    f"replay departs from the log at record {number} (update {self.server.version}): worker "
                    f"{record.worker}'s {record.kind} was {record.verdict.name}, is now {outcome.verdict.name}"
                )
            if isinstance(message, Join) and outcome.verdict == Verdict.TAKEN:
                self.seats[record.worker] = self._make_seat(message)
            self._deliver(outcome)
            if progress is not None:
                progress(number)

    def _push(self, record: Record, number: int) -> Push | None:
        """The push of a record, computed again; None for one that changed nothing, then as now."""
        seat = self.seats.get(record.worker)
        pending = seat.pending if seat is not None and seat.join.incarnation == record.incarnation else None
        if pending is None or record.seq < pending.serial:
            if record.verdict in (Verdict.REPEATED, Verdict.REJECTED):
                return None  # seen before, or from nobody we know
            raise RunFailed(
                f"replay departs from the log at record {number}: worker {record.worker} had nothing to push"
            )
        if (record.seq, record.reply) != (pending.serial, pending.serial):
            raise RunFailed(
                f"replay departs from the log at record {number}: worker {record.worker} pushed {record.seq} "
                f"for reply {record.reply}, and is at {pending.serial}"
            )
        assert seat is not None
        return seat.push()

    def _deliver(self, outcome: Outcome) -> None:
        for reply in outcome.replies:
            seat = self.seats[reply.worker]
            self.server.weights_for(reply.worker, seat.weights)
            seat.pending = reply
