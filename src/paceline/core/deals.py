"""Who has a share of the data: a new deal whenever other workers are at work than shared in the last one.

The server makes it with its next answer, so that it follows from the inputs alone and a replay makes it again.
"""

from __future__ import annotations

from typing import Any

from paceline.core.messages import Deal


class Deals:
    """The newest deal, and what each worker was told last: its deal, and how many of its batches counted before."""

    def __init__(self, num_workers: int) -> None:
        self.now = Deal(0, tuple(range(num_workers)))
        self._told: dict[int, tuple[Deal, int]] = {}

    def look(self, at_work: tuple[int, ...]) -> None:
        """These workers are at work; if they are others than before, the data is dealt anew.

        >>> deals = Deals(2)
        >>> deals.look((0, 1)), deals.look((1,)), deals.look((1, 2)), deals.now
        (None, None, None, Deal(generation=2, members=(1, 2)))
        """
        if at_work and at_work != self.now.members:
            self.now = Deal(self.now.generation + 1, at_work)

    def tell(self, worker: int, accepted: int) -> None:
        """`worker` is about to be answered: batches of a new deal are counted from here."""
        told = self._told.get(worker)
        if self.now.generation and (told is None or told[0] != self.now):
            self._told[worker] = self.now, accepted

    def told(self, worker: int) -> tuple[Deal | None, int]:
        """What `worker` was told last, and the count of its batches before that; no deal: as the config divides."""
        return self._told.get(worker, (None, 0))

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {"now": self.now, "told": [[worker, *told] for worker, told in sorted(self._told.items())]}

    def restore(self, facts: dict[str, Any]) -> None:
        """The inverse of `facts`."""
        self.now = _deal(facts["now"])
        self._told = {worker: (_deal(deal), accepted) for worker, deal, accepted in facts["told"]}


def _deal(values: Any) -> Deal:
    generation, members = values
    return Deal(generation, tuple(members))
