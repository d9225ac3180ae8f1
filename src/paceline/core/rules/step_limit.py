"""The length of steps while many pushes are in flight: by what the server measures, or by how many they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.rules.worker_rows import (
    Scalar,
    add_scaled,
    at_least,
    at_most,
    keep,
    keep_all,
    load,
    load_all,
    place_in,
    put_back,
    read,
    scale,
    sum_rows,
    table,
)
from paceline.core.rules.wrapper import RuleWrapper
from paceline.interfaces import ALIGNMENT, Arrival, Rule, State

MAX_GROWTH, GROWTH_SMOOTHING = 1.5, 0.25  # of a gradient over its worker's usual one; weight of a new one in that
CRITICAL = 0.35  # n lr S from which on steps shorten; the rules are stable up to about twice that
MAX_NEED = 10.0  # steps never shorten by more than its root: a network becomes as sharp as its steps permit
KEPT_A_ROUND = math.exp(-0.5)  # of the running sums behind the curvature: they span two rounds
SPARSE, MIN_SAMPLED = 16, 4096  # one cache line in 16 is measured; in a small model so many that 4096 floats are
STALENESS_SMOOTHING = 0.01
LIMITED_HORIZON = 1.25  # of a rule with a step limit, as HORIZON in foresight.py
TINY, HUGE = 1e-30, 1e30


class Pair(NamedTuple):
    """The samples of a gradient and of the weights at which it was computed, [..., floats], and views of them."""

    pair: Tensor
    halves: Tensor  # [..., 2, floats of one]
    gradient: Tensor
    weights: Tensor
    gradient_lines: Tensor
    weight_lines: Tensor

    @staticmethod
    def of(pair: Tensor, width: int) -> Pair:
        """The views of a pair of lines of `width` floats."""
        gradient, weights = pair.tensor_split(2, -1)
        lines = (half.view(*half.shape[:-1], half.shape[-1] // max(1, width), width) for half in (gradient, weights))
        return Pair(pair, pair.view(*pair.shape[:-1], 2, pair.shape[-1] // 2), gradient, weights, *lines)


class StepLimit:
    """Clips gradients that outgrow their worker's usual ones, and shortens steps by the curvature that they meet.

    A gradient of worker i is scaled down to |g| = 1.5 max(1, tau_i/n) r_i, with r_i the running mean of its |g|.
    S = E<dg, dw> / E<dw, dw>: dg is g less the mean of the other workers' latest gradients, dw the same of the weights
    at which they were computed, and E a sum over about two rounds. If workers take turns, these weights were sent
    before any of the gradients came, so noise does not bias S. With s = sqrt(min(10, max(1, n lr S / .35))), a step is
    s times shorter and momentum lasts s times longer: each moves the limit of stability by a factor s.
    Norms and products are those of a sample of the coordinates, one cache line in 16, summed by torch.

    >>> limit, weights = StepLimit(max_workers=2), torch.zeros(4)
    >>> state, one = limit.start(weights), torch.tensor(1.0)
    >>> for length in (1.0, 4.0):
    ...     gradient, shorter = limit.measure(state, torch.full((4,), length), Arrival(0, 1, one, 2), 2.0)
    ...     print(gradient[0].item(), shorter)
    1.0 1.0
    1.5 1.0
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self._lines, self._width, self._block = 0, 0, 0
        self._clipped = torch.empty(0)
        self._rows: dict[str, tuple[Tensor, list[Pair]]] = {}

    def start(self, weights: Tensor) -> State:
        """The state: of every worker what it was sent, and its latest gradient with the weights of that one."""
        floats, lead = weights.shape[-1], weights.shape[:-1]
        every = min(SPARSE, max(1, floats // MIN_SAMPLED))
        self._width, self._block = (ALIGNMENT, every * ALIGNMENT) if every > 1 else (floats, floats)
        self._lines = floats // max(1, self._block)
        both = weights.new_zeros((*lead, 2 * self._lines * self._width))
        self._clipped, self._apart = torch.empty_like(weights), Pair.of(torch.empty_like(both), self._width)
        sent = table(both, self.max_workers)
        if floats:
            Pair.of(sent, self._width).weight_lines.copy_(self._lines_of(weights).unsqueeze(-3))
        numbers = torch.zeros((*lead, 2 * self.max_workers + 3), dtype=torch.float64, device=weights.device)
        numbers[..., -1] = 1.0
        return {"sent": sent, "pairs": table(both, self.max_workers), "pair_sum": both, "limit": numbers}

    def leave(self, state: State, worker: int) -> None:
        """Remove `worker`."""
        self.expire(state, worker)
        state["sent"][worker].zero_()
        state["limit"][worker].zero_()

    def expire(self, state: State, worker: int) -> None:
        """Discard the worker's latest gradient."""
        row = state["pairs"][worker]
        state["pair_sum"].sub_(row)
        row.zero_()
        state["limit"][self.max_workers + worker].zero_()

    def recompute_sums(self, state: State) -> None:
        """Recompute the sum over workers, in their order."""
        sum_rows(state["pairs"], state["pair_sum"])

    def sent(self, state: State, worker: int | Tensor, weights: Tensor) -> None:
        """Remember the weights that a worker is sent."""
        place = place_in(state["sent"], worker)
        row = self._row(state, "sent", place)
        row.weight_lines.copy_(self._lines_of(weights))
        put_back(state["sent"], place, row.pair)

    def measure(self, state: State, gradient: Tensor, arrival: Arrival, interval: Scalar) -> tuple[Tensor, Scalar]:
        """Return the gradient to use and s; `interval` is the updates between two pushes of the worker."""
        assert arrival.worker is not None, "a rule that knows its workers was handed the mean of several"
        place = place_in(state["sent"], arrival.worker)
        row = self._row(state, "sent", place)
        row.gradient_lines.copy_(self._lines_of(gradient))
        norm = squared_norm(row.gradient) ** 0.5
        numbers, most = state["limit"], self.max_workers
        if isinstance(arrival.worker, Tensor):
            mine = arrival.worker[:, None]
            filled = numbers[:, most:-3].sum(-1, keepdim=True) - numbers.gather(1, mine + most)
            clip, usual = clipping(norm, numbers.gather(1, mine), at_least(interval / arrival.num_live, 1.0))
            gradient = self._clipped.copy_(gradient)
            scale(gradient, clip)
            scale(row.gradient, clip)
            sums = self._compare(state, place, row.pair, filled, load_all(numbers[:, -3:]), arrival)
            numbers.scatter_(1, mine, torch.as_tensor(usual)).scatter_(1, mine + most, 1.0)
            keep_all(numbers[:, -3:], sums)
        else:
            kept = numbers.tolist()
            worker, filled = arrival.worker, sum(kept[most:-3]) - kept[most + arrival.worker]
            clip, kept[worker] = clipping(norm, kept[worker], max(interval / arrival.num_live, 1.0))
            if clip < 1.0:
                gradient = torch.mul(gradient, clip, out=self._clipped)
                row.gradient.mul_(clip)
            kept[most + worker] = 1.0
            kept[-3:] = sums = self._compare(state, place, row.pair, filled, kept[-3:], arrival)
            keep_all(numbers, kept)
        return gradient, sums[-1]

    def _compare(
        self,
        state: State,
        place: int | Tensor,
        pair: Tensor,
        others: Scalar,
        sums: Sequence[Scalar],
        arrival: Arrival,
    ) -> tuple[Scalar, Scalar, Scalar]:
        """Store a worker's newest pair; return the new running sums, and s."""
        total, before = state["pair_sum"], self._row(state, "pairs", place).pair
        total.sub_(before).add_(pair)
        before.copy_(pair)
        put_back(state["pairs"], place, before)
        add_scaled(total, pair, -(others + 1.0), out=self._apart.pair)
        return curvature(sums, products(self._apart.halves), others, arrival)

    def _lines_of(self, vector: Tensor) -> Tensor:
        """The sample of a vector, as a view [..., lines, width]."""
        shape, strides = (self._lines, self._width), (self._block, 1)
        if vector.dim() == 1:
            return vector.as_strided(shape, strides, vector.storage_offset())
        return vector.as_strided((len(vector), *shape), (vector.stride(0), *strides), vector.storage_offset())

    def _row(self, state: State, table: str, place: int | Tensor) -> Pair:
        """A row of a table of pairs; the views of one run are made once."""
        rows = state[table]
        if isinstance(place, Tensor):
            return Pair.of(read(rows, place), self._width)
        known, pairs = self._rows.get(table, (None, []))
        if rows is not known:
            pairs = [Pair.of(row, self._width) for row in rows]
            self._rows[table] = rows, pairs
        return pairs[place]


def clipping(norm: Scalar, usual: Scalar, looser: Scalar) -> tuple[Scalar, Scalar]:
    """Return the factor of a gradient with this norm, and its worker's usual norm after it (0: none before).

    >>> clipping(4.0, 0.0, 1.0), clipping(4.0, 2.0, 1.0), clipping(4.0, 2.0, 2.0)
    ((1.0, 4.0), (0.75, 2.25), (1.0, 2.5))
    """
    first = (usual == 0) * 1.0
    limit = MAX_GROWTH * looser * usual + HUGE * first
    return at_most(limit / (norm + TINY), 1.0), usual + at_least(first, GROWTH_SMOOTHING) * (
        at_most(norm, limit) - usual
    )


def curvature(
    sums: Sequence[Scalar], products: Sequence[Scalar], others: Scalar, arrival: Arrival
) -> tuple[Scalar, Scalar, Scalar]:
    """Add products, times others squared, to the running sums of <dg, dw> and <dw, dw>; return these and s.

    >>> one = torch.tensor(0.1)
    >>> [round(curvature((0.0, 0.0, 1.0), (S, 1.0), 1.0, Arrival(0, 3, one, 4))[2], 3) for S in (0.5, 3.5, 1e6)]
    [1.0, 2.0, 3.162]
    """
    kept: Scalar = KEPT_A_ROUND ** (1.0 / arrival.num_live)
    known = (others > 0) * 1.0 / at_least(others, 1.0) ** 2
    covariance, spread = (kept * one + known * new for one, new in zip(sums, products, strict=False))
    need = arrival.num_live * load(arrival.lr) / CRITICAL * at_least(covariance, 0.0) / (spread + TINY)
    return covariance, spread, at_most(at_least(need, 1.0), MAX_NEED) ** 0.5


def squared_norm(vector: Tensor) -> Scalar:
    """A float for one run, a tensor [runs, 1] for many."""
    if vector.dim() == 1:
        return torch.dot(vector, vector).item()
    return (vector * vector).sum(-1, keepdim=True).double()


def products(halves: Tensor) -> Sequence[Scalar]:
    """The inner products of both halves with the second one: floats for one run, tensors [runs, 1] for many.

    >>> products(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    [11.0, 25.0]
    """
    if halves.dim() == 2:
        return load_all(torch.mv(halves, halves[1]))
    return load_all((halves * halves[..., 1:, :]).sum(-1).double())


class LrScaling(RuleWrapper):
    """lr min(1, most/pushes),  pushes = max(number live, the running mean of staleness + 1)

    The largest stable step is inversely proportional to the pushes in flight (n lr times the curvature is bounded). A
    join or leave counts at once, a change of staleness within some hundred updates. Touches no tensor of its own.

    >>> from paceline.core.optimizers import Sgd
    >>> from paceline.core.rules.plain import Plain
    >>> weights, rule = torch.zeros(1), LrScaling(Plain(Sgd()), most=2)
    >>> state = rule.start(weights)
    >>> rule.apply(weights, state, torch.ones(1), Arrival(0, 0, torch.tensor(1.0), 4))
    >>> weights.item()
    -0.5
    """

    suffix = "lr scaled"

    def __init__(self, rule: Rule, most: int) -> None:
        super().__init__(rule)
        self.most = most

    def start(self, weights: Tensor) -> State:
        mean = torch.zeros((*weights.shape[:-1], 1), dtype=torch.float64, device=weights.device)
        return {**self.rule.start(weights), "mean_staleness": mean}

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        mean = load(state["mean_staleness"])
        mean = mean + STALENESS_SMOOTHING * (arrival.staleness - mean)
        keep(state["mean_staleness"], mean)
        pushes, live = mean + 1.0, arrival.num_live
        if isinstance(pushes, Tensor):
            shorter = (self.most / torch.maximum(pushes, torch.as_tensor(live).to(pushes.dtype))).clamp(max=1.0)
            arrival = arrival._replace(lr=arrival.lr * shorter.to(arrival.lr.dtype))
        elif (in_flight := max(pushes, float(live))) > self.most:
            arrival = arrival._replace(lr=arrival.lr * (self.most / in_flight))
        self.rule.apply(weights, state, update, arrival)
