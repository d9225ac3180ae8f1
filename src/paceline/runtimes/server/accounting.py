"""Each worker's account while a run goes on: where its time went, how stale its pushes were, whose turn it is.

The server sees when a push comes and when its reply leaves; workers tell how long they computed and waited
(`timekeeping.py`). What lies between is the way there and back. Pure: times are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

from paceline.core.failure_detector import Deadlines
from paceline.core.messages import Input, Join, Leave, Push, Reply
from paceline.core.server import Server
from paceline.runtimes.server.timing import RECENT, Timekeeper

ROW_SECONDS = 2.0
BYTES_A_SECOND = 4096.0
"""At most, on average: rows are the rarer the longer they are. 1,000 workers take 80 kB, so one every 20 s."""
OFTEN_VIRTUAL, MANY_VIRTUAL = 0.1, 100
"""A simulated run tells of every tenth of its budget; with more workers than this at its end alone."""


MOST_COUNTS = 100
"""That a row has of how stale pushes were."""


class Spent(NamedTuple):
    """Seconds of one worker since this server began; None where nobody can tell."""

    computing: float | None = None
    sending: float | None = None
    waiting: float | None = None
    """For the others: the server held its reply back."""
    server: float | None = None
    """For the server to take its push and to answer."""
    steps: int | None = None
    step: float | None = None
    """Seconds of a step, the median of its latest: one pause does not make a worker slow."""
    send: float | None = None
    """Seconds that a push and its reply are under way, the same."""


DIGITS = {"step": 6, "send": 6}

Way = Literal["server", "sending", "waiting"]


class Account:
    """What the server has seen of one worker; the latest exchange counts once its worker has told of it."""

    __slots__ = ("answered", "began", "came", "held", "lost", "new", "pushes", "seen", "server", "staleness", "waiting")

    def __init__(self) -> None:
        self.seen: float | None = None
        self.lost, self.new = False, True
        self.pushes = self.staleness = 0
        self.waiting = self.server = 0.0
        self.came = self.began = self.answered = 0.0
        """Of the latest push: when it came, when the server began with what set its reply free, and when that left."""
        self.held: deque[float] = deque(maxlen=RECENT)

    def join(self, now: float) -> None:
        """Its first reply answers no push, whatever it was told in an earlier life."""
        self.seen = self.came = self.began = self.answered = now
        self.lost, self.new = False, True

    def push(self, now: float, staleness: int) -> None:
        self.waiting += self.began - self.came
        self.server += self.answered - self.began
        self.held.append(self.answered - self.came)
        self.seen = self.came = self.began = self.answered = now
        self.new = False
        self.pushes += 1
        self.staleness += staleness


def stale_counts(counts: Mapping[int, int], most: int = MOST_COUNTS) -> list[list[int]]:
    """How many pushes were how stale; of more than `most` values, neighbours are counted together under the least.

    >>> stale_counts({0: 2, 1: 5, 2: 1, 3: 1}, most=2)
    [[0, 7], [2, 2]]
    """
    width = max(counts, default=0) // most + 1
    found: dict[int, int] = {}
    for value, count in sorted(counts.items()):
        found[value // width * width] = found.get(value // width * width, 0) + count
    return [list(pair) for pair in found.items()]


class Accounts:
    """The accounts of all workers of one server.

    `way` says what the time between a worker's push and the server's hearing of it is: on one machine the push lies
    ready and waits for the server, over a network it is being sent, in a ring the worker waits for the others.
    """

    def __init__(self, timekeeper: Timekeeper, way: Way = "server") -> None:
        self.way = way
        self.deadlines = Deadlines(start=30.0, floor=1.0, ceiling=300.0)
        self.spent: Callable[[int], Spent] = self._spent
        """Where a worker's time went; a simulation knows better."""
        self._timekeeper = timekeeper
        self._accounts: dict[int, Account] = {}

    def heard(self, message: Input, server: Server, now: float) -> None:
        """Before the server takes an input."""
        if isinstance(message, Push):
            member = server.members.get(message.worker)
            if member is not None and message.incarnation == member.incarnation and message.seq > member.seq:
                self._of(message.worker).push(now, server.version - member.version)
                self.deadlines.heard(message.worker, now)
        elif isinstance(message, Join):
            self._of(message.worker).join(now)
        elif isinstance(message, Leave):
            member = server.members.get(message.worker)
            if member is None or message.incarnation >= member.incarnation:  # else old news
                self.deadlines.forget(message.worker)
                self._of(message.worker).lost = not server.over

    def answered(self, reply: Reply, began: float, now: float) -> None:
        """A reply was sent, which the input taken at `began` set free."""
        account = self._of(reply.worker)
        if not account.new:
            account.began, account.answered = began, now
        if reply.over:
            self.deadlines.forget(reply.worker)
        else:
            self.deadlines.asked(reply.worker, now)

    def _of(self, worker: int) -> Account:
        account = self._accounts.get(worker)
        if account is None:
            account = self._accounts[worker] = Account()
        return account

    def _spent(self, worker: int) -> Spent:
        told, account = self._timekeeper.told(worker), self._of(worker)
        if told is None:
            return Spent(steps=account.pushes)
        parts = {"waiting": account.waiting, "server": account.server}
        parts[self.way] = parts.get(self.way, 0.0) + max(0.0, told.waited - account.waiting - account.server)
        step = median(seconds for seconds, _ in told.recent)
        if self.way != "sending":
            return Spent(told.computing, steps=told.steps, step=step, **parts)
        latest = zip(reversed(told.recent), reversed(account.held), strict=False)
        under_way = [max(0.0, waited - held) for (_, waited), held in latest]
        return Spent(told.computing, steps=told.steps, step=step, send=median(under_way or [0.0]), **parts)

    def row(self, server: Server, now: float) -> dict[str, Any]:
        """The fields of a `workers` event: columns, one value a worker; sums since this server began.

        `ago` is how long ago a worker was last heard, `stale` counts pushes by staleness, `paused` says who is silent
        on its turn: for how long, and how long would be normal.
        """
        workers = sorted(set(range(server.num_workers)) | set(server.members))
        late = self.deadlines.due(now) if not server.over else []
        accounts = [self._of(worker) for worker in workers]
        row: dict[str, Any] = {
            "worker": workers,
            "state": [self._state(worker, server, worker in late) for worker in workers],
        }
        times = [self.spent(worker) for worker in workers]
        for name in Spent._fields:
            values = [getattr(spent, name) for spent in times]
            if any(value is not None for value in values):
                row[name] = [round(value or 0, DIGITS.get(name, 3)) for value in values]
        row["pushes"] = [server.members[worker].pushes if worker in server.members else 0 for worker in workers]
        row["staleness"] = [round(one.staleness / one.pushes, 2) if one.pushes else None for one in accounts]
        row["ago"] = [round(max(0.0, now - one.seen), 3) if one.seen is not None else None for one in accounts]
        silent, limit = self.deadlines.silence, self.deadlines.limit
        row["stale"] = stale_counts(server.staleness)
        if server.deals is not None and server.deals.now.generation:
            row["deal"] = server.deals.now.generation
        row["paused"] = {str(worker): [round(silent(worker, now), 3), round(limit(worker), 3)] for worker in late}
        return row

    def _state(self, worker: int, server: Server, late: bool) -> str:
        member = server.members.get(worker)
        if member is not None and member.done:
            return "done"
        if self._of(worker).lost:
            return "lost"
        if member is None or not member.live:
            return "done" if server.over else "awaited"
        if server.over:
            return "done"
        if late:
            return "paused"
        return "draining" if member.draining else "held" if member.waiting else "live"
