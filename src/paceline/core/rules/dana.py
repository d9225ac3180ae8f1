"""Rules `dana` and `dana-slim`: one momentum per worker, and a look-ahead along all of them (arXiv 1907.11612)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.rules.worker_rows import WorkerMomentumRule, pushers_place, put_back, read, sum_rows, table
from paceline.interfaces import Arrival, State


class Dana(WorkerMomentumRule):
    """v_i = gamma v_i + g;  weights -= lr v_i;  worker i is sent weights - lr gamma (v_1 + ... + v_n)

    The sum is kept from update to update. The momentum is the method, a Nesterov step over all workers, so no other
    optimizer fits. Touches 4 tensors: g, v_i, the sum, the weights.

    >>> weights, rule = torch.zeros(1), Dana(0.5, max_workers=2)
    >>> state, sent = rule.start(weights), torch.zeros(1)
    >>> for worker in (0, 1, 0):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, 0, torch.tensor(1.0), 2))
    >>> rule.reply_weights(weights, state, 0, sent)
    >>> weights.item(), sent.item()
    (-3.5, -4.75)
    """

    name = "dana"

    def start(self, weights: Tensor) -> State:
        self.move_to(weights)
        return {
            "velocities": table(weights, self.max_workers),
            "total": torch.zeros_like(weights),
            "ahead": weights.new_zeros((*weights.shape[:-1], 1)),
        }

    def leave(self, state: State, worker: int) -> None:
        row = read(state["velocities"], worker)
        state["total"].sub_(row)
        row.zero_()

    def recompute_sums(self, state: State) -> None:
        sum_rows(state["velocities"], state["total"])

    def expire(self, state: State, worker: int) -> None:
        self.leave(state, worker)  # the others look ahead along its momentum

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        place = pushers_place(state["velocities"], arrival)
        update = self.prepared.prepare(weights, update)
        velocity = read(state["velocities"], place)
        state["total"].sub_(velocity)
        torch.addcmul(update, velocity, self.momentum, out=velocity)
        state["total"].add_(velocity)
        put_back(state["velocities"], place, velocity)
        state["ahead"].copy_(arrival.lr * self.momentum)
        weights.addcmul_(velocity, arrival.lr, value=-1.0)

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        torch.addcmul(weights, state["total"], state["ahead"], value=-1.0, out=out)


class DanaSlim(WorkerMomentumRule):
    """v_i = gamma v_i + g;  weights -= lr (gamma v_i + g);  worker i is sent a plain copy

    In the paper, worker i keeps v_i and sends gamma v_i + g. Here the server keeps v_i, which gives the same weights:
    a worker has no state that a checkpoint, a replay or a new incarnation would have to carry. No other optimizer
    fits. Touches 3 tensors: g, v_i, the weights.

    >>> weights, rule = torch.zeros(1), DanaSlim(0.5, max_workers=1)
    >>> state = rule.start(weights)
    >>> for _ in range(2):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(0, 0, torch.tensor(1.0), 1))
    ...     print(weights.item())
    -1.5
    -3.25
    """

    name = "dana-slim"

    def start(self, weights: Tensor) -> State:
        self.move_to(weights)
        return {"velocities": table(weights, self.max_workers)}

    def leave(self, state: State, worker: int) -> None:
        read(state["velocities"], worker).zero_()

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        place = pushers_place(state["velocities"], arrival)
        update = self.prepared.prepare(weights, update)
        velocity = read(state["velocities"], place)
        torch.addcmul(update, velocity, self.momentum, out=velocity)
        put_back(state["velocities"], place, velocity)
        weights.addcmul_(velocity, arrival.lr * self.momentum, value=-1.0).addcmul_(update, arrival.lr, value=-1.0)
