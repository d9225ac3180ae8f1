"""Rules `foresight` and `foresight-fair` around an optimizer that brings its own steps: Adam, Muon and others."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.optimizers import RoundOptimizer
from paceline.core.rules.foresight import HORIZON, next_interval
from paceline.core.rules.plain import StatelessHooks
from paceline.core.rules.worker_rows import Scalar, add_scaled, at_least, at_most, keep_all, move_between
from paceline.interfaces import Arrival, State

MAX_WEIGHT = 3.0  # of a push under `foresight-fair`
PIECE = 1 << 16  # floats that stay in the cache of a CPU


class StepForesight(StatelessHooks):
    """weights = optimizer(weights, g), its moments decaying by the round;  worker i is sent  weights + m_i d

    d is the step just made, m_i = 1.5 (tau_i - 1), with tau_i the updates between two arrivals of worker i, as in the
    foresight rules. Every decay beta of the optimizer is beta^(1/n) per update, n = max_j tau_j. As moments then hardly
    change until the push arrives, the next steps are about the last one, whatever makes it: a preconditioner, an
    orthogonal matrix. Steps that do not shrink with the gradient overshoot if they are stale. So a coordinate that
    would move up the gradient that came makes only 1/n of its step. One worker equals the optimizer alone.

    With `fair`, a push counts min(tau_i/live, 3) times, as in `foresight-fair`, and no step is held back: with skewed
    labels, pushes oppose each other all the time. Paceline's own rule. Touches g, the weights, the weights before, and
    what a step of the optimizer touches.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule, sent = torch.zeros(1), StepForesight(Sgd(), max_workers=2), torch.zeros(1)
    >>> state = rule.start(weights)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, 1, torch.tensor(1.0), 2))
    >>> rule.reply_weights(weights, state, 1, sent)
    >>> weights.item(), sent.item()
    (-2.0, -3.5)
    """

    def __init__(
        self,
        optimizer: RoundOptimizer,
        max_workers: int,
        fair: bool = False,
        horizon: float = HORIZON,
        holds_back: bool | None = None,
    ) -> None:
        self.optimizer, self.max_workers, self.fair = optimizer, max_workers, fair
        self.horizon, self.holds_back = horizon, not fair if holds_back is None else holds_back

    @property
    def name(self) -> str:
        return "foresight-fair" if self.fair else "foresight"

    def start(self, weights: Tensor) -> State:
        intervals = torch.zeros((*weights.shape[:-1], self.max_workers), dtype=torch.float64, device=weights.device)
        return {"before": weights.clone(), "intervals": intervals, **self.optimizer.start(weights)}

    def leave(self, state: State, worker: int) -> None:
        state["intervals"][worker].zero_()  # an assignment would synchronise a GPU

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        interval, longest = _measure(state["intervals"], arrival)
        if self.fair:
            weight = at_most(interval / arrival.num_live, MAX_WEIGHT)
            update = update * (weight.to(update.dtype) if isinstance(weight, Tensor) else weight)
        state["before"].copy_(weights)
        self.optimizer.step(weights, state, update, arrival.lr, 1.0 / longest)
        if self.holds_back and (isinstance(longest, Tensor) or longest > 1.0):
            self._hold_back(weights, state["before"], update, 1.0 - 1.0 / longest)

    def _hold_back(self, weights: Tensor, before: Tensor, gradient: Tensor, undone: Scalar) -> None:
        """Undo so much of the step in every coordinate in which it goes up the gradient, piece by piece."""
        length = weights.shape[-1] if weights.is_cuda else PIECE
        for start in range(0, weights.shape[-1], length):
            piece = weights[..., start : start + length]
            step = piece - before[..., start : start + length]
            step.mul_((step * gradient[..., start : start + length]).gt_(0.0))
            add_scaled(piece, step, -undone)

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        intervals = state["intervals"]
        interval = intervals.gather(1, worker[:, None]) if isinstance(worker, Tensor) else float(intervals[worker])
        move_between(state["before"], weights, 1.0 + self.horizon * at_least(interval - 1.0, 0.0), out)


def _measure(intervals: Tensor, arrival: Arrival) -> tuple[Scalar, Scalar]:
    """Update the worker's interval; return it with the longest of all workers."""
    worker = arrival.worker
    if isinstance(worker, Tensor):
        mine = worker[:, None]
        interval = torch.as_tensor(next_interval(intervals.gather(1, mine), arrival))
        intervals.scatter_(1, mine, interval)
        return interval, intervals.amax(-1, keepdim=True)
    assert worker is not None, "a rule that knows its workers was handed the mean of several"
    row = intervals.tolist()
    row[worker] = found = next_interval(row[worker], arrival)
    keep_all(intervals, row)
    return found, max(row)
