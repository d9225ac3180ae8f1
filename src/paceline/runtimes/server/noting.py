"""The event rows of what happens to a run: who comes, leaves or is lost, what is told and dealt anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core.messages import Drain, Input, Join, Leave, Rate, Steps, Stop
from paceline.core.server import Server
from paceline.runs.events import EventLog

Report = Callable[[dict[str, Any]], None]


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
