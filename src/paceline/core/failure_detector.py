"""Failure detector: learns each worker's normal silence, from a reply to its next push. Pure: times are arguments."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

WINDOW = 32  # silences remembered per worker; a new pace is learned once it fills half of them
MIN_SILENCES = 5  # with fewer silences, the limit is at least `start`
MIN_SPREAD = 0.125  # the smallest spread assumed, as a share of the median, even if the pace is perfectly even


class SilenceModel:
    """One worker: when its turn began, and how long it was silent on earlier turns."""

    __slots__ = ("known_limit", "silences", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.silences: deque[float] = deque(maxlen=WINDOW)
        self.known_limit: float | None = None

    def limit(self, failure_detector: FailureDetector) -> float:
        """Seconds of silence that are normal for this worker."""
        if self.known_limit is None:
            least = failure_detector.start if len(self.silences) < MIN_SILENCES else failure_detector.floor
            if not self.silences:
                return least
            middle = median(self.silences)
            spread = median(abs(silence - middle) for silence in self.silences)
            usual = middle + failure_detector.k * max(spread, MIN_SPREAD * middle)
            self.known_limit = min(max(usual, least), failure_detector.ceiling)
        return self.known_limit


class FailureDetector:
    """Normal silence per worker, in seconds: median + k MAD of its latest silences, from `floor` to `ceiling`.

    A worker with too few silences gets at least `start`. With the default k, twice the median is normal.

    >>> failure_detector = FailureDetector(start=10.0, floor=0.5, ceiling=60.0)
    >>> for step in range(8):  # one step per second, each answered at once
    ...     failure_detector.start_wait(worker=0, now=step)
    ...     failure_detector.record_message(worker=0, now=step + 1)
    >>> failure_detector.start_wait(worker=0, now=8)
    >>> failure_detector.limit(worker=0), failure_detector.next_due()
    (2.0, 10.0)
    >>> failure_detector.due(now=9.9), failure_detector.due(now=10.1)
    ([], [0])
    """

    def __init__(self, start: float = 30.0, floor: float = 2.0, ceiling: float = 120.0, k: float = 8.0) -> None:
        assert 0.0 <= floor <= start <= ceiling and k >= 0.0
        self.start, self.floor, self.ceiling, self.k = start, floor, ceiling, k
        self._workers: defaultdict[int, SilenceModel] = defaultdict(SilenceModel)

    def start_wait(self, worker: int, now: float) -> None:
        """The server replied: the worker's turn begins."""
        self._workers[worker].since = now

    def record_message(self, worker: int, now: float) -> None:
        """The worker pushed or joined: its turn ends, and its silence is learned."""
        one = self._workers[worker]
        if one.since is not None:
            one.silences.append(max(0.0, now - one.since))
            one.known_limit = one.since = None

    def heartbeat(self, worker: int, now: float) -> None:
        """The worker sent a heartbeat: its turn goes on, and its silence counts from now."""
        if self._workers[worker].since is not None:
            self.record_message(worker, now)
            self.start_wait(worker, now)

    def forget(self, worker: int) -> None:
        """The worker left; if it returns, it starts without a history."""
        self._workers.pop(worker, None)

    def extend(self, seconds: float) -> None:
        """Do not count `seconds` in which the server did not listen because it evaluated or was stopped."""
        for one in self._workers.values():
            if one.since is not None:
                one.since += seconds

    def limit(self, worker: int) -> float:
        """How many seconds of silence are normal for this worker now."""
        return self._workers[worker].limit(self)

    def silence(self, worker: int, now: float) -> float:
        """How many seconds this worker has been silent on its turn; 0 if it waits for a reply."""
        one = self._workers.get(worker)
        return 0.0 if one is None or one.since is None else max(0.0, now - one.since)

    def due(self, now: float) -> list[int]:
        """Workers that are silent for longer than normal, in worker order, until they are heard, asked or forgotten."""
        return sorted(worker for worker, when in self._times(asked_before=now - self.floor) if now > when)

    def next_due(self) -> float | None:
        """The earliest time at which a worker is due if none is heard; None if it is no worker's turn.

        `due` and `next_due` visit every worker. A worker that is asked later is due at least `floor` later, so a loop
        may keep this value and need not ask again before that time or before `floor` has passed.
        """
        return min((when for _, when in self._times()), default=None)

    def _times(self, asked_before: float = math.inf) -> list[tuple[int, float]]:
        """When each worker is due; only those whose turn began before `asked_before`, the others cannot be due yet."""
        turns = [(worker, one, one.since) for worker, one in self._workers.items() if one.since is not None]
        return [(worker, since + one.limit(self)) for worker, one, since in turns if since < asked_before]
