"""The foresight rules: send each worker the weights that are expected when its next push is applied.

Paceline's own: the gradient cache of DuDe-ASGD (arXiv 2405.16966) with a look-ahead like DANA's (arXiv 1907.11612).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.membership import OUTLIER, SMOOTHING
from paceline.core.optimizers import GradientTransform, Optimizer
from paceline.core.rules.cached import forget, remember
from paceline.core.rules.plain import StatelessHooks
from paceline.core.rules.step_limit import StepLimit
from paceline.core.rules.worker_rows import (
    Scalar,
    add_scaled,
    at_least,
    at_most,
    keep,
    keep_all,
    load,
    load_all,
    move_between,
    move_towards,
    pushers_place,
    scale,
    sum_rows,
    table,
)
from paceline.interfaces import Arrival, State

MAX_AHEAD = 5.0  # updates that the last one can stand for; 8 workers did worse with 10
TRIAL_HORIZON, SHARE_BEFORE = 2.0, 0.5  # of rule `ahead`: as HORIZON, and of the push before in a step
HORIZON = 1.5  # how many intervals to look ahead: a push arrives after one, and then counts for half of one on average


def next_interval(interval: Scalar, arrival: Arrival, smoothing: float = SMOOTHING) -> Scalar:
    """The running mean of the updates between two arrivals of a worker; it starts at the number of live workers."""
    interval = interval + (interval == 0) * arrival.num_live
    return interval + smoothing * (at_most(arrival.staleness + 1, OUTLIER * interval) - interval)


class ForesightCached(StatelessHooks):
    """Step along the mean u of every worker's latest gradient; send worker i the weights expected in m_i updates.

    total += g - c_i;  c_i = g;  u = total / n;  v += (1 - gamma_u)(u - v);  weights -= lr/(1 - gamma) v
    gamma_u = gamma^(1/max_j tau_j)
    worker i is sent  weights - lr/(1 - gamma) (K v + (m_i - K) u),  m_i = 1.5 (tau_i - 1),
    K = gamma_u (1 - gamma_u^m_i)/(1 - gamma_u):  the next m_i steps, if u does not change.
    tau_i, the updates between two arrivals of worker i, is a running mean of min(staleness + 1, 3 tau_i) that starts
    at n. The cap keeps one long pause of a worker from being taken for its speed.

    The momentum is the method, so no other optimizer fits: Adam's steps have no such sum. A worker without a known
    interval is sent the live weights. Touches 5 tensors: g, c_i, total, v, the weights.
    With a step limit, g is clipped, lr divided by s, and gamma_u = gamma^(1/(s max_j tau_j)) (see `StepLimit`).

    >>> weights, rule = torch.zeros(1), ForesightCached(0.0, max_workers=2)
    >>> state, sent = rule.start(weights), torch.zeros(1)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, 1, torch.tensor(1.0), 2))
    >>> rule.reply_weights(weights, state, 1, sent)
    >>> weights.item(), sent.item()
    (-1.5, -3.0)
    """

    name = "foresight-cached"

    def __init__(
        self,
        momentum: float | Tensor,
        max_workers: int,
        prepared: GradientTransform | None = None,
        horizon: float = HORIZON,
        smoothing: float = SMOOTHING,
        limit: StepLimit | None = None,
    ) -> None:
        self.momentum, self.max_workers, self.limit = momentum, max_workers, limit
        self.prepared = prepared or GradientTransform()
        self.horizon, self.smoothing = horizon, smoothing
        if limit is not None:
            self.name = f"{self.name} (step limited)"

    def start(self, weights: Tensor) -> State:
        self.prepared.move_to(weights.device)
        if isinstance(self.momentum, Tensor):
            self.momentum = self.momentum.to(weights.device, torch.float64)
        size = (*weights.shape[:-1], self.max_workers + 3)
        return {
            "cache": table(weights, self.max_workers),
            "total": torch.zeros_like(weights),
            "direction": torch.zeros_like(weights),
            "numbers": torch.zeros(size, dtype=torch.float64, device=weights.device),
            **(self.limit.start(weights) if self.limit is not None else {}),
        }

    def leave(self, state: State, worker: int) -> None:
        forget(state, worker)
        state["numbers"][worker].zero_()  # an assignment would synchronise a GPU
        if self.limit is not None:
            self.limit.leave(state, worker)

    def recompute_sums(self, state: State) -> None:
        sum_rows(state["cache"], state["total"])
        if self.limit is not None:
            self.limit.recompute_sums(state)

    def expire(self, state: State, worker: int) -> None:
        forget(state, worker)
        if self.limit is not None:
            self.limit.expire(state, worker)

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        gradient = self.prepared.prepare(weights, update)
        gradient, interval, decay, step, share = self._measure(state, gradient, arrival)
        remember(state, pushers_place(state["cache"], arrival), gradient)
        self.turn(state, gradient, 1.0 - decay, share, interval)
        add_scaled(weights, state["direction"], -step)

    def turn(self, state: State, gradient: Tensor, fresh: Scalar, share: Scalar, interval: Scalar) -> None:
        """Move the direction of the steps by a share of `fresh` towards the gradient of this update."""
        scale(state["direction"], 1.0 - fresh)
        add_scaled(state["direction"], state["total"], fresh * share)

    def _measure(
        self, state: State, gradient: Tensor, arrival: Arrival
    ) -> tuple[Tensor, Scalar, Scalar, Scalar, Scalar]:
        """Update the worker's interval; return the gradient to use, the interval, and the decay, step and share.

        `numbers` holds the interval of every worker, then decay, step and share, for the next reply.
        """
        numbers, worker, max_workers = state["numbers"], arrival.worker, self.max_workers
        if isinstance(worker, Tensor):
            intervals, mine = numbers[:, :max_workers], worker[:, None]
            interval = next_interval(intervals.gather(1, mine), arrival, self.smoothing)
            intervals.scatter_(1, mine, torch.as_tensor(interval))
            gradient, longer = self._limited(state, gradient, arrival, interval)
            pace = self._pace(intervals.amax(-1, keepdim=True), longer, arrival)
            keep_all(numbers[:, max_workers:], pace)
            return gradient, interval, *pace
        assert worker is not None, "a rule that knows its workers was handed the mean of several"
        row = numbers.tolist()
        row[worker] = interval = next_interval(row[worker], arrival, self.smoothing)
        gradient, longer = self._limited(state, gradient, arrival, interval)
        row[max_workers:] = pace = self._pace(max(row[:max_workers]), longer, arrival)
        keep_all(numbers, row)
        return gradient, interval, *pace

    def _limited(self, state: State, gradient: Tensor, arrival: Arrival, interval: Scalar) -> tuple[Tensor, Scalar]:
        if self.limit is None:
            return gradient, 1.0
        return self.limit.measure(state, gradient, arrival, interval)

    def _pace(self, longest: Scalar, longer: Scalar, arrival: Arrival) -> tuple[Scalar, Scalar, Scalar]:
        """The decay per update for the longest interval, the length of a step, and the share of one worker."""
        decay: Scalar = self.momentum ** (1.0 / (longest * longer))
        return decay, load(arrival.lr) / ((1.0 - self.momentum) * longer), 1.0 / arrival.num_live

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        numbers, max_workers = state["numbers"], self.max_workers
        if isinstance(worker, Tensor):
            interval: Scalar = numbers[:, :max_workers].gather(1, worker[:, None])
            decay, step, share = load_all(numbers[:, max_workers:])
        else:
            row = numbers.tolist()
            interval, (decay, step, share) = row[worker], row[max_workers:]
        ahead = self.horizon * at_least(interval - 1.0, 0.0)
        along = decay * (1.0 - decay**ahead) / (1.0 - decay)
        add_scaled(weights, state["direction"], -step * along, out=out)
        add_scaled(out, state["total"], -step * (ahead - along) * share)
        if self.limit is not None:
            self.limit.sent(state, worker, out)


class Foresight(ForesightCached):
    """Like `foresight-cached`, but the step is along the gradient that arrived: cached ones only serve the look-ahead.

    v += (1 - gamma_u)(g - v);  weights -= lr/(1 - gamma) v
    worker i is sent  weights - lr/(1 - gamma) (K v + (m_i - K) u)
    with u the mean of every worker's latest gradient, and gamma_u, K and m_i as in `foresight-cached`. Old
    gradients predict well where the weights will be, and are too stale to step along. Paceline's own rule. No other
    optimizer fits.
    Touches 5 tensors: g, c_i, total, v, the weights.

    >>> import torch
    >>> from paceline.interfaces import Arrival
    >>> weights, rule = torch.zeros(1), Foresight(0.0, max_workers=2)
    >>> state, sent = rule.start(weights), torch.zeros(1)
    >>> for worker in (0, 1):
    ...     rule.apply(weights, state, torch.ones(1), Arrival(worker, 1, torch.tensor(1.0), 2))
    >>> rule.reply_weights(weights, state, 1, sent)
    >>> weights.item(), sent.item()
    (-2.0, -3.5)
    """

    name = "foresight"

    def turn(self, state: State, gradient: Tensor, fresh: Scalar, share: Scalar, interval: Scalar) -> None:
        move_towards(state["direction"], gradient, fresh)


class ForesightFair(Foresight):
    """`foresight` with v = gamma_u v + (1 - gamma_u) min(tau_i/n, 3) g: all data counts equally, however often pushed.

    tau_i, the updates between two arrivals of worker i, is n if all workers are equally fast. Use it if slow workers
    hold labels that the others lack; on evenly split data it only gives the stalest gradients the most weight. A push
    counts at most three times: the rarest are also the stalest (docs/rules-evidence.md has the ablation).

    >>> import torch
    >>> from paceline.interfaces import Arrival
    >>> weights, rule = torch.zeros(1), ForesightFair(0.0, max_workers=2)
    >>> state = rule.start(weights)
    >>> rule.apply(weights, state, torch.ones(1), Arrival(0, 5, torch.tensor(1.0), 2))
    >>> round(weights.item(), 6)
    -1.2
    """

    name = "foresight-fair"
    max_weight = 3.0

    def turn(self, state: State, gradient: Tensor, fresh: Scalar, share: Scalar, interval: Scalar) -> None:
        scale(state["direction"], 1.0 - fresh)
        add_scaled(state["direction"], gradient, fresh * at_most(interval * share, self.max_weight))


class Ahead(StatelessHooks):
    """weights = optimizer(weights, u);  worker i is sent  weights + m_i (optimizer(weights, g) - weights)

    u = (g + the push before)/2, or g if g is not stale;  m_i = min(2 (tau_i - 1), 5), with tau_i the updates between
    two arrivals of worker i, as in the foresight rules. The second step is only tried: it predicts the next updates, so
    that a push is computed from about the weights that it changes. The mean of two pushes has less noise, which no
    trial can predict. Any optimizer fits. Paceline's own rule. Touches g, the push before, the weights, and twice what
    a step of the optimizer touches.

    >>> from paceline.core.optimizers import Sgd
    >>> weights, rule, sent = torch.zeros(1), Ahead(Sgd(), Sgd(), max_workers=2), torch.zeros(1)
    >>> state = rule.start(weights)
    >>> for worker, gradient in ((0, 1.0), (1, 3.0)):
    ...     rule.apply(weights, state, torch.tensor([gradient]), Arrival(worker, worker, torch.tensor(1.0), 2))
    >>> rule.reply_weights(weights, state, 1, sent)
    >>> weights.item(), sent.item()
    (-3.0, -9.0)
    """

    name = "ahead"

    def __init__(
        self,
        optimizer: Optimizer,
        trial: Optimizer,
        max_workers: int,
        horizon: float = TRIAL_HORIZON,
        share: float = SHARE_BEFORE,
    ) -> None:
        """`trial` makes the steps that are only tried: another optimizer of the same kind."""
        self.optimizer, self.trial, self.max_workers = optimizer, trial, max_workers
        self.horizon, self.share = horizon, share
        self._tried = self._mean = torch.empty(0)
        self._trial_state: State = {}

    def start(self, weights: Tensor) -> State:
        with torch.inference_mode(False):  # a torch optimizer changes no inference tensor
            self._tried, self._mean, self._trial_state = torch.empty_like(weights), torch.empty_like(weights), {}
        self.trial.start(self._tried)
        numbers = torch.zeros((*weights.shape[:-1], self.max_workers + 1), dtype=torch.float64, device=weights.device)
        return {"newest": torch.zeros_like(weights), "numbers": numbers, **self.optimizer.start(weights)}

    def leave(self, state: State, worker: int) -> None:
        state["numbers"][worker].zero_()

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        """`numbers` of the state holds the interval of every worker, then the learning rate."""
        numbers, worker = state["numbers"], arrival.worker
        keep(numbers[..., -1:], load(arrival.lr))
        if isinstance(worker, Tensor):
            mine = worker[:, None]
            numbers.scatter_(1, mine, torch.as_tensor(next_interval(numbers.gather(1, mine), arrival)))
        elif worker is not None:  # else the mean of a round: nothing is stale
            keep(numbers[worker], next_interval(float(numbers[worker]), arrival))
        share: Scalar = self.share * at_most(arrival.staleness, 1) if worker is not None else 0.0
        mean = update
        if isinstance(share, Tensor) or share:
            mean = move_between(update, state["newest"], share, self._mean)
        self.optimizer.step(weights, state, mean, arrival.lr)
        state["newest"].copy_(update)

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        numbers = state["numbers"]
        interval = numbers.gather(1, worker[:, None]) if isinstance(worker, Tensor) else float(numbers[worker])
        ahead = at_most(self.horizon * at_least(interval - 1.0, 0.0), MAX_AHEAD)
        if not isinstance(ahead, Tensor) and not ahead:
            out.copy_(weights)
            return
        self._tried.copy_(weights)
        lr = numbers[..., -1:].to(weights.dtype)
        self.trial.step(self._tried, self._copy_state(state), state["newest"], lr if lr.dim() > 1 else lr[0])
        move_between(weights, self._tried, ahead, out)

    def _copy_state(self, state: State) -> State:
        """Copy the optimizer's state, floats into the same memory every time, and anything else into new tensors."""
        copies = self._trial_state
        names = [name for name in state if name not in ("newest", "numbers")]
        kept = [name for name in names if name in copies and _has_same_layout(copies[name], state[name])]
        if kept:
            torch._foreach_copy_([copies[name] for name in kept], [state[name] for name in kept])
        with torch.inference_mode(False):
            made = {name: state[name].clone() for name in names if name not in kept}
        self._trial_state = {name: made[name] if name in made else copies[name] for name in names}
        return self._trial_state


def _has_same_layout(copy: Tensor, tensor: Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype == torch.float32
