"""Detect workers that are silent, or compute without progress, for longer than their past explains. Pure: times are
arguments."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

WINDOW = 32  # silences remembered per worker; a new pace is learned once it fills half of them
MIN_SILENCES = 5  # with fewer silences, the limit is at least `start`
PAUSE_FACTOR = 1.5  # a stall is longer than any earlier pause by this factor
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


class Turn:
    """One worker: when its turn began, its last progress, and how long earlier turns took."""

    __slots__ = ("longest", "marked", "since", "steps_left", "turns")

    def __init__(self) -> None:
        self.since: float | None = None
        self.marked = self.longest = 0.0
        self.steps_left = 0
        self.turns: deque[float] = deque(maxlen=WINDOW)


class StallDetector:
    """Finds workers that compute and make no progress, whether or not they send heartbeats.

    A turn begins with a reply and ends with the worker's push; a worker that waits for others has none. Normal is up to
    `factor` times the median turn, and at least `floor` seconds, or `start` before enough turns are known. A pause that
    a worker came back from is normal for it later on, up to `ceiling`: own loops evaluate now and then.

    >>> stalls = StallDetector(start=60.0, floor=20.0)
    >>> for step in range(8):
    ...     stalls.start_turn(worker=0, now=step)
    ...     stalls.end_turn(worker=0, now=step + 1)
    >>> stalls.start_turn(worker=0, now=8)
    >>> stalls.usual(worker=0), stalls.limit(worker=0)
    (1.0, 20.0)
    >>> stalls.due(now=27.9), stalls.due(now=28.1)
    ([], [0])
    """

    def __init__(
        self,
        start: float = 60.0,
        floor: float = 20.0,
        ceiling: float = 300.0,
        factor: float = 10.0,
        drop_after: float | None = None,
    ) -> None:
        """After `drop_after` seconds a worker is to be dropped, unless its usual turn or a first step explains them."""
        self.start, self.floor, self.ceiling, self.factor = start, floor, ceiling, factor
        self.drop_after = drop_after
        self.extended = 0.0  # seconds that did not count in all, because the server did not listen
        self._workers: defaultdict[int, Turn] = defaultdict(Turn)

    def start_turn(self, worker: int, now: float, steps: int = 1) -> None:
        """The server replied: the worker computes from now on, and asks for `steps` steps."""
        turn = self._workers[worker]
        turn.since = turn.marked = now
        turn.steps_left = steps

    def end_turn(self, worker: int, now: float) -> None:
        """The worker pushed."""
        turn = self._workers[worker]
        if turn.since is not None:
            if now - turn.marked > turn.longest:
                self._learn_pause(turn, now)
            turn.turns.append(now - turn.since)
            turn.since = None

    def record_progress(self, worker: int, now: float, is_step: bool = False) -> None:
        """The worker made a step or sent something. A turn has no more steps than the reply asked for."""
        turn = self._workers.get(worker)
        if turn is None or turn.since is None or (is_step and not turn.steps_left):
            return
        turn.steps_left -= is_step
        self._learn_pause(turn, now)
        turn.marked = now

    def _learn_pause(self, turn: Turn, now: float) -> None:
        if len(turn.turns) >= MIN_SILENCES:  # the first steps may compile the model
            turn.longest = max(turn.longest, now - turn.marked)

    def forget(self, worker: int) -> None:
        """The worker left; if it returns, it starts without a history."""
        self._workers.pop(worker, None)

    def extend(self, seconds: float) -> None:
        """Do not count `seconds` in which the server did not listen because it evaluated or was stopped."""
        self.extended += seconds
        for turn in self._workers.values():
            if turn.since is not None:
                turn.since += seconds
                turn.marked += seconds

    def usual(self, worker: int) -> float | None:
        """The median seconds of this worker's latest turns; None if it has ended none."""
        turns = self._workers[worker].turns
        return median(turns) if turns else None

    def without_progress(self, worker: int, now: float) -> float:
        """For how many seconds this worker has computed without progress."""
        turn = self._workers.get(worker)
        return max(0.0, now - turn.marked) if turn is not None and turn.since is not None else 0.0

    def limit(self, worker: int) -> float:
        """How many seconds without progress are normal for this worker; `drop_after` seconds are never normal."""
        turn = self._workers[worker]
        normal = max(self._least(turn, self.floor), min(PAUSE_FACTOR * turn.longest, self.ceiling))
        return normal if self.drop_after is None else min(normal, self._least(turn, self.drop_after))

    def _least(self, turn: Turn, floor: float) -> float:
        if len(turn.turns) < MIN_SILENCES:
            return max(floor, self.start)
        return max(floor, self.factor * median(turn.turns))

    def due(self, now: float) -> list[int]:
        """Workers that have made no progress for longer than normal, in worker order."""
        floor = self.floor if self.drop_after is None else min(self.floor, self.drop_after)
        late = [worker for worker in self._workers if self.without_progress(worker, now) > floor]
        return sorted(worker for worker in late if self.without_progress(worker, now) > self.limit(worker))

    def to_drop(self, now: float) -> list[int]:
        """Those of `due` that are to be dropped, because of `drop_after`."""
        if self.drop_after is None:
            return []
        limits = {worker: self._least(self._workers[worker], self.drop_after) for worker in self.due(now)}
        return [worker for worker, limit in limits.items() if self.without_progress(worker, now) > limit]
