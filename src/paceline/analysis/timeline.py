"""Reconstructs what each worker did when: replays a run's log on a server without weights.

The time between a reply and the next push is split by the shares in the `workers` events.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.analysis.status import PARTS
from paceline.assembly.core import make_policy, make_rule, make_training
from paceline.config import RunConfig, is_simulated
from paceline.core.messages import Disposition, Outcome, Push
from paceline.core.schedules import Budget
from paceline.core.server import Exchange, Roster, Server
from paceline.interfaces import Layout
from paceline.runs.arrival_log import Record
from paceline.settings.strategies import on_ring

ENDLESS = Budget(1 << 62, 1)
NOTHING = torch.empty(0)


class Span(NamedTuple):
    """A worker's time from `begin` to `end`: computing, sending, waiting, paused or dead."""

    worker: int
    kind: str
    begin: float
    end: float
    push: int | None = None  # index of its push in the log, from 0
    fate: str | None = None  # for the last span of a push: taken, dropped, rejected, repeated or late


class TimelineUpdate(NamedTuple):
    """One update of the server: its version, its time, and the pushes it applied."""

    version: int
    now: float
    pushes: tuple[int, ...]


@dataclass(slots=True)
class _WorkerTrack:
    """Current activity of a worker."""

    activity: str
    since: float
    push: int | None = None  # the last push it sent


@dataclass
class TimeReports:
    """How workers spent the time between a reply and a push, from the `workers` events."""

    ring: bool = False
    rows: dict[int, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)
    pauses: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Times at which a worker was found silent, each with its usual step time."""
    _known: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    @staticmethod
    def of(events: Iterable[dict[str, Any]], config: RunConfig) -> TimeReports:
        found = TimeReports(on_ring(config) and not is_simulated(config))  # a real ring logs complete rounds
        for row in events:
            workers = row.get("worker")
            if row.get("kind") != "workers" or not isinstance(workers, list):
                continue
            columns = {part: row[part] for part in PARTS if len(row.get(part) or ()) == len(workers)}
            for place, worker in enumerate(workers):
                parts = {part: float(column[place] or 0.0) for part, column in columns.items()}
                found.rows.setdefault(worker, []).append((row["now"], parts))
            steps = dict(zip(workers, row.get("step") or (), strict=False))
            for name, (_, limit) in {**(row.get("paused") or {}), **(row.get("stalled") or {})}.items():
                found.pauses.setdefault(int(name), []).append((row["now"], steps.get(int(name)) or limit or 0.0))
        return found

    def divide(self, worker: int, begin: float, end: float) -> list[tuple[str, float]]:
        """Return the parts of the time between a reply and a push in order, each with its end."""
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
        """Return the shares of the time between a row and the one before it."""
        now = rows[place][1] if rows else {}
        before = rows[place - 1][1] if place > 0 else {}
        if any(now.get(part, 0.0) < before.get(part, 0.0) for part in PARTS):
            before = {}  # a new server started counting
        grown = {part: now.get(part, 0.0) - before.get(part, 0.0) for part in PARTS}
        idle = grown["server"] + (grown["waiting"] if self.ring else 0.0)  # the log of a star has the waiting times
        whole = grown["computing"] + grown["sending"] + idle
        if whole <= 0.0 or not grown["computing"]:
            return {"computing": 1.0, "sending": 0.0}
        return {"computing": grown["computing"] / whole, "sending": grown["sending"] / whole}


class Timeline:
    """Turns effective records into spans and updates, in the order of their ends."""

    def __init__(self, config: RunConfig, accounts: TimeReports) -> None:
        rule, roster = make_rule(config, Layout((), 0)), Roster(config.workers or 1, config.max_workers)
        training = make_training(config, ENDLESS)
        self._server = Server(NOTHING, rule, make_policy(config), training, roster, Exchange(nbytes=0))
        self._accounts = accounts
        self._tracks: dict[int, _WorkerTrack] = {}
        self._unapplied: dict[int, int] = {}
        self.num_pushes = 0
        self.num_mismatched = 0  # pushes for which the log and the replayed server disagree
        self.ended = 0.0

    def follow(self, records: Iterable[Record]) -> Iterator[Span | TimelineUpdate]:
        """Yield the spans and updates of the records, then the spans of workers that are still dead."""
        for record in records:
            self.ended = max(self.ended, record.now)
            version = self._server.version
            yield from self._push(record) if record.kind == "push" else self._message(record)
            if self._server.version != version:
                yield TimelineUpdate(self._server.version, record.now, tuple(self._unapplied.values()))
                self._unapplied.clear()
        for worker, track in self._tracks.items():
            if track.activity == "dead" and self.ended > track.since:
                yield Span(worker, "dead", track.since, self.ended)

    def _push(self, record: Record) -> Iterator[Span]:
        number, self.num_pushes = self.num_pushes, self.num_pushes + 1
        fate = record.disposition.name.lower()
        track = self._tracks.get(record.worker)
        if track is not None and track.activity == "computing":
            yield from self._parts(record.worker, track.since, record.now, number, fate)
            self._tracks[record.worker] = _WorkerTrack("waiting", record.now, number)
        if record.disposition not in (Disposition.TAKEN, Disposition.DROPPED):
            return
        push = Push(
            record.worker, record.incarnation, record.seq, record.reply, record.samples, record.loss, NOTHING, NOTHING
        )
        if record.disposition == Disposition.TAKEN:
            self._unapplied[record.worker] = number
        outcome = self._server.handle(push)
        if outcome.disposition != record.disposition:
            self.num_mismatched += 1
            self._tracks[record.worker] = _WorkerTrack("computing", record.now)
            self._unapplied.pop(record.worker, None)
        yield from self._deliver(outcome, record.now)

    def _parts(self, worker: int, begin: float, end: float, push: int | None, fate: str | None) -> Iterator[Span]:
        spans = []
        for kind, until in self._accounts.divide(worker, begin, end):
            if until > begin:
                spans.append(Span(worker, kind, begin, until, push))
                begin = until
        yield from spans[:-1]
        yield from (span._replace(fate=fate) for span in spans[-1:])

    def _message(self, record: Record) -> Iterator[Span]:
        worker, now = record.worker, record.now
        outcome = self._server.handle(record.message)
        if record.kind == "join" and outcome.disposition == Disposition.TAKEN:
            before = self._tracks.get(worker)
            if before is not None and before.activity == "dead" and now > before.since:
                yield Span(worker, "dead", before.since, now)
            self._tracks[worker] = _WorkerTrack("waiting", now)
        elif record.kind in ("leave", "expel") and outcome.disposition == Disposition.TAKEN:
            yield from self._leave(worker, now)
        elif record.kind == "resume":
            for number in list(self._tracks):
                yield from self._leave(number, now)
            self._unapplied.clear()
        yield from self._deliver(outcome, now)

    def _leave(self, worker: int, now: float) -> Iterator[Span]:
        """End the worker's current span; if its work was not done, it counts as dead from then on."""
        track = self._tracks.pop(worker, None)
        self._unapplied.pop(worker, None)
        if track is None:
            return
        if track.activity == "dead":
            self._tracks[worker] = track
            return
        if track.activity == "computing":
            yield from self._parts(worker, track.since, now, None, None)
        elif now > track.since and track.push is not None:
            yield Span(worker, "waiting", track.since, now, track.push)
        member = self._server.members.get(worker)
        if member is not None and not member.inactive:
            self._tracks[worker] = _WorkerTrack("dead", now)

    def _deliver(self, outcome: Outcome, now: float) -> Iterator[Span]:
        for reply in outcome.replies:
            track = self._tracks.get(reply.worker)
            if track is None:
                continue
            if track.activity == "waiting" and now > track.since:
                yield Span(reply.worker, "waiting", track.since, now, track.push)
            self._tracks[reply.worker] = _WorkerTrack("done" if reply.finished else "computing", now)
