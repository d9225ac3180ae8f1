"""Virtual time: a heap of (time, serial, action); the serial number lets ties come out in the order of planning."""

from __future__ import annotations

import contextlib
import gc
import heapq
from collections.abc import Callable, Iterator
from typing import Any

Action = Callable[[Any], None]
YOUNG_OBJECTS = 100_000
"""A simulation frees what it makes without the garbage collector's help: let it look so rarely."""


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
        self.stopped = False
        self._planned: list[tuple[float, int, Action, Any]] = []
        self._serial = 0

    def at(self, time: float, action: Action, argument: Any) -> None:
        """Call `action(argument)` when the clock reads `time`."""
        self._serial += 1
        heapq.heappush(self._planned, (time, self._serial, action, argument))

    @property
    def is_empty(self) -> bool:
        """Whether nothing else is planned."""
        return not self._planned

    @property
    def num_done(self) -> int:
        """Plans carried out so far."""
        return self._serial - len(self._planned)

    def run(self) -> None:
        """Move the clock from plan to plan until none is left or `stopped` is set."""
        planned, pop = self._planned, heapq.heappop
        with _collecting_rarely():
            while planned and not self.stopped:
                self.now, _, action, argument = pop(planned)
                action(argument)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
