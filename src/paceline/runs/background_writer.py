"""What a run writes besides its logs, one thing after another and in order, without keeping workers waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 4
"""Jobs, each with a copy of the weights, that may wait for a slow disk before the run does."""


class Writer:
    """Does jobs in the order given: on another thread, or before `do` returns where time is only simulated."""

    def __init__(self, background: bool = True) -> None:
        self._thread = ThreadPoolExecutor(1, "paceline-writer") if background else None
        self._waiting: deque[Future[None]] = deque()
        self._failing: dict[str, int | None] = {}
        self._changes: list[tuple[str, OSError | None]] = []

    @property
    def busy(self) -> bool:
        return any(not job.done() for job in self._waiting)

    def do(self, what: str, job: Callable[[], object]) -> None:
        """Start a job and return; an OSError is kept for `changes`, under `what` it was about."""
        if self._thread is None:
            self._try(what, job)
            return
        while len(self._waiting) >= MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._try, what, job))

    def _try(self, what: str, job: Callable[[], object]) -> None:
        try:
            job()
        except OSError as error:
            if what not in self._failing or self._failing[what] != error.errno:
                self._changes.append((what, error))
            self._failing[what] = error.errno
        else:
            if what in self._failing:
                del self._failing[what]
                self._changes.append((what, None))

    def changes(self) -> list[tuple[str, OSError | None]]:
        """What cannot be written, or for another reason, or can be again (None), since the last time somebody asked."""
        found, self._changes = self._changes, []
        return found

    def wait(self) -> None:
        """Until everything is on disk."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Wait, and let the thread go."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
