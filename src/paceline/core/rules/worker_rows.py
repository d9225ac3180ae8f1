"""Tables with one row per worker, [..., places, P], and what the rules that use them share.

A worker is an int, or over many runs a tensor with one number per run: then rows are gathered and scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, arange, as_tensor, float32

from paceline.core.optimizers import GradientTransform, Optimizer
from paceline.core.rules.plain import StatelessHooks
from paceline.interfaces import Arrival, State


def table(weights: Tensor, max_workers: int) -> Tensor:
    """A row of zeros like `weights` for each of `max_workers` workers."""
    return weights.new_zeros((*weights.shape[:-1], max_workers, weights.shape[-1]))


def place_in(rows: Tensor, worker: int | Tensor) -> int | Tensor:
    """The index of a worker's row in every table of this shape: its number, or over many runs one index per run."""
    if isinstance(worker, Tensor):
        runs, max_workers = rows.shape[:2]
        return worker + arange(0, runs * max_workers, max_workers, device=rows.device)
    return worker


def read(rows: Tensor, place: int | Tensor) -> Tensor:
    """The row at `place`: a view into the table, or over many runs a copy of each run's row.

    >>> rows = arange(8.0).view(2, 2, 2)
    >>> read(rows[0], 1).tolist(), read(rows, place_in(rows, arange(2))).tolist()
    ([2.0, 3.0], [[0.0, 1.0], [6.0, 7.0]])
    """
    return rows.flatten(0, 1).index_select(0, place) if isinstance(place, Tensor) else rows[place]


def write(rows: Tensor, place: int | Tensor, row: Tensor) -> None:
    """Copy `row` into the table."""
    if isinstance(place, Tensor):
        rows.flatten(0, 1).index_copy_(0, place, row)
    else:
        rows[place].copy_(row)


def put_back(rows: Tensor, place: int | Tensor, row: Tensor) -> None:
    """Store a row that was read and changed in place; a view needs no copy."""
    if isinstance(place, Tensor):
        write(rows, place, row)


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """Write the sum of all rows to `out`, added in worker order.

    >>> total = torch.zeros(2)
    >>> sum_rows(arange(6.0).view(3, 2), total)
    >>> total.tolist()
    [6.0, 9.0]
    """
    first, *others = rows.unbind(-2)
    out.copy_(first)
    for row in others:
        out.add_(row)


def pushers_place(rows: Tensor, arrival: Arrival) -> int | Tensor:
    """The row of the worker that pushed; a rule with one row per worker never gets the mean of a round."""
    assert arrival.worker is not None, "a rule that knows its workers was handed the mean of several"
    return place_in(rows, arrival.worker)


class MomentumRule(StatelessHooks):
    """Base class for rules with their own momentum instead of an optimizer."""

    def __init__(self, momentum: float | Tensor, prepared: GradientTransform | None = None) -> None:
        self.momentum = as_tensor(momentum, dtype=float32)
        self.prepared = prepared or GradientTransform()

    def move_to(self, weights: Tensor) -> None:
        """Move the momentum and the decay to the device of the weights."""
        self.prepared.move_to(weights.device)
        self.momentum = self.momentum.to(weights.device)


class WorkerMomentumRule(MomentumRule):
    """Base class for rules with their own momentum and a row for each of `max_workers` workers."""

    def __init__(self, momentum: float | Tensor, max_workers: int, prepared: GradientTransform | None = None) -> None:
        super().__init__(momentum, prepared)
        self.max_workers = max_workers


class RemembersSent(StatelessHooks):
    """Base class for rules that remember the weights that each worker was sent; costs one more copy per reply."""

    def __init__(self, optimizer: Optimizer, max_workers: int) -> None:
        self.optimizer, self.max_workers = optimizer, max_workers

    def start_sent(self, weights: Tensor) -> State:
        """The state at the start: every worker has the initial weights."""
        return {"sent": weights.unsqueeze(-2).repeat_interleave(self.max_workers, -2)}

    def leave(self, state: State, worker: int) -> None:
        read(state["sent"], worker).zero_()

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        write(state["sent"], place_in(state["sent"], worker), weights)
        out.copy_(weights)


Scalar: TypeAlias = float | Tensor
"""A float for one run, a tensor [runs, 1] for many; a float costs the update of a small model far less."""


def load(kept: Tensor) -> Scalar:
    """Read a number of the state: a float for one run ([1] or []), a tensor for many ([runs, 1])."""
    return float(kept.item()) if kept.dim() < 2 else kept


def keep(place: Tensor, value: Scalar) -> None:
    """Write a number of the state."""
    if isinstance(value, Tensor):
        place.copy_(value)
    elif place.is_cuda:
        place.fill_(value)
    else:
        place.numpy()[...] = value  # the same memory, at a third of the cost


def load_all(kept: Tensor) -> list[Scalar]:
    """Read several numbers of the state: K floats for one run ([K]), K tensors [runs, 1] for many ([runs, K])."""
    return list(kept.tolist()) if kept.dim() == 1 else list(torch.split(kept, 1, -1))


def keep_all(kept: Tensor, values: Sequence[Scalar]) -> None:
    """Write what `load_all` reads.

    >>> row = torch.zeros(2)
    >>> keep_all(row, [1.0, 2.0])
    >>> load_all(row)
    [1.0, 2.0]
    """
    if kept.dim() > 1:
        torch.cat([torch.as_tensor(value).to(kept.dtype) for value in values], -1, out=kept)
    elif kept.is_cuda:
        kept.copy_(torch.tensor(values, dtype=kept.dtype))
    else:
        kept.numpy()[:] = values


def at_least(value: Scalar, least: float | Tensor) -> Scalar:
    """The larger of the two.

    >>> at_least(0.5, 1.0), at_least(torch.tensor([[0.5], [2.0]]), 1.0).tolist()
    (1.0, [[1.0], [2.0]])
    """
    return value.clamp(min=least) if isinstance(value, Tensor) else max(value, least)


def at_most(value: Scalar, most: Scalar) -> Scalar:
    """The smaller of the two.

    >>> at_most(3, 1.0), at_most(torch.tensor([[0], [3]]), torch.tensor([[1.0], [2.0]])).tolist()
    (1.0, [[0.0], [2.0]])
    """
    if isinstance(most, Tensor):
        return torch.minimum(torch.as_tensor(value).to(most.dtype), most)
    return value.clamp(max=most) if isinstance(value, Tensor) else min(value, most)


def add_scaled(vector: Tensor, other: Tensor, factor: Scalar, out: Tensor | None = None) -> None:
    """vector + factor other, into `out` or in place."""
    out = vector if out is None else out
    if isinstance(factor, Tensor):
        torch.addcmul(vector, other, factor.to(vector.dtype), out=out)
    else:
        torch.add(vector, other, alpha=factor, out=out)


def scale(vector: Tensor, factor: Scalar) -> None:
    """vector *= factor"""
    vector.mul_(factor.to(vector.dtype) if isinstance(factor, Tensor) else factor)


def move_towards(vector: Tensor, other: Tensor, share: Scalar) -> None:
    """vector += share (other - vector)"""
    move_between(vector, other, share, vector)


def move_between(vector: Tensor, other: Tensor, share: Scalar, out: Tensor) -> Tensor:
    """out = vector + share (other - vector)"""
    return torch.lerp(vector, other, share.to(vector.dtype) if isinstance(share, Tensor) else share, out=out)
