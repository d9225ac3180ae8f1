"""When the server replies: the whole difference between the strategies.

Each policy is told who joined, pushed and left, and answers with a Decision. Pure bookkeeping.
"""

from __future__ import annotations

from typing import Any

from paceline.interfaces import Decision


class AtOnce:
    """`async`: every push is applied and answered as it comes."""

    def join(self, worker: int) -> None:
        pass

    def push(self, worker: int, staleness: int) -> Decision:
        return Decision(apply=(worker,), release=(worker,))

    def leave(self, worker: int) -> Decision:
        return Decision()

    def clear(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        pass


class Rounds:
    """`sync` and `backup`: a round closes when all live workers but `spare` have pushed.

    A push from an earlier round (staleness above zero) is dropped and its worker sent on with the newest weights.
    Pushes are applied in worker order, whatever order they came in; who has waited longest is answered first.
    """

    def __init__(self, spare: int = 0) -> None:
        self.spare = spare
        self._live: set[int] = set()
        self._pushed: dict[int, None] = {}  # in order of arrival

    def join(self, worker: int) -> None:
        self._live.add(worker)

    def push(self, worker: int, staleness: int) -> Decision:
        if staleness > 0:
            return Decision(release=(worker,), dropped=True)
        self._pushed[worker] = None
        return self._close()

    def leave(self, worker: int) -> Decision:
        self._live.discard(worker)
        self._pushed.pop(worker, None)
        return self._close()

    def _close(self) -> Decision:
        needed = max(1, len(self._live) - self.spare)
        if len(self._pushed) < needed:
            return Decision()
        closed = tuple(self._pushed)
        self._pushed.clear()
        return Decision(apply=tuple(sorted(closed)), release=closed)

    def clear(self) -> None:
        self._live.clear()
        self._pushed.clear()

    def facts(self) -> dict[str, Any]:
        return {"live": sorted(self._live), "pushed": list(self._pushed)}

    def restore(self, facts: dict[str, Any]) -> None:
        self._live, self._pushed = set(facts["live"]), dict.fromkeys(facts["pushed"])


class Bounded:
    """`bounded:S`: a worker runs at most `bound` steps ahead of the slowest; pushes are applied as they come.

    A newcomer starts at the slowest worker's clock.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._clocks: dict[int, int] = {}
        self._waiting: set[int] = set()

    def join(self, worker: int) -> None:
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def push(self, worker: int, staleness: int) -> Decision:
        self._clocks[worker] += 1
        self._waiting.add(worker)
        return Decision(apply=(worker,), release=self._within_bound())

    def leave(self, worker: int) -> Decision:
        self._clocks.pop(worker, None)
        self._waiting.discard(worker)
        return Decision(release=self._within_bound())

    def _within_bound(self) -> tuple[int, ...]:
        slowest = min(self._clocks.values(), default=0)
        free = tuple(w for w in sorted(self._waiting) if self._clocks[w] - slowest <= self.bound)
        self._waiting.difference_update(free)
        return free

    def clear(self) -> None:
        self._clocks.clear()
        self._waiting.clear()

    def facts(self) -> dict[str, Any]:
        return {"clocks": sorted(self._clocks.items()), "waiting": sorted(self._waiting)}

    def restore(self, facts: dict[str, Any]) -> None:
        self._clocks = {int(worker): int(clock) for worker, clock in facts["clocks"]}
        self._waiting = set(facts["waiting"])
