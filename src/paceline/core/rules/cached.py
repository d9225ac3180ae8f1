"""Rule `cached`: step along the mean of the latest gradients (DuDe-ASGD, arXiv 2405.16966; ACE, arXiv 2511.19066)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import Optimizer
from paceline.core.rules.plain import StatelessHooks
from paceline.core.rules.worker_rows import pushers_place, read, sum_rows, table, write
from paceline.interfaces import Arrival, State


class Cached(StatelessHooks):
    """total += g - c_i;  c_i = g;  weights = optimizer(weights, total / n)

    total / n is the mean over the n live workers; a worker that has not pushed yet counts as zeros. A worker that
    leaves, or is silent for long, is taken out of the sum. Any optimizer can step along the mean. Touches 4 tensors
    and the optimizer's: g, c_i, total, the mean.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule = torch.zeros(1), Cached(Sgd(), max_workers=2)
    >>> state = rule.start(weights)
    >>> for worker, gradient in [(0, 2.0), (1, 4.0), (1, 6.0)]:
    ...     rule.apply(weights, state, torch.tensor([gradient]), Arrival(worker, 0, torch.tensor(1.0), 2))
    ...     print(weights.item())
    -1.0
    -4.0
    -8.0
    """

    name = "cached"

    def __init__(self, optimizer: Optimizer, max_workers: int) -> None:
        self.optimizer, self.max_workers = optimizer, max_workers
        self._mean = torch.empty(0)

    def start(self, weights: Tensor) -> State:
        self._mean = torch.empty_like(weights)
        rows = {"cache": table(weights, self.max_workers), "total": torch.zeros_like(weights)}
        return {**rows, **self.optimizer.start(weights)}

    def leave(self, state: State, worker: int) -> None:
        forget(state, worker)

    def recompute_sums(self, state: State) -> None:
        sum_rows(state["cache"], state["total"])

    def expire(self, state: State, worker: int) -> None:
        forget(state, worker)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        remember(state, pushers_place(state["cache"], arrival), update)
        torch.div(state["total"], arrival.num_live, out=self._mean)
        self.optimizer.step(weights, state, self._mean, arrival.lr)


def remember(state: State, place: int | Tensor, gradient: Tensor) -> None:
    """Replace a worker's cached gradient by its newest one, in its row and in the sum of all rows."""
    row = read(state["cache"], place)
    state["total"].sub_(row).add_(gradient)
    if isinstance(place, Tensor):
        write(state["cache"], place, gradient)
    else:
        row.copy_(gradient)


def forget(state: State, worker: int) -> None:
    """Take a worker's cached gradient out of the sum."""
    row = read(state["cache"], worker)
    state["total"].sub_(row)
    row.zero_()
