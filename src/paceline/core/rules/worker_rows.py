"""Tables with one row a worker, [..., places, P], and the live-weights half that most rules share.

A worker is a number, or over many runs one number a run: then rows are gathered and put back, with no branch on them.
"""

from __future__ import annotations

from torch import Tensor, arange, as_tensor, float32

from paceline.core.optimizers import Prepared
from paceline.interfaces import Arrival, State


def table(weights: Tensor, places: int) -> Tensor:
    """A row of zeros like `weights` for each of `places` workers."""
    return weights.new_zeros((*weights.shape[:-1], places, weights.shape[-1]))


def place_in(rows: Tensor, worker: int | Tensor) -> int | Tensor:
    """Where a worker's rows lie, in every table of these places: its number, or over many runs one index a run."""
    if isinstance(worker, Tensor):
        runs, places = rows.shape[:2]
        return worker + arange(0, runs * places, places, device=rows.device)
    return worker


def read(rows: Tensor, place: int | Tensor) -> Tensor:
    """The row at a place: a view into the table, or over many runs a copy of each run's row.

    >>> rows = arange(8.0).view(2, 2, 2)
    >>> read(rows[0], 1).tolist(), read(rows, place_in(rows, arange(2))).tolist()
    ([2.0, 3.0], [[0.0, 1.0], [6.0, 7.0]])
    """
    return rows.flatten(0, 1).index_select(0, place) if isinstance(place, Tensor) else rows[place]


def write(rows: Tensor, place: int | Tensor, row: Tensor) -> None:
    """Copy `row` into its place."""
    if isinstance(place, Tensor):
        rows.flatten(0, 1).index_copy_(0, place, row)
    else:
        rows[place].copy_(row)


def put_back(rows: Tensor, place: int | Tensor, row: Tensor) -> None:
    """Keep what was read and then changed in place: a view needs nothing more."""
    if isinstance(place, Tensor):
        write(rows, place, row)


def pushers_place(rows: Tensor, arrival: Arrival) -> int | Tensor:
    """The place of who pushed; a rule with a row a worker is never handed the mean of a round."""
    assert arrival.worker is not None, "a rule that knows its workers was handed the mean of several"
    return place_in(rows, arrival.worker)


class Live:
    """A rule's usual half: nothing to do for who comes or goes, plain copies handed out, the live weights scored."""

    def join(self, state: State, worker: int) -> None:
        pass

    def leave(self, state: State, worker: int) -> None:
        pass

    def lapse(self, state: State, worker: int) -> None:
        pass

    def weights_for(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        return weights


class OwnMomentum(Live):
    """The half of a rule that steps by a momentum of its own instead of an optimizer's."""

    def __init__(self, momentum: float | Tensor, prepared: Prepared | None = None) -> None:
        self.momentum = as_tensor(momentum, dtype=float32)
        self.prepared = prepared or Prepared()

    def move_to(self, weights: Tensor) -> None:
        """Bring what every update needs to where the weights are."""
        self.prepared.move_to(weights.device)
        self.momentum = self.momentum.to(weights.device)


class Sent(Live):
    """The half of a rule that remembers what each worker was sent last, one copy more a reply."""

    def __init__(self, places: int) -> None:
        self.places = places

    def start_sent(self, weights: Tensor) -> State:
        """Before anything was sent, everybody has the first weights."""
        return {"sent": weights.unsqueeze(-2).repeat_interleave(self.places, -2)}

    def leave(self, state: State, worker: int) -> None:
        read(state["sent"], worker).zero_()

    def weights_for(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        write(state["sent"], place_in(state["sent"], worker), weights)
        out.copy_(weights)
