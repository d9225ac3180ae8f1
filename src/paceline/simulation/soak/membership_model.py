"""What a witness knows of workers that come and go: who waits for a round, who is to leave, whose data is whose."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from paceline.core.messages import Deal, Reply
from paceline.simulation.soak.violation import require


class Membership:
    """Kept beside the clocks of those at work, from the messages alone."""

    def __init__(self, num_workers: int, elastic: bool, in_rounds: bool) -> None:
        self._elastic, self._in_rounds = elastic, in_rounds
        self._newest = Deal(0, tuple(range(num_workers)))
        self._told: dict[int, tuple[int, int]] = {}
        self.begun = False
        """Whether a push was made since the server began, or began again."""
        self.coming: dict[int, int] = {}
        """Who waits for the next round, and the version it came at."""
        self.draining: set[int] = set()
        """Who was asked to leave and has not been told yet."""
        self.dismissed: set[int] = set()
        """Who has been told so, and has not joined again."""

    def clear(self) -> None:
        """The server begins again; who was asked to leave still is."""
        self.begun = False
        self.coming.clear()

    def waits(self, worker: int, clocks: Mapping[int, int], version: int) -> bool:
        """Whether a newcomer has to wait for the next round."""
        waits = self._elastic and self._in_rounds and self.begun and bool(clocks) and worker not in self.draining
        self.dismissed.discard(worker)
        if waits:
            self.coming[worker] = version
        return waits

    def enter(self, worker: int, clocks: MutableMapping[int, int], version: int) -> None:
        """An answer lets a newcomer into its first round, when that begins."""
        came_at = self.coming.pop(worker, None)
        if came_at is not None:
            begins = version > came_at or not clocks
            require(begins, "held", "worker {} is let into a round that others are in: {}", worker, clocks)
            clocks[worker] = 0

    def require_entrance(self, clocks: Mapping[int, int]) -> None:
        """Nobody waits for a round that nobody is in."""
        require(not self.coming or bool(clocks), "held", "workers {} wait for a round of nobody", self.coming)

    def deal(self, reply: Reply, accepted: int, clocks: Mapping[int, int]) -> None:
        """An answer carries the newest deal, and in that everybody at work has a part, and nobody else."""
        at_work = tuple(sorted((clocks.keys() | self.coming.keys()) - self.draining))
        deal = reply.deal or Deal(0, self._newest.members if not self._newest.generation else ())
        if not self._elastic:
            require(reply.deal is None, "deal", "{} in a run whose data stays where it is", reply)
            return
        due = self._newest if at_work == self._newest.members else Deal(self._newest.generation + 1, at_work)
        require(deal == due, "deal", "{} carries {}, {} is due", reply, deal, due)
        self._newest = due
        if due.generation and self._told.get(reply.worker, (0, 0))[0] != due.generation:
            self._told[reply.worker] = due.generation, accepted

    def before(self, worker: int) -> int:
        """How many batches of `worker` had been accepted when it was told its deal."""
        return self._told.get(worker, (0, 0))[1]
