"""How far a run has come: for the user several times a second, and as a row of its events now and then."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from paceline.core.messages import Drain, Input, Join, Leave, Rate, Steps, Stop
from paceline.core.server import Server
from paceline.interfaces import Report
from paceline.runs.events import EventLog

SHARE = 0.002
"""Of the server's time, at most."""


class Weighing:
    """Says how long the vector of all weights is; None while it is too soon, or where there are none."""

    def __init__(self, server: Server, virtual: bool) -> None:
        self._server, self._virtual = server, virtual
        self._next = 0.0

    def norm(self) -> float | None:
        """To six digits; a virtual clock has it measured every time, so that equal runs have equal rows."""
        began = time.perf_counter()
        if not self._server.weights.numel() or (not self._virtual and began < self._next):
            return None
        norm = float(torch.linalg.vector_norm(self._server.weights))
        ended = time.perf_counter()
        self._next = ended + (ended - began) / SHARE
        return float(f"{norm:.6g}") if math.isfinite(norm) else None


class Notes:
    """Writes a row for each input that is no push, and tells the user what he should know of at once."""

    def __init__(self, server: Server, events: EventLog, report: Report) -> None:
        self._server, self._events, self._report = server, events, report
        self.lost: list[int] = []
        self.generation = server.deals.now.generation if server.deals is not None else 0
        """Of the last deal that a row tells of."""

    def take(self, message: Input, now: float, stop_reason: str | None) -> None:
        """An input that the server has taken."""
        if isinstance(message, Join):
            row = {"worker": message.worker, "incarnation": message.incarnation, "threads": message.threads}
            self._events.write("worker_joined", now, **row)
        elif isinstance(message, Leave) and not self._server.over:
            self._leave(message, now)
        elif isinstance(message, Steps):
            self._events.write("local_steps", now, worker=message.worker, steps=message.steps)
        elif isinstance(message, Rate):
            self._events.write("lr_factor", now, worker=message.worker, factor=message.factor)
        elif isinstance(message, Drain):
            self._events.write("worker_draining", now, worker=message.worker)
            self._report({"kind": "note", "text": f"worker {message.worker} is drained: it leaves after its push"})
        elif isinstance(message, Stop):
            self._events.write("stopped", now, reason=stop_reason)

    def _leave(self, message: Leave, now: float) -> None:
        member, live = self._server.members.get(message.worker), self._server.num_live
        if member is not None and member.dismissed:
            self._events.write("worker_left", now, worker=message.worker, pushes=member.pushes)
        elif member is None or not member.done:
            self.lost.append(message.worker)
            pushes = member.pushes if member is not None else 0
            self._events.write("worker_lost", now, worker=message.worker, pushes=pushes, live=live)
            self._report({"kind": "lost", "worker": message.worker, "live": live, "pushes": pushes})

    def look_for_a_deal(self, now: float) -> None:
        """Of data that was dealt anew; the log needs no record, since the deal follows from its inputs."""
        deals = self._server.deals
        if deals is not None and deals.now.generation != self.generation:
            self.generation, members = deals.now
            self._events.write("deal", now, generation=self.generation, members=members, updates=self._server.version)

    def fault(self, fault: dict[str, Any], now: float) -> None:
        """Of a fault that was fired on purpose."""
        row = {name: value for name, value in fault.items() if name != "kind"}
        self._events.write("fault", now, fault=fault["kind"], **row)


TOLD_SECONDS = 0.25
ROW_SECONDS = 1.0
VIRTUAL_SHARE = 0.01
"""A simulated run tells of every hundredth of its budget: virtual seconds say nothing about ours."""


class Progress:
    """Of one server, since the last row."""

    def __init__(
        self, server: Server, events: EventLog, report: Report, seconds: float, limit: float | None, virtual: bool
    ) -> None:
        self._server, self._events, self._report, self._limit = server, events, report, limit
        self._weighing = Weighing(server, virtual)
        self.next_share = 0.0 if virtual else None
        """How much will be done when a simulated run tells of itself next."""
        self._next_told = self._next_row = 0.0
        self._since, self._samples_then = seconds, server.samples
        self._loss_sum, self._loss_count = 0.0, 0

    def count(self, loss: float) -> None:
        """One push more."""
        self._loss_sum += loss
        self._loss_count += 1

    def is_due(self, now: float) -> bool:
        """Whether it is time to tell."""
        return now >= self._next_told if self.next_share is None else self.share(now) >= self.next_share

    def share(self, now: float) -> float:
        """How much of the run is done, by whichever of its budgets is nearer to its end."""
        server, limit = self._server, self._limit
        done = server.budget.fraction(server.samples, server.version)
        return done if limit is None else max(done, min(1.0, now / limit))

    def tell(self, now: float, with_norm: bool) -> None:
        """Where the run stands; the norm of its weights only where all of them are here."""
        server, span, share = self._server, now - self._since, self.share(now)
        loss = self._loss_sum / self._loss_count if self._loss_count else math.nan
        row = {
            "updates": server.version,
            "samples": server.samples,
            "fraction": round(share, 6),
            "loss": round(loss, 6) if math.isfinite(loss) else None,
            "rate": round((server.samples - self._samples_then) / span, 1) if span > 0 else None,
            "staleness": round(sum(k * c for k, c in server.staleness.items()) / max(1, server.staleness.total()), 3),
            "live": server.num_live,
            "lr": server.lr_inside,
        }
        self._report({"kind": "progress", "now": round(now, 3), **row})
        self._next_told = now + TOLD_SECONDS
        if self.next_share is not None:
            self.next_share, self._next_row = share + VIRTUAL_SHARE, now
        if now >= self._next_row and self._loss_count:
            norm = self._weighing.norm() if with_norm else None
            row |= {"bytes_pushed": server.bytes_pushed, "bytes_pulled": server.bytes_pulled}
            self._events.write("progress", now, **row, **({"norm": norm} if norm is not None else {}))
            self._next_row = now + ROW_SECONDS
            self._since, self._samples_then = now, server.samples
            self._loss_sum, self._loss_count = 0.0, 0
