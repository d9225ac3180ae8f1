"""The simulated way between workers and server: bytes that share a link, latency, and messages that go astray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.faults import Fault
from paceline.runtimes.agenda import Action, Agenda
from paceline.runtimes.network import Shared

UP, DOWN = "push", "reply"


@dataclass(slots=True)
class Line:
    """One worker's connection, over all its incarnations."""

    cut_until: float = -1.0
    astray: dict[str, list[Fault]] = field(default_factory=lambda: {UP: [], DOWN: []})
    under_way: float = 0.0
    """Seconds that messages have spent on it."""


class Wire:
    """Carries messages: `nbytes` over the link's direction that all workers share, then the latency."""

    def __init__(self, agenda: Agenda, bandwidth: float | None, latency: float, nbytes: int, num_workers: int) -> None:
        self._agenda, self._latency, self._nbytes = agenda, latency, nbytes
        self._shared: dict[str, Shared] = {}
        if bandwidth is not None:
            self._shared = {way: Shared(agenda, bandwidth, bandwidth) for way in (UP, DOWN)}
        self.lines = [Line() for _ in range(num_workers)]
        self.is_down = False

    def carry(self, worker: int, way: str, arrive: Action, message: Any, lost: Action, asked: Any, heavy: bool) -> None:
        """Bring `message` to `arrive`, or call `lost(asked)` where it goes astray. Only a heavy one fills the link."""
        line, now = self.lines[worker], self._agenda.now
        if self.is_down or now < line.cut_until:
            lost(asked)
            return
        astray = line.astray[way]
        fault = astray.pop(0) if astray and heavy else None
        cargo = (line, way if heavy and self._shared else None, arrive, message, now)
        if fault is None:
            self._load(cargo)
        elif fault.kind == "lose":
            lost(asked)
        else:
            self._agenda.at(now + fault.lasts, self._load, cargo)
            if fault.kind == "duplicate":
                self._load(cargo)

    def _load(self, cargo: tuple[Line, str | None, Action, Any, float]) -> None:
        way = cargo[1]
        if way is None:
            self._unload(cargo)
        else:
            self._shared[way].add(self._nbytes, self._unload, cargo)

    def _unload(self, cargo: tuple[Line, str | None, Action, Any, float]) -> None:
        line, _, arrive, message, since = cargo
        there = self._agenda.now + self._latency
        line.under_way += there - since
        if self._latency:
            self._agenda.at(there, arrive, message)
        else:
            arrive(message)
