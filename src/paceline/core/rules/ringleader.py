"""Rule `ringleader`: every worker's data counts equally, by one step per worker and round (arXiv 2509.22860)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.rules.buffered import step
from paceline.core.rules.worker_rows import WorkerMomentumRule, pushers_place, put_back, read, table, write
from paceline.interfaces import Arrival, State


class Ringleader(WorkerMomentumRule):
    """A round: gather until every worker has a mean in the table, then each worker's next push makes one step.

    G_i is the mean of worker i's pushes of this round. Once all have one, the push that completed the table, and then
    the first of every other worker, makes a step:  v = gamma v + (G_1 + ... + G_n)/n;  weights -= lr v
    A worker that has made its step starts its mean of the next round; the next round begins when all have.

    No push is dropped, and every push makes a new version, though not every push moves the weights. The row of a
    worker that has made its step holds its next mean, so one table is enough; if such a worker leaves, it still counts
    until the round ends. The others do not wait for a silent worker: its mean is discarded, and its next push counts
    in the round of that time. The sums begin anew each round, so no rounding error outlasts two. The paper has no
    momentum (gamma = 0). Plain momentum fits, other optimizers do not, for the same reason as in `buffered`. Touches 6
    tensors: g, G_i, this and the next round's sum, v, the weights.

    >>> weights, rule = torch.zeros(1), Ringleader(0.0, max_workers=2)
    >>> state = rule.start(weights)
    >>> for worker, gradient in [(0, 1.0), (0, 3.0), (1, 4.0), (0, 5.0)]:
    ...     rule.apply(weights, state, torch.tensor([gradient]), Arrival(worker, 0, torch.tensor(1.0), 2))
    ...     print(weights.item())
    0.0
    0.0
    -3.0
    -6.5
    """

    name = "ringleader"

    def start(self, weights: Tensor) -> State:
        self.move_to(weights)
        number = weights.new_zeros((*weights.shape[:-1], 1))
        return {
            "means": table(weights, self.max_workers),
            "pushes": table(number, self.max_workers),
            "stepped": table(number, self.max_workers),
            "silent": table(number, self.max_workers),
            "total": torch.zeros_like(weights),
            "next_total": torch.zeros_like(weights),
            "parts": number,
            "velocity": torch.zeros_like(weights),
        }

    def leave(self, state: State, worker: int) -> None:
        mean, pushes, stepped = (read(state[name], worker) for name in ("means", "pushes", "stepped"))
        known = (pushes > 0).to(mean.dtype)
        state["total"].addcmul_(mean, known * (1.0 - stepped), value=-1.0)
        state["next_total"].addcmul_(mean, known * stepped, value=-1.0)
        state["parts"].sub_(known * (1.0 - stepped))
        for row in (mean, pushes, stepped, read(state["silent"], worker)):
            row.zero_()

    def expire(self, state: State, worker: int) -> None:
        self.leave(state, worker)
        read(state["silent"], worker).fill_(1.0)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        place = pushers_place(state["means"], arrival)
        stepped = read(state["stepped"], place).clone()
        self._gather(state, place, self.prepared.prepare(weights, update), stepped)
        heard = ((state["pushes"] > 0) | (state["stepped"] > 0) | (state["silent"] > 0)).sum(-2)
        due = (heard >= arrival.num_live).to(weights.dtype) * (1.0 - stepped)
        share = due / state["parts"].clamp(min=1.0)
        step(weights, state["velocity"], state["total"], share, due, self.momentum, arrival.lr)
        self._turn(state, place, due, arrival)

    @staticmethod
    def _gather(state: State, place: int | Tensor, update: Tensor, stepped: Tensor) -> None:
        """Add the push to its worker's mean, and the mean to the sum of its round."""
        mean, pushes = read(state["means"], place), read(state["pushes"], place)
        known = (pushes > 0).to(mean.dtype)
        state["parts"].add_((1.0 - known) * (1.0 - stepped))
        pushes.add_(1.0)
        write(state["silent"], place, torch.zeros_like(pushes))
        for sign, weight in ((-1.0, known), (1.0, torch.ones_like(known))):
            state["total"].addcmul_(mean, weight * (1.0 - stepped), value=sign)
            state["next_total"].addcmul_(mean, weight * stepped, value=sign)
            if sign < 0:
                mean.lerp_(update, pushes.reciprocal())
        put_back(state["means"], place, mean)
        put_back(state["pushes"], place, pushes)

    @staticmethod
    def _turn(state: State, place: int | Tensor, due: Tensor, arrival: Arrival) -> None:
        """Reset the mean of a worker that has made its step; when all have, begin the next round."""
        stepped, pushes = read(state["stepped"], place), read(state["pushes"], place)
        stepped.add_(due)
        pushes.mul_(1.0 - due)
        put_back(state["stepped"], place, stepped)
        put_back(state["pushes"], place, pushes)
        over = ((state["stepped"] + state["silent"]).sum(-2) >= arrival.num_live).to(due.dtype)
        state["total"].lerp_(state["next_total"], over)
        state["next_total"].mul_(1.0 - over)
        state["parts"].lerp_((state["pushes"] > 0).sum(-2).to(due.dtype), over)
        state["stepped"].mul_((1.0 - over).unsqueeze(-2))
