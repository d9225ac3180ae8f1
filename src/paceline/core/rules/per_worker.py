"""Tables with one row a worker, [..., places, P], and the live-weights half that most rules share.

A worker is a number, or over many runs one number a run: then rows are gathered and put back, with no branch on them.
"""

from __future__ import annotations

from torch import Tensor, arange

from paceline.core.rules.scalars import Scalar, keep
from paceline.interfaces import Arrival, State


def table(weights: Tensor, places: int) -> Tensor:
    """A row of zeros like `weights` for each of `places` workers."""
    return weights.new_zeros((*weights.shape[:-1], places, weights.shape[-1]))


def read(rows: Tensor, worker: int | Tensor) -> Tensor:
    """The worker's row: a view into the table, or over many runs a copy of each run's row.

    >>> rows = arange(8.0).view(2, 2, 2)
    >>> read(rows[0], 1).tolist(), read(rows, arange(2)).tolist()
    ([2.0, 3.0], [[0.0, 1.0], [6.0, 7.0]])
    """
    if isinstance(worker, Tensor):
        return rows.flatten(0, 1).index_select(0, _places(rows, worker))
    return rows[worker]


def write(rows: Tensor, worker: int | Tensor, row: Tensor) -> None:
    """Copy `row` into the worker's place."""
    if isinstance(worker, Tensor):
        rows.flatten(0, 1).index_copy_(0, _places(rows, worker), row)
    else:
        rows[worker].copy_(row)


def put_back(rows: Tensor, worker: int | Tensor, row: Tensor) -> None:
    """Keep what was read and then changed in place: a view needs nothing more."""
    if isinstance(worker, Tensor):
        write(rows, worker, row)


def keep_row(rows: Tensor, worker: int | Tensor, value: Scalar) -> None:
    """The worker's number, in a table of one number a row."""
    if isinstance(worker, Tensor):
        assert isinstance(value, Tensor)
        write(rows, worker, value)
    else:
        keep(rows[worker], value)


def _places(rows: Tensor, worker: Tensor) -> Tensor:
    runs, places = rows.shape[:2]
    return worker + arange(0, runs * places, places, device=rows.device)


def pusher(arrival: Arrival) -> int | Tensor:
    """Who pushed; a rule with a row a worker is never handed the mean of a round."""
    assert arrival.worker is not None, "a rule that knows its workers was handed the mean of several"
    return arrival.worker


class Live:
    """A rule's usual half: nothing to do for who comes or goes, plain copies handed out, the live weights scored."""

    def join(self, state: State, worker: int) -> None:
        pass

    def leave(self, state: State, worker: int) -> None:
        pass

    def weights_for(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        out.copy_(weights)

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        return weights


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
        write(state["sent"], worker, weights)
        out.copy_(weights)
