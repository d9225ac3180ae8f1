"""What the server knows of each worker number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.messages import Deal

MUCH_LONGER = 20.0
"""Times its usual interval: by chance alone nobody is silent for so long, however uneven the steps."""
SMOOTHING, OUTLIER = 0.1, 3.0
"""Of the usual interval: how soon it is learned, and how much at most from one that was longer."""


@dataclass(slots=True)
class Member:
    """One worker number, over all its incarnations."""

    incarnation: int
    quota: int | None
    live: bool = True
    waiting: bool = True
    accepted: int = 0
    """Batches whose pushes count; the quota is in batches too."""
    seq: int = -1
    serial: int = -1
    version: int = 0
    pushes: int = 0
    steps: int = 0
    """What its last reply asked for, and at which learning rate."""
    lr: float = 0.0
    draining: bool = False
    """Somebody outside asked that it leaves after the push it is making."""
    dismissed: bool = False
    """It was told that it is over for it alone."""
    threads: int = 0
    """It computes on so many, which some sums depend on; 0: nobody said."""
    usual: float = 0.0
    """Updates from a reply to its push, a running mean; 0: it has not pushed yet."""
    silent: bool = False
    """It has not pushed for much longer than that."""

    @property
    def spent(self) -> bool:
        return self.quota is not None and self.accepted >= self.quota

    @property
    def done(self) -> bool:
        return self.dismissed or self.spent

    def heard(self, version: int) -> None:
        """It pushed, at `version` of the weights.

        >>> member = Member(0, None)
        >>> for version in (10, 20, 120):
        ...     member.heard(version)
        ...     member.version = version
        >>> member.usual
        12.0
        """
        interval = max(1, version - self.version)
        usual = self.usual or interval
        self.usual = usual + SMOOTHING * (min(interval, OUTLIER * usual) - usual)
        self.silent = False

    def fell_silent(self, version: int, num_live: int) -> bool:
        """Whether it is found to be silent now, and was not before: stopped or cut off, it may come back any time."""
        if self.silent or self.waiting or self.done or not self.live:
            return False
        self.silent = version - self.version > MUCH_LONGER * max(self.usual, num_live)
        return self.silent


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
