"""How far a run has come: for the user several times a second, and as a row of its events now and then."""

from __future__ import annotations

import math

from paceline.core.server import Server
from paceline.runs.events import EventLog
from paceline.runtimes.server.noting import Report
from paceline.runtimes.server.weighing import Weighing

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
