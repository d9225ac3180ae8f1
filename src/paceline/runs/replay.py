"""A run executed again from its log, in one process: the same Server, fed the same inputs, gives the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.core.messages import Input, Join, Outcome, Push, Reply
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
            if str(worker) in states:
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
                if isinstance(message, Join):
                    self.seats[record.worker] = self._make_seat(message)
            outcome = self.server.handle(message)
            if outcome.verdict != record.verdict:
                raise RunFailed(
                    f"replay departs from the log at record {number} (update {self.server.version}): worker "
                    f"{record.worker}'s {record.kind} was {record.verdict.name}, is now {outcome.verdict.name}"
                )
            self._deliver(outcome)
            if progress is not None:
                progress(number)

    def _push(self, record: Record, number: int) -> Push | None:
        seat = self.seats.get(record.worker)
        if seat is None or seat.join.incarnation != record.incarnation or seat.pending is None:
            return None  # a push from nobody we know, or seen before: it changed nothing then either
        push = seat.push()
        if push is None or (push.seq, push.reply) != (record.seq, record.reply):
            raise RunFailed(f"replay departs from the log at record {number}: it holds push {record.seq}, not {push}")
        return push

    def _deliver(self, outcome: Outcome) -> None:
        for reply in outcome.replies:
            seat = self.seats[reply.worker]
            self.server.weights_for(reply.worker, seat.weights)
            seat.pending = reply
