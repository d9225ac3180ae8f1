"""The training clock: it runs while workers train and stands still while they start, wait for an evaluation or rest."""

from __future__ import annotations

import time


class TrainingClock:
    """Seconds of training so far; made standing still, perhaps not at zero (a resumed run)."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def now(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def go(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def halt(self) -> None:
        self._seconds, self._since = self.now(), None
