"""Which part of the data a worker takes in each pass, in a run whose workers may join and leave."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.config import RunConfig
from paceline.core.messages import DataAssignment
from paceline.errors import UserError


class Division(NamedTuple):
    """Part number `part` of `parts` of the data; each generation of parts has an order of its own."""

    generation: int
    part: int
    parts: int


class Divisions:
    """The division of each pass: the first one, and from some pass on the one after workers joined or left.

    Every worker hears of a division before it begins the first pass of it, so all divide each pass alike.
    """

    def __init__(self, config: RunConfig, worker: int) -> None:
        self.worker, self.is_elastic = worker, config.max_workers is not None
        workers = config.workers or 1
        self._by_first_pass = [(0, Division(0, worker % workers, workers))]
        self.generation = 0  # of the newest division that the worker has heard of
        self.is_split = False  # whether the script has taken its part of some data itself

    @property
    def newest(self) -> Division:
        return self._by_first_pass[-1][1]

    def of_pass(self, number: int) -> Division:
        """The division of pass `number`."""
        return next(division for first, division in reversed(self._by_first_pass) if first <= number)

    def follow(self, assignment: DataAssignment | None, passes: int) -> str | None:
        """Divide the data as a reply says. Return what the user should know if that comes too late for a pass.

        `passes` have begun in this worker.
        """
        if assignment is None or assignment.generation == self.generation:
            return None
        generation, members, first = assignment
        is_missed, self.generation = generation > self.generation + 1 and bool(passes), generation
        begins = max(first, passes)
        self._by_first_pass = [one for one in self._by_first_pass if one[0] < begins] or self._by_first_pass[:1]
        self._by_first_pass.append((begins, Division(generation, members.index(self.worker), len(members))))
        if not is_missed and begins == first:
            return None
        what = f"worker {self.worker} hears late that workers joined or left: it divides the data anew from pass"
        return f"{what} {begins + 1} on, others from {first + 1}; samples in between may be left out or come twice"

    def said_in(self, number: int) -> list[int]:
        """What the worker says of its divisions with a push in pass `number`."""
        return [self.generation, *self.of_pass(number)]

    def go_on(self, division: Division, generation: int) -> None:
        """Go on in the pass of an earlier process of this worker, which had heard of `generation`."""
        self._by_first_pass = [(0, division)]
        self.generation = generation


def part_of(data: Any, config: RunConfig, divisions: Divisions) -> Any:
    """Return a worker's part of `data`, a run of neighbours along its first axis: tensors, arrays, lists."""
    if divisions.is_elastic:
        what = f"session.split(...): with --max-workers {config.max_workers} workers join and leave"
        raise UserError(f"{what}, and this part would stay as it is: give session.prepare(...) the data, or a loader")
    _, worker, workers = divisions.newest
    try:
        length = len(data)
        part = slice(worker * length // workers, (worker + 1) * length // workers)
        found = data[part]
    except (TypeError, KeyError, IndexError) as error:
        what = f"session.split({type(data).__name__}): it cannot be cut into parts ({error})"
        raise UserError(f"{what}: give a tensor, an array or a list") from None
    if not part.stop - part.start:
        raise UserError(f"session.split(...): {length} items for {workers} workers: use fewer workers")
    divisions.is_split = True
    return found


def require_one_loader(config: RunConfig, loaders: int, optimizers: int) -> None:
    """Refuse what cannot be divided again, or served, while workers join and leave."""
    asked = f"--max-workers {config.max_workers}"
    if config.max_workers is not None and loaders > 1:
        raise UserError(f"{asked}: session.prepare(...) got {loaders} loaders, and one can be divided again: give one")
    if config.max_workers is not None and optimizers > 1:
        what = (
            f"{asked}: the loop has {optimizers} optimizers, and a worker that joins would meet each in another round"
        )
        raise UserError(f"{what}; leave it out")
