"""When the server applies pushes and replies to workers: the whole difference between the strategies."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline.interfaces import Decision


class Async:
    """`async`: apply and answer every push on arrival."""

    def join(self, worker: int) -> Decision:
        return Decision(release=(worker,))

    def push(self, worker: int, staleness: int) -> Decision:
        return Decision(apply=(worker,), release=(worker,))

    def leave(self, worker: int) -> Decision:
        return Decision()

    def unblock(self) -> Decision:
        return Decision()

    def clear(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        pass


class DropStale(Async):
    """`ringmaster:R` (arXiv 2501.16168): like `async`, but drop a push of staleness R or more.

    Its worker computes the same batch again, on the newest weights.

    >>> DropStale(2).push(0, 1), DropStale(2).push(0, 2).dropped
    (Decision(apply=(0,), release=(0,), dropped=False), True)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def push(self, worker: int, staleness: int) -> Decision:
        if staleness >= self.limit:
            return Decision(release=(worker,), dropped=True)
        return super().push(worker, staleness)


class Barrier:
    """`sync` and `backup`: a barrier that opens when all of `num_workers` but `spare` have pushed, or all live ones.

    So a lost worker uses up a spare, and the batch of an update stays as large as possible. If more than `num_workers`
    are live, because others joined, the barrier waits for all of these but `spare`.

    A push from an earlier round (staleness above zero) is dropped, and its worker goes on with the newest weights.
    Pushes are applied in worker order; the worker that has waited longest is answered first. With `joins_wait`, a
    worker that joins after the first push waits for the next round instead of holding up this one.
    """

    def __init__(self, spare: int = 0, joins_wait: bool = False, num_workers: int = 0) -> None:
        self.spare, self._joins_wait, self._num_workers = spare, joins_wait, num_workers
        self._begun = False
        self._live: set[int] = set()
        self._pushed: dict[int, None] = {}  # in order of arrival
        self._next: dict[int, None] = {}  # in order of arrival

    def join(self, worker: int) -> Decision:
        if self._joins_wait and self._begun and self._live:
            self._next[worker] = None
            return Decision()
        self._live.add(worker)
        return Decision(release=(worker,))

    def push(self, worker: int, staleness: int) -> Decision:
        if staleness > 0:
            return Decision(release=(worker,), dropped=True)
        self._begun = True
        self._pushed[worker] = None
        return self._close()

    def leave(self, worker: int) -> Decision:
        self._live.discard(worker)
        self._pushed.pop(worker, None)
        self._next.pop(worker, None)
        return self._close()

    def unblock(self) -> Decision:
        return self._close(1) if self._pushed else Decision()

    def _close(self, at_most: int | None = None) -> Decision:
        live = len(self._live)
        needed = at_most or max(1, min(live, max(live, self._num_workers) - self.spare))
        if len(self._pushed) < needed and (self._live or not self._next):
            return Decision()
        closed, entering = tuple(self._pushed), tuple(self._next)
        self._live.update(entering)
        self._pushed.clear()
        self._next.clear()
        return Decision(apply=tuple(sorted(closed)), release=closed + entering)

    def clear(self) -> None:
        self._begun = False
        self._live.clear()
        self._pushed.clear()
        self._next.clear()

    def facts(self) -> dict[str, Any]:
        facts = {"live": sorted(self._live), "pushed": list(self._pushed)}
        return {**facts, "next": list(self._next), "begun": self._begun} if self._joins_wait else facts

    def restore(self, facts: dict[str, Any]) -> None:
        self._live, self._pushed = set(facts["live"]), dict.fromkeys(facts["pushed"])
        self._next, self._begun = dict.fromkeys(facts.get("next", ())), facts.get("begun", False)


class StaleSynchronous:
    """`bounded:S`: apply every push on arrival; a worker is at most `bound` steps ahead of the slowest.

    A worker that joins starts at the clock of the slowest.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._clocks: dict[int, int] = {}
        self._waiting: dict[int, set[int]] = {}  # by clock
        self._at: Counter[int] = Counter()  # workers by clock
        self._slowest = 0

    def join(self, worker: int) -> Decision:
        self._clocks[worker] = self._slowest
        self._at[self._slowest] += 1
        return Decision(release=(worker,))

    def push(self, worker: int, staleness: int) -> Decision:
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        self._at[clock + 1] += 1
        self._waiting.setdefault(clock + 1, set()).add(worker)
        self._at[clock] -= 1
        return Decision(apply=(worker,), release=self._within_bound(clock + 1))

    def leave(self, worker: int) -> Decision:
        clock = self._clocks.pop(worker, None)
        if clock is None:
            return Decision()
        self._at[clock] -= 1
        self._waiting.get(clock, set()).discard(worker)
        return Decision(release=self._within_bound(None))

    def unblock(self) -> Decision:
        """Their clocks stay ahead, so each waits again after its next push."""
        free = sorted(worker for workers in self._waiting.values() for worker in workers)
        self._waiting.clear()
        return Decision(release=tuple(free))

    def _within_bound(self, pushed: int | None) -> tuple[int, ...]:
        """Workers that may go on: if the slowest has moved, all within the bound, else those at the clock `pushed`."""
        before = self._slowest
        if not self._clocks:
            self._slowest = 0
            self._at.clear()
        while self._clocks and not self._at[self._slowest]:
            del self._at[self._slowest]
            self._slowest += 1
        moved = self._slowest != before
        clocks = list(self._waiting) if moved else [pushed] if pushed is not None else []
        free: list[int] = []
        for clock in clocks:
            if clock - self._slowest <= self.bound:
                free += self._waiting.pop(clock, ())
        return tuple(sorted(free))

    def clear(self) -> None:
        self._clocks.clear()
        self._waiting.clear()
        self._at.clear()
        self._slowest = 0

    def facts(self) -> dict[str, Any]:
        waiting = sorted(worker for workers in self._waiting.values() for worker in workers)
        return {"clocks": sorted(self._clocks.items()), "waiting": waiting}

    def restore(self, facts: dict[str, Any]) -> None:
        self.clear()
        self._clocks = {int(worker): int(clock) for worker, clock in facts["clocks"]}
        self._at.update(self._clocks.values())
        self._slowest = min(self._at, default=0)
        for worker in facts["waiting"]:
            self._waiting.setdefault(self._clocks[worker], set()).add(worker)
