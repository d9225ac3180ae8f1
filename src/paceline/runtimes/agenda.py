"""Virtual time: a heap of (time, serial, action); the serial number lets ties come out in the order of planning."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]


class Agenda:
    """What happens when. Nothing here reads a clock, so the same plans run the same way every time.

    >>> agenda, seen = Agenda(), []
    >>> agenda.at(2.0, seen.append, "later")
    >>> agenda.at(1.0, seen.append, "sooner")
    >>> agenda.run()
    >>> seen, agenda.now
    (['sooner', 'later'], 2.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self.stopped = False
        self._planned: list[tuple[float, int, Action, Any]] = []
        self._serial = 0

    def at(self, time: float, action: Action, argument: Any) -> None:
        """Call `action(argument)` when the clock reads `time`."""
        self._serial += 1
        heapq.heappush(self._planned, (time, self._serial, action, argument))

    def run(self) -> None:
        """Move the clock from plan to plan until none is left or `stopped` is set."""
        planned, pop = self._planned, heapq.heappop
        while planned and not self.stopped:
            self.now, _, action, argument = pop(planned)
            action(argument)
            self.num_done += 1
