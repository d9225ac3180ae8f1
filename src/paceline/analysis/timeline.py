"""What every worker did when, from a run's log alone.

The log has every input of the server; fed to the same server without weights it says whom each input set free. What
lies between a reply and the next push is divided by what the `workers` events say of that time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.assembly.core import make_policy, make_rule, make_training
from paceline.config import RunConfig, is_simulated
from paceline.core.messages import Outcome, Push, Verdict
from paceline.core.schedules import Budget
from paceline.core.server import Exchange, Roster, Server
from paceline.interfaces import Layout
from paceline.runs.arrival_log import Record
from paceline.settings.strategies import on_ring

ENDLESS = Budget(1 << 62, 1)
NOTHING = torch.empty(0)
PARTS = ("computing", "sending", "waiting", "server")


class Span(NamedTuple):
    """A worker's time from `begin` to `end`: computing, sending, waiting, paused or dead."""

    worker: int
    kind: str
    begin: float
    end: float
    push: int | None = None
    """The number of the push it belongs to, from 0 in the log's order."""
    fate: str | None = None
    """Of the last part of a push: taken, dropped, rejected, repeated or late."""


class Update(NamedTuple):
    """The server made weights of `version` of these pushes."""

    version: int
    now: float
    pushes: tuple[int, ...]


@dataclass(slots=True)
class _Seat:
    """Where a worker's line stands."""

    doing: str
    since: float
    push: int | None = None
    """That it sent last."""


@dataclass
class Accounts:
    """How workers say their time between a reply and a push was spent."""

    ring: bool = False
    rows: dict[int, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)
    pauses: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """When a worker was seen to be silent, and how long a step of it takes."""
    _known: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def of(events: Iterable[dict[str, Any]], config: RunConfig) -> Accounts:
        found = Accounts(on_ring(config) and not is_simulated(config))  # a real ring logs a round when all are through
        for row in events:
            workers = row.get("worker")
            if row.get("kind") != "workers" or not isinstance(workers, list):
                continue
            columns = {part: row[part] for part in PARTS if len(row.get(part) or ()) == len(workers)}
            for place, worker in enumerate(workers):
                parts = {part: float(column[place] or 0.0) for part, column in columns.items()}
                found.rows.setdefault(worker, []).append((row["now"], parts))
            steps = dict(zip(workers, row.get("step") or (), strict=False))
            for name, (_, limit) in (row.get("paused") or {}).items():
                usual = steps.get(int(name)) or limit
                found.pauses.setdefault(int(name), []).append((row["now"], usual))
        return found

    def divide(self, worker: int, begin: float, end: float) -> list[tuple[str, float]]:
        """The parts of the time between a reply and a push, in order, and when each ends."""
        usual = next((step for at, step in self.pauses.get(worker, ()) if begin <= at <= end), None)
        if usual is not None and begin + usual < end:
            return [("computing", begin + usual), ("paused", end)]
        shares = self._shares(worker, end)
        whole, sending = end - begin, shares["sending"]
        ends = (sending / 2, sending / 2 + shares["computing"], sending + shares["computing"], 1.0)
        named = zip(("sending", "computing", "sending", "waiting"), ends, strict=True)
        return [(kind, begin + min(share, 1.0) * whole) for kind, share in named]

    def _shares(self, worker: int, at: float) -> dict[str, float]:
        rows = self.rows.get(worker, [])
        place = min(bisect.bisect_left(rows, at, key=lambda row: row[0]), len(rows) - 1)
        if (worker, place) not in self._known:
            self._known[worker, place] = self._between(rows, place)
        return self._known[worker, place]

    def _between(self, rows: list[tuple[float, dict[str, float]]], place: int) -> dict[str, float]:
        """Shares of the time between a row and the one before it."""
        now = rows[place][1] if rows else {}
        before = rows[place - 1][1] if place > 0 else {}
        if any(now.get(part, 0.0) < before.get(part, 0.0) for part in PARTS):
            before = {}  # another server has begun to count
        grown = {part: now.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
        idle = grown["server"] + (grown["waiting"] if self.ring else 0.0)  # on a star the log tells who is held back
        whole = grown["computing"] + grown["sending"] + idle
        if whole <= 0.0 or not grown["computing"]:
            return {"computing": 1.0, "sending": 0.0}
        return {"computing": grown["computing"] / whole, "sending": grown["sending"] / whole}


class Timeline:
    """Turns the records that count into spans and updates, in the order they end."""

    def __init__(self, config: RunConfig, accounts: Accounts) -> None:
        rule, roster = make_rule(config, Layout((), 0)), Roster(config.workers or 1, config.max_workers)
        training = make_training(config, ENDLESS)
        self._server = Server(NOTHING, rule, make_policy(config), training, roster, Exchange(nbytes=0))
        self._accounts = accounts
        self._seats: dict[int, _Seat] = {}
        self._unapplied: dict[int, int] = {}
        self.num_pushes = 0
        self.num_astray = 0
        """Pushes of which the log says something else than the settings do."""
        self.ended = 0.0

    def follow(self, records: Iterable[Record]) -> Iterator[Span | Update]:
        for record in records:
            self.ended = max(self.ended, record.now)
            version = self._server.version
            if record.kind == "push":
                yield from self._push(record)
            else:
                yield from self._message(record)
            if self._server.version != version:
                yield Update(self._server.version, record.now, tuple(self._unapplied.values()))
                self._unapplied.clear()
        for worker, seat in self._seats.items():
            if seat.doing == "dead" and self.ended > seat.since:
                yield Span(worker, "dead", seat.since, self.ended)

    def _push(self, record: Record) -> Iterator[Span]:
        number, self.num_pushes = self.num_pushes, self.num_pushes + 1
        fate = record.verdict.name.lower()
        seat = self._seats.get(record.worker)
        if seat is not None and seat.doing == "computing":
            yield from self._parts(record.worker, seat.since, record.now, number, fate)
            self._seats[record.worker] = _Seat("waiting", record.now, number)
        if record.verdict not in (Verdict.TAKEN, Verdict.DROPPED):
            return
        push = Push(record.worker, record.incarnation, record.seq, record.reply, record.samples, record.loss, *_EMPTY)
        if record.verdict == Verdict.TAKEN:
            self._unapplied[record.worker] = number
        outcome = self._server.handle(push)
        if outcome.verdict != record.verdict:
            self.num_astray += 1
            self._seats[record.worker] = _Seat("computing", record.now)
            self._unapplied.pop(record.worker, None)
        yield from self._answer(outcome, record.now)

    def _parts(self, worker: int, begin: float, end: float, push: int | None, fate: str | None) -> Iterator[Span]:
        parts = self._accounts.divide(worker, begin, end)
        spans = []
        for kind, until in parts:
            if until > begin:
                spans.append(Span(worker, kind, begin, until, push))
                begin = until
        yield from spans[:-1]
        if spans:
            yield spans[-1]._replace(fate=fate)

    def _message(self, record: Record) -> Iterator[Span]:
        worker, now = record.worker, record.now
        outcome = self._server.handle(record.message)
        if record.kind == "join" and outcome.verdict == Verdict.TAKEN:
            before = self._seats.get(worker)
            if before is not None and before.doing == "dead" and now > before.since:
                yield Span(worker, "dead", before.since, now)
            self._seats[worker] = _Seat("waiting", now)
        elif record.kind == "leave" and outcome.verdict == Verdict.TAKEN:
            yield from self._leave(worker, now)
        elif record.kind == "resume":
            for number in list(self._seats):
                yield from self._leave(number, now)
            self._unapplied.clear()
        yield from self._answer(outcome, now)

    def _leave(self, worker: int, now: float) -> Iterator[Span]:
        """What it was doing ends, and unless its work was done it is missed from now on."""
        seat = self._seats.pop(worker, None)
        self._unapplied.pop(worker, None)
        if seat is None:
            return
        if seat.doing == "dead":
            self._seats[worker] = seat
            return
        if seat.doing == "computing":
            yield from self._parts(worker, seat.since, now, None, None)
        elif now > seat.since and seat.push is not None:
            yield Span(worker, "waiting", seat.since, now, seat.push)
        member = self._server.members.get(worker)
        if member is not None and not member.done:
            self._seats[worker] = _Seat("dead", now)

    def _answer(self, outcome: Outcome, now: float) -> Iterator[Span]:
        for reply in outcome.replies:
            seat = self._seats.get(reply.worker)
            if seat is None:
                continue
            if seat.doing == "waiting" and now > seat.since:
                yield Span(reply.worker, "waiting", seat.since, now, seat.push)
            self._seats[reply.worker] = _Seat("done" if reply.over else "computing", now)


_EMPTY = (NOTHING, NOTHING)
