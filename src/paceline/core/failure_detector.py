"""Until when silence is normal: learned from each worker's own pace, median + k MAD. Pure: times are arguments.

A silence counts while it is the worker's turn; one that the server holds back (no reply sent) is never silent.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 32
"""Silences remembered of each worker; a new pace is the rule once it fills half of them."""
FEWEST = 5
"""Below this many the start value still holds."""
LEAST_SPREAD = 0.125
"""Of the median: a pace as even as a clock's is granted some spread all the same."""


class Patience:
    """One worker: since when it is its turn, and how long it kept silent on earlier turns."""

    __slots__ = ("learned", "silences", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.silences: deque[float] = deque(maxlen=WINDOW)
        self.learned: float | None = None
        """The limit that the silences give; None until it is asked for."""

    def limit(self, deadlines: Deadlines) -> float:
        if self.learned is None:
            self.learned = self._learn(deadlines)
        return self.learned

    def _learn(self, deadlines: Deadlines) -> float:
        least = deadlines.start if len(self.silences) < FEWEST else deadlines.floor
        if not self.silences:
            return least
        middle = median(self.silences)
        spread = median(abs(silence - middle) for silence in self.silences)
        usual = middle + deadlines.k * max(spread, LEAST_SPREAD * middle)
        return min(max(usual, least), deadlines.ceiling)


class Deadlines:
    """Seconds of silence that are normal for each worker: median + k MAD of its latest, from `floor` to `ceiling`.

    Before a worker has shown its pace it is given `start`. With the default k a silence of twice the median is normal.

    >>> deadlines = Deadlines(start=10.0, floor=0.5, ceiling=60.0)
    >>> for step in range(8):  # a step a second, and each is answered at once
    ...     deadlines.asked(worker=0, now=step)
    ...     deadlines.heard(worker=0, now=step + 1)
    >>> deadlines.asked(worker=0, now=8)
    >>> deadlines.limit(worker=0), deadlines.next_due()
    (2.0, 10.0)
    >>> deadlines.due(now=9.9), deadlines.due(now=10.1)
    ([], [0])
    """

    def __init__(self, start: float = 30.0, floor: float = 2.0, ceiling: float = 120.0, k: float = 8.0) -> None:
        assert 0.0 <= floor <= start <= ceiling and k >= 0.0
        self.start, self.floor, self.ceiling, self.k = start, floor, ceiling, k
        self._workers: dict[int, Patience] = {}

    def _of(self, worker: int) -> Patience:
        patience = self._workers.get(worker)
        if patience is None:
            patience = self._workers[worker] = Patience()
        return patience

    def asked(self, worker: int, now: float) -> None:
        """A reply went out: it is this worker's turn."""
        patience = self._workers.get(worker) or self._of(worker)
        patience.since = now

    def heard(self, worker: int, now: float) -> None:
        """Its push came (or its join): until the next reply the server has the turn."""
        patience = self._workers.get(worker) or self._of(worker)
        if patience.since is not None:
            silence = now - patience.since
            patience.silences.append(silence if silence > 0.0 else 0.0)
            patience.learned = patience.since = None

    def beat(self, worker: int, now: float) -> None:
        """Record a heartbeat: it is still the worker's turn, and silence counts from here."""
        if self._of(worker).since is not None:
            self.heard(worker, now)
            self.asked(worker, now)

    def forget(self, worker: int) -> None:
        """It is gone; should it return it is new."""
        self._workers.pop(worker, None)

    def excuse(self, seconds: float) -> None:
        """The server itself did not listen for so long (it evaluated, or was stopped): nobody was silent meanwhile."""
        for patience in self._workers.values():
            if patience.since is not None:
                patience.since += seconds

    def limit(self, worker: int) -> float:
        """Seconds of silence that are normal for this worker now."""
        return self._of(worker).limit(self)

    def silence(self, worker: int, now: float) -> float:
        """Seconds that this worker has kept silent on its turn; 0 while the server has the turn."""
        patience = self._workers.get(worker)
        return 0.0 if patience is None or patience.since is None else max(0.0, now - patience.since)

    def due(self, now: float) -> list[int]:
        """Who has been silent for longer than is normal, in worker order; they stay until heard, asked or forgotten."""
        return sorted(worker for worker, when in self._times(asked_before=now - self.floor) if now > when)

    def next_due(self) -> float | None:
        """The first moment after which somebody is due if nothing is heard; None when it is nobody's turn.

        Both look at every worker. Whoever is asked later is due `floor` later or more, so a loop may keep this
        value, and need not look again before it or before `floor` has passed.
        """
        return min((when for _, when in self._times()), default=None)

    def _times(self, asked_before: float = math.inf) -> list[tuple[int, float]]:
        """Who is due when, of those whose turn began before some moment: the others cannot be due yet."""
        turns = [(worker, one, one.since) for worker, one in self._workers.items() if one.since is not None]
        return [(worker, since + one.limit(self)) for worker, one, since in turns if since < asked_before]
