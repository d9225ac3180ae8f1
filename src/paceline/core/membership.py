"""What the server knows about each worker: progress, liveness, and its share of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.messages import DataAssignment

SILENCE_FACTOR = 20.0
"""A worker is silent after this many usual intervals without a push; uneven steps alone never take so long."""
SMOOTHING, OUTLIER = 0.1, 3.0
"""Of the running mean of a worker's interval: the weight of a new one, and its cap as a multiple of the mean.
The foresight rules share them: they estimate the same interval over many runs at once."""


@dataclass(slots=True)
class Member:
    """One worker, over all its incarnations."""

    incarnation: int
    quota: int | None
    live: bool = True
    waiting: bool = True
    accepted: int = 0  # batches whose pushes count. The quota is in batches, too.
    seq: int = -1
    serial: int = -1
    version: int = 0
    settled: int = -1  # where it saved its own state with its last push that became part of an update (see `saved`)
    pushes: int = 0
    steps: int = 0  # local steps that its last reply asked for; `lr` is their learning rate
    lr: float = 0.0
    draining: bool = False  # the worker is to leave after the push that it is computing
    released: bool = False  # a reply has ended the work of this worker alone
    threads: int = 0  # CPU threads it computes with, which some sums depend on; 0: unknown
    usual: float = 0.0  # running mean of the updates between a reply and its push; 0: the worker has not pushed yet
    silent: bool = False  # the worker has not pushed for much longer than usual
    samples: int = 0  # samples of this incarnation's pushes: the weight of its running statistics
    departed: bool = False  # the worker left before the run was over, with work left
    own_loop: bool = False  # its dropped pushes count towards the quota
    dropped: int = 0  # pushes that were dropped, if they count towards the quota
    discarded: int = 0  # pushes of this incarnation that the policy dropped, or the guard discarded
    expelled: bool = False  # the worker was turned out, and does not come back before the run is resumed

    @property
    def saved(self) -> int:
        """Where the worker saved its own state with the last push that was not dropped (see `WorkerBuffers`)."""
        return self.seq - self.discarded

    @property
    def quota_reached(self) -> bool:
        """Whether the worker has reached its quota."""
        return self.quota is not None and self.accepted + self.dropped >= self.quota

    @property
    def inactive(self) -> bool:
        """Whether the worker has no work left."""
        return self.released or self.quota_reached

    def record_push(self, version: int) -> None:
        """Learn from a push that arrives at `version` of the weights.

        >>> member = Member(0, None)
        >>> for version in (10, 20, 120):
        ...     member.record_push(version)
        ...     member.version = version
        >>> member.usual
        12.0
        """
        interval = max(1, version - self.version)
        usual = self.usual or interval
        self.usual = usual + SMOOTHING * (min(interval, OUTLIER * usual) - usual)
        self.silent = False

    def fell_silent(self, version: int, num_live: int) -> bool:
        """Whether the worker has become silent since the last check; a stopped worker may still push later."""
        if self.silent or self.waiting or self.inactive or not self.live:
            return False
        self.silent = version - self.version > SILENCE_FACTOR * max(self.usual, num_live)
        return self.silent


class DataAssignments:
    """How the data is assigned: the newest assignment, and for each worker the one that its last reply named.

    The batches of an assignment are counted from 0, so each entry also holds how many batches counted before it.
    """

    def __init__(self, num_workers: int) -> None:
        self.now = DataAssignment(0, tuple(range(num_workers)))
        self.next_pass: Callable[[], int] = lambda: 0  # the first pass that no user's own loop can have begun
        self._told: dict[int, tuple[DataAssignment, int]] = {}

    def look(self, at_work: tuple[int, ...]) -> None:
        """Assign the data to the workers `at_work`, if these have changed.

        >>> assignments = DataAssignments(2)
        >>> assignments.look((0, 1)), assignments.look((1,)), assignments.look((1, 2)), assignments.now
        (None, None, None, DataAssignment(generation=2, members=(1, 2), first_pass=0))
        """
        if at_work and at_work != self.now.members:
            self.now = DataAssignment(self.now.generation + 1, at_work, self.next_pass())

    def tell(self, worker: int, accepted: int) -> None:
        """Move `worker` to the newest assignment; its batches are counted from here."""
        told = self._told.get(worker)
        if self.now.generation and (told is None or told[0] != self.now):
            self._told[worker] = self.now, accepted

    def told(self, worker: int) -> tuple[DataAssignment | None, int]:
        """The assignment of `worker` and its batches before that; None: the config divides the data."""
        return self._told.get(worker, (None, 0))

    def facts(self) -> dict[str, Any]:
        """Everything needed to go on from here, as JSON values."""
        return {"now": self.now, "told": [[worker, *told] for worker, told in sorted(self._told.items())]}

    def restore(self, facts: dict[str, Any]) -> None:
        """Go on from what `facts` returned."""
        self.now = _assignment(facts["now"])
        self._told = {worker: (_assignment(assignment), accepted) for worker, assignment, accepted in facts["told"]}


def _assignment(values: Any) -> DataAssignment:
    generation, members, *first_pass = values
    return DataAssignment(generation, tuple(members), *first_pass)
