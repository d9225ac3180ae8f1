"""The training clock: it runs while workers train and stands still while they start, wait for an evaluation or rest."""

from __future__ import annotations

import time
from collections.abc import Callable


class TrainingClock:
    """Seconds of training so far; made standing still, perhaps not at zero (a resumed run).

    `source` is what it counts by: a simulated run gives its virtual time.
    """

    def __init__(self, seconds: float = 0.0, source: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self.source = seconds, source
        self._since: float | None = None

    def now(self) -> float:
        return self._seconds + (self.source() - self._since if self._since is not None else 0.0)

    def go(self) -> None:
        if self._since is None:
            self._since = self.source()

    def halt(self) -> None:
        self._seconds, self._since = self.now(), None
