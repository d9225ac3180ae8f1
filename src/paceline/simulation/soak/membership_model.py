"""Model of elastic membership: the workers that wait for a round or drain, and the data of each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from paceline.core.messages import DataAssignment, Reply
from paceline.simulation.soak.violation import require


class MembershipModel:
    """Expected membership, derived from the messages alone; `clocks` has the pushes of each active worker."""

    def __init__(self, num_workers: int, elastic: bool, in_rounds: bool) -> None:
        self._elastic, self._in_rounds = elastic, in_rounds
        self._newest = DataAssignment(0, tuple(range(num_workers)))
        self._assigned: dict[int, tuple[int, int]] = {}
        self.begun = False  # whether a push has arrived since the server started or restarted
        self.waiting: dict[int, int] = {}  # workers that wait for the next round, and the version at which each joined
        self.draining: set[int] = set()  # workers asked to leave that have not had their last reply
        self.released: set[int] = set()  # workers that had their last reply and have not joined again

    def clear(self) -> None:
        """Reset after a restart of the server; draining workers stay so."""
        self.begun = False
        self.waiting.clear()

    def on_join(self, worker: int, clocks: Mapping[int, int], version: int) -> bool:
        """Record a join; return whether the worker has to wait for the next round."""
        waits = self._elastic and self._in_rounds and self.begun and bool(clocks) and worker not in self.draining
        self.released.discard(worker)
        if waits:
            self.waiting[worker] = version
        return waits

    def on_reply(self, worker: int, clocks: MutableMapping[int, int], version: int) -> None:
        """Record a reply to a waiting worker, which must come when a round begins."""
        joined_at = self.waiting.pop(worker, None)
        if joined_at is not None:
            begins = version > joined_at or not clocks
            require(begins, "held", "worker {} enters a round that has begun: {}", worker, clocks)
            clocks[worker] = 0

    def check_waiting(self, clocks: Mapping[int, int]) -> None:
        """Require an active worker if others wait for the next round."""
        require(not self.waiting or bool(clocks), "held", "workers {} wait for a round without workers", self.waiting)

    def check_assignment(self, reply: Reply, accepted: int, clocks: Mapping[int, int]) -> None:
        """Require that a reply carries the newest data assignment, with exactly the active workers."""
        at_work = tuple(sorted((clocks.keys() | self.waiting.keys()) - self.draining))
        if not self._elastic:
            require(reply.assignment is None, "deal", "{} in a run with a fixed data assignment", reply)
            return
        assignment = reply.assignment or DataAssignment(0, self._newest.members if not self._newest.generation else ())
        due = self._newest if at_work == self._newest.members else DataAssignment(self._newest.generation + 1, at_work)
        require(assignment == due, "deal", "{} carries {}, {} is due", reply, assignment, due)
        self._newest = due
        if due.generation and self._assigned.get(reply.worker, (0, 0))[0] != due.generation:
            self._assigned[reply.worker] = due.generation, accepted

    def accepted_before(self, worker: int) -> int:
        """Return how many batches of `worker` were accepted before it got its data assignment."""
        return self._assigned.get(worker, (0, 0))[1]
