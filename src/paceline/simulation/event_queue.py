"""Virtual clock and event queue: a heap of (time, serial, action); the serial keeps ties in planning order."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]
GC_THRESHOLD = 100_000  # objects before a collection: a simulation makes no reference cycles, so collecting only costs


class EventQueue:
    """Runs planned actions in order of time. It reads no real clock, so equal plans run equally every time.

    >>> queue, seen = EventQueue(), []
    >>> queue.at(2.0, seen.append, "later")
    >>> queue.at(1.0, seen.append, "sooner")
    >>> queue.run()
    >>> seen, queue.now
    (['sooner', 'later'], 2.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._serial = 0

    def at(self, time: float, action: Action, argument: Any) -> None:
        """Plan to call `action(argument)` at `time`."""
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, action, argument))

    @property
    def is_empty(self) -> bool:
        """Whether no action is planned."""
        return not self._heap

    @property
    def num_done(self) -> int:
        """Number of actions run so far."""
        return self._serial - len(self._heap)

    def run(self) -> None:
        """Run the actions in order until none is left or `stopped` is set."""
        heap, pop = self._heap, heapq.heappop
        young, *older = gc.get_threshold()
        gc.set_threshold(max(young, GC_THRESHOLD) if young else 0, *older)
        try:
            while heap and not self.stopped:
                self.now, _, action, argument = pop(heap)
                action(argument)
        finally:
            gc.set_threshold(young, *older)
