"""Account for each worker's time during a run: computing, sending, waiting, being served; and its staleness.

The server sees when a push comes and when its reply leaves. Workers report how long they computed and waited
(`timing.py`). The rest is the time under way. All times are arguments.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

from paceline.core.failure_detector import FailureDetector, StallDetector
from paceline.core.messages import Input, Join, Leave, Push, Reply
from paceline.core.server import Server
from paceline.runtimes.server.timing import RECENT, TimingCollector
from paceline.system.terminal import seconds_text

MAX_COUNTS = 100  # most staleness values in one row


class TimeShares(NamedTuple):
    """Seconds of one worker since this server began; None if unknown."""

    computing: float | None = None
    sending: float | None = None
    waiting: float | None = None  # for other workers: the server held the reply back
    server: float | None = None  # while the server handled its pushes
    steps: int | None = None
    longest: float | None = None  # seconds that it computed for one push: may be a pause
    step: float | None = None  # median seconds of its latest steps
    send: float | None = None  # median seconds that a push and its reply are under way


class Stall(NamedTuple):
    """A worker that computes without progress."""

    worker: int
    seconds: float  # since its last step
    usual: float | None  # seconds of its usual step; None if it has made none

    def __str__(self) -> str:
        """One line for the user.

        >>> print(Stall(2, 34.2, 0.0201))
        worker 2 has made no step for 34 s; its usual step takes 20 ms
        """
        return f"worker {self.worker} has made {self.what}"

    @property
    def what(self) -> str:
        """How long it has made no step, beside its usual step."""
        usual = "it has made none before" if self.usual is None else f"its usual step takes {seconds_text(self.usual)}"
        return f"no step for {seconds_text(self.seconds)}; {usual}"


DIGITS = {"step": 6, "send": 6}
Way = Literal["server", "sending", "waiting"]


class WorkerAccount:
    """What the server has seen of one worker; the latest exchange counts once the worker has reported on it."""

    __slots__ = ("answered", "began", "came", "held", "lost", "new", "pushes", "seen", "server", "staleness", "waiting")

    def __init__(self) -> None:
        self.seen: float | None = None
        self.lost, self.new = False, True
        self.pushes = self.staleness = 0
        self.waiting = self.server = self.came = self.began = self.answered = 0.0
        """Of the latest push: it `came`, the server `began` the input that released its reply, and `answered`."""
        self.held: deque[float] = deque(maxlen=RECENT)

    def join(self, now: float) -> None:
        """Start again: the first reply of an incarnation answers no push."""
        self.seen = self.came = self.began = self.answered = now
        self.lost, self.new = False, True


def stale_counts(counts: Mapping[int, int], most: int = MAX_COUNTS) -> list[list[int]]:
    """Count pushes by staleness; above `most` values, neighbours are counted together under the lowest of them.

    >>> stale_counts({0: 2, 1: 5, 2: 1, 3: 1}, most=2)
    [[0, 7], [2, 2]]
    """
    width = max(counts, default=0) // most + 1
    found: dict[int, int] = {}
    for value, count in sorted(counts.items()):
        found[value // width * width] = found.get(value // width * width, 0) + count
    return [list(pair) for pair in found.items()]


class TimeAccounting:
    """The accounts of all workers of one server.

    `way` is what the time between a worker's push and its arrival at the server counts as: on one machine the push
    waits for the server, over a network it is being sent, in a ring the worker waits for the others. `known` returns a
    worker's times if the runtime measures them itself, as a simulation does, else None.
    """

    def __init__(
        self, timings: TimingCollector, way: Way = "server", known: Callable[[int], TimeShares | None] = lambda _: None
    ) -> None:
        self.failure_detector = FailureDetector(start=30.0, floor=1.0, ceiling=300.0)
        self.stall_detector = StallDetector()
        self.stalled: list[int] = []  # workers that were named because they make no progress, until they do
        self._timings, self._way, self._known = timings, way, known
        self._accounts: defaultdict[int, WorkerAccount] = defaultdict(WorkerAccount)

    def on_input(self, message: Input, server: Server, now: float) -> None:
        """Record an input before the server handles it."""
        if isinstance(message, Push):
            server = server.by_optimizer[message.optimizer]
            worker, member = message.worker, server.members.get(message.worker)
            if member is None or message.incarnation != member.incarnation or message.seq <= member.seq:
                return  # repeated, or of an incarnation that has left
            account = self._accounts[worker]
            account.waiting += account.began - account.came
            account.server += account.answered - account.began
            account.held.append(account.answered - account.came)
            account.seen = account.came = account.began = account.answered = now
            account.new = False
            account.pushes += 1
            account.staleness += server.version - member.version
            self.failure_detector.record_message(worker, now)
            self.stall_detector.end_turn(worker, now)
        elif isinstance(message, Join):
            self.stall_detector.forget(message.worker)
            self._accounts[message.worker].join(now)
        elif isinstance(message, Leave):
            member = server.members.get(message.worker)
            if member is None or message.incarnation >= member.incarnation:  # else an earlier incarnation's
                self._forget(message.worker)
                self._accounts[message.worker].lost = not server.finished

    def on_reply(self, reply: Reply, began: float, now: float) -> None:
        """Record a reply that was sent, released by the input whose handling began at `began`."""
        account = self._accounts[reply.worker]
        if not account.new:
            account.began, account.answered = began, now
        if reply.finished:
            self._forget(reply.worker)
        else:
            self.failure_detector.start_wait(reply.worker, now)
            self.stall_detector.start_turn(reply.worker, now, max(1, reply.steps))

    def _forget(self, worker: int) -> None:
        self.failure_detector.forget(worker)
        self.stall_detector.forget(worker)

    def extend(self, seconds: float) -> None:
        """Do not count `seconds` in which the server evaluated as a worker's silence."""
        self.failure_detector.extend(seconds)
        self.stall_detector.extend(seconds)

    def stall(self, worker: int, server: Server, now: float) -> Stall:
        """For how long a worker has computed without progress."""
        usual, member = self.stall_detector.usual(worker), server.members.get(worker)
        steps = max(1, member.steps) if member is not None else 1
        seconds = self.stall_detector.without_progress(worker, now)
        return Stall(worker, round(seconds, 3), None if usual is None else round(usual / steps, 6))

    def look_for_stalls(self, now: float) -> tuple[list[int], list[int]]:
        """Return the workers that have stalled since the last call, and those that make progress again."""
        before, self.stalled = self.stalled, self.stall_detector.due(now)
        new = [worker for worker in self.stalled if worker not in before]
        return new, [worker for worker in before if worker not in self.stalled]

    def _spent(self, worker: int) -> TimeShares:
        report, account = self._timings.report(worker), self._accounts[worker]
        if report is None:
            return TimeShares(steps=account.pushes)
        parts = {"waiting": account.waiting, "server": account.server}
        parts[self._way] = parts.get(self._way, 0.0) + max(0.0, report.waited - account.waiting - account.server)
        if self._way == "waiting":  # a ring has no server: the worker itself makes the update
            parts["computing"] = report.computing + parts.pop("server")
        step = median(seconds for seconds, _ in report.recent)
        if self._way == "sending":
            latest = zip(reversed(report.recent), reversed(account.held), strict=False)
            parts["send"] = median([max(0.0, waited - held) for (_, waited), held in latest] or [0.0])
        parts = {"computing": report.computing, **parts}
        return TimeShares(**parts, steps=report.steps, longest=report.longest, step=step)

    def row(self, server: Server, now: float) -> dict[str, Any]:
        """The fields of a `workers` event: columns, one value a worker; sums since this server began.

        `ago` is how long ago a worker was last heard, `stale` counts pushes by staleness, `paused` maps each worker
        that is silent on its turn to the seconds of its silence and to how many would be normal, `stalled` each that
        computes without progress to its seconds and to those of its usual step.
        """
        workers = sorted(set(range(server.num_workers)) | set(server.members))
        stalled = [worker for worker in self.stalled if not server.finished]
        late = self.failure_detector.due(now) if not server.finished else []
        late = [worker for worker in late if worker not in stalled]
        accounts = [self._accounts[worker] for worker in workers]
        row: dict[str, Any] = {"worker": workers}
        row["state"] = [self._state(worker, server, late, stalled) for worker in workers]
        times = [self._known(worker) or self._spent(worker) for worker in workers]
        for name in TimeShares._fields:
            values = [getattr(spent, name) for spent in times]
            if any(value is not None for value in values):
                row[name] = [round(value or 0, DIGITS.get(name, 3)) for value in values]
        row["pushes"] = [server.members[worker].pushes if worker in server.members else 0 for worker in workers]
        row["staleness"] = [round(one.staleness / one.pushes, 2) if one.pushes else None for one in accounts]
        row["ago"] = [round(max(0.0, now - one.seen), 3) if one.seen is not None else None for one in accounts]
        silent, limit = self.failure_detector.silence, self.failure_detector.limit
        row["stale"] = stale_counts(server.staleness)
        if server.assignments is not None and server.assignments.now.generation:
            row["deal"] = server.assignments.now.generation
        row["paused"] = {str(worker): [round(silent(worker, now), 3), round(limit(worker), 3)] for worker in late}
        if stalled:
            row["stalled"] = {str(worker): list(self.stall(worker, server, now)[1:]) for worker in stalled}
        return row

    def _state(self, worker: int, server: Server, late: list[int], stalled: list[int]) -> str:
        member = server.members.get(worker)
        if member is not None and member.inactive:
            return "drained" if member.draining and member.released else "done"
        if self._accounts[worker].lost:
            return "lost"
        if server.finished:
            return "done"
        if member is None or not member.live:
            return "awaited"
        if worker in stalled or worker in late:
            return "stalled" if worker in stalled else "paused"
        return "draining" if member.draining else "held" if member.waiting else "live"
