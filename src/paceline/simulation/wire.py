"""The simulated way between workers and server: bytes that share a link, latency, and messages that go astray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.settings.fault_table import Fault
from paceline.simulation.event_queue import Action, Agenda
from paceline.simulation.network import Shared

UP, DOWN = "push", "reply"


@dataclass(slots=True)
class Line:
    """One worker's connection, over all its incarnations."""

    cut_until: float = -1.0
    astray: dict[str, list[Fault]] = field(default_factory=lambda: {UP: [], DOWN: []})
    under_way: float = 0.0
    """Seconds that messages have spent on it."""


Cargo: TypeAlias = tuple[Line, tuple[str, int] | None, Action, Any, float]
"""Whose line, which way with how many bytes on the link, to whom, what, and since when."""


class Wire:
    """Carries messages: their bytes over the link's direction that all workers share, then the latency."""

    def __init__(self, agenda: Agenda, bandwidth: float | None, latency: float, num_workers: int) -> None:
        self._agenda, self._latency = agenda, latency
        self._shared: dict[str, Shared] = {}
        if bandwidth is not None:
            self._shared = {way: Shared(agenda, bandwidth, bandwidth) for way in (UP, DOWN)}
        self.lines = [Line() for _ in range(num_workers)]
        self.is_down = False

    def carry(
        self, worker: int, way: str, arrive: Action, message: Any, lost: Action, asked: Any, nbytes: int | None
    ) -> None:
        """Bring `message` to `arrive`, or call `lost(asked)` where it goes astray; one without `nbytes` is light."""
        line, now = self.lines[worker], self._agenda.now
        if self.is_down or now < line.cut_until:
            lost(asked)
            return
        astray = line.astray[way]
        fault = astray.pop(0) if astray and nbytes is not None else None
        cargo = (line, (way, nbytes) if nbytes and self._shared else None, arrive, message, now)
        if fault is None:
            self._load(cargo)
        elif fault.kind == "lose":
            lost(asked)
        else:
            self._agenda.at(now + fault.lasts, self._load, cargo)
            if fault.kind == "duplicate":
                self._load(cargo)

    def _load(self, cargo: Cargo) -> None:
        load = cargo[1]
        if load is None:
            self._unload(cargo)
        else:
            way, nbytes = load
            self._shared[way].add(nbytes, self._unload, cargo)

    def _unload(self, cargo: Cargo) -> None:
        line, _, arrive, message, since = cargo
        there = self._agenda.now + self._latency
        line.under_way += there - since
        if self._latency:
            self._agenda.at(there, arrive, message)
        else:
            arrive(message)
