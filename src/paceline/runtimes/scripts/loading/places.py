"""Where a worker's loop is: in its data, in the division of the data, and in its schedules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from paceline.core.messages import DataAssignment, Reply
from paceline.errors import UserError
from paceline.runtimes.scripts.adopt import FollowedScheduler, Place
from paceline.runtimes.scripts.loading.divisions import Division, Divisions
from paceline.runtimes.scripts.loading.loader import WorkerLoader
from paceline.system.terminal import counted

NUM_OF_DIVISION = 5
"""Numbers that a loop says of how its data is divided, if that can change: the pass that it will have begun by its next
push, the newest generation of divisions that it has heard of, and the division of its pass."""


BEHIND = "`for epoch in session.epochs(N)` begins behind them"


def _finished(loader: WorkerLoader) -> tuple[str, str]:
    """The passes that are finished, and their loops, as the beginnings of clauses."""
    several = f"passes 1 to {loader.finished} were", "their loops have"
    return several if loader.finished > 1 else ("pass 1 was", "its loop has")


class LoopPlaces:
    """What a loop says with each push of its first optimizer, for the worker's next process to go on there."""

    def __init__(self, loaders: Sequence[WorkerLoader], schedulers: Sequence[Any], divisions: Divisions) -> None:
        self._loaders, self._divisions = loaders, divisions
        self._schedulers = [FollowedScheduler(one, self.skips_passes, self._positions) for one in schedulers]
        self._begin = 2 * len(loaders)
        self._end = self._begin + (NUM_OF_DIVISION if divisions.is_elastic and loaders else 0)
        self.num = self._end + len(schedulers)
        self._said_empty = False
        self.came_late = False  # whether the loop begins with a pass in the middle of the run; perhaps none is left

    def tell_empty_passes(self) -> None:
        """Print one line if the loop runs through finished passes, at the first of them."""
        for loader in self._loaders:
            loader.on_empty = self._say_empty

    def _say_empty(self) -> None:
        if not self._said_empty and (loader := self._without_batch()) is not None:
            self._said_empty = True
            passes, their = _finished(loader)
            what = f"{passes} finished before this worker started: {their} no batch, and what stands behind runs again"
            print(f"{what}; {BEHIND}", file=sys.stderr)

    def _without_batch(self) -> WorkerLoader | None:
        """A loader whose finished passes the loop has begun, if no loader has given it a batch in this process."""
        has_batch = any(loader.has_given for loader in self._loaders)
        return next((loader for loader in self._loaders if loader.empty_passes and not has_batch), None)

    def why_empty(self) -> str | None:
        """Say why the loop has had passes in this process and no batch; None if that is not so."""
        if (loader := self._without_batch()) is None:
            return None
        if loader.counts_left:
            what = f"this worker had trained on the last batch of pass {loader.finished} before it started again"
            return f"{what}, so that loop had no batch: what stands behind it must allow for that"
        passes, their = _finished(loader)
        return f"{passes} finished before this worker started, so {their} no batch: {BEHIND}"

    def require_new_pass(self) -> None:
        """Raise UserError if the loop ends before it comes to where this worker has been: it counts passes again."""
        loader = self._without_batch()
        if loader is not None and loader.begun < loader.passes and not (loader.counts_left or self.came_late):
            what = f"the loop ended after {counted(loader.begun, 'pass')} without a batch"
            passes, _ = _finished(loader)
            raise UserError(
                f"{what}: {passes} finished before this worker started, and it counted them again: {BEHIND}"
            )

    @property
    def can_go_on(self) -> bool:
        """Whether every scheduler can be brought to where another process was."""
        return all(scheduler.can_go_on for scheduler in self._schedulers)

    def skips_passes(self) -> bool:
        """Whether the loop runs through passes that an earlier incarnation has finished."""
        return any(loader.skips_passes for loader in self._loaders)

    def _positions(self) -> Place:
        return tuple(loader.position for loader in self._loaders)

    def said(self) -> list[float]:
        """The numbers of the next push."""
        places: list[float] = [number for loader in self._loaders for number in loader.handed_out.trained]
        if self._end > self._begin:
            places += [self._loaders[0].pass_at_next_push(), *self._divisions.said_in(int(places[0]))]
        return [*places, *(scheduler.count_after(self._positions()) for scheduler in self._schedulers)]

    def begin_at(self, reply: Reply, made: int, numbers: list[int]) -> bool:
        """Go on where this worker's last process was after `made` steps; return whether there is a place to go on from.

        A worker that comes to a run whose data the others have divided without it begins with the first pass that is
        divided over it, too, and with the schedule of another worker: `numbers` are those of that one.
        """
        assignment, division, counts = reply.assignment, numbers[self._begin : self._end], numbers[self._end :]
        if division and made:
            _, generation, *known = division
            self._divisions.go_on(Division(*known), generation)
        told = assignment.generation if assignment is not None else 0
        self.came_late = told > 0 and (not made or told > self._divisions.generation + 1)
        goes_on = bool(numbers) and (made > 0 or (self.came_late and any(numbers)))
        for place, loader in enumerate(self._loaders):
            if self.came_late and assignment is not None:
                loader.resume_at(assignment.first_pass, 0)
            elif goes_on:
                loader.resume_at(*numbers[2 * place : 2 * place + 2])
        self._divisions.follow(assignment, self._passes)
        for scheduler, count in zip(self._schedulers, counts if goes_on else (), strict=goes_on):
            scheduler.go_on(count)
        return goes_on

    def hear(self, assignment: DataAssignment | None) -> None:
        """Divide the data as the newest reply says; tell the user if that comes too late for a pass."""
        note = self._divisions.follow(assignment, self._passes)
        if note is not None and self._loaders:
            print(note, file=sys.stderr)

    @property
    def _passes(self) -> int:
        return max((loader.passes for loader in self._loaders), default=0)
