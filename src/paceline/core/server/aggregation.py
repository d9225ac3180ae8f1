"""Combine the pushes of a round so that a minority of liars moves the result little: median and trimmed mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from paceline.core.messages import Push

SPAN = 1 << 15  # coordinates that are sorted at a time: the memory beside the pushes is one such row for each of them


class TrimmedMean:
    """Coordinate by coordinate, the mean of a round's values without the `trim` lowest and highest.

    Without `trim`, as many are left out as leave one or two: the median. So it is in a round that lost workers, if
    `trim` would leave none. Every push counts alike, whatever its samples. A push with a NaN or an infinity is left out
    as a whole, in place of one low and one high value. See arXiv 1803.01498.

    >>> values = torch.tensor([[1.0], [9.0], [2.0], [4.0]])
    >>> pushes = [Push(worker, 0, 0, 0, 1, 0.0, row, values) for worker, row in enumerate(values)]
    >>> TrimmedMean(1)(pushes, 4), TrimmedMean()(pushes[:3], 3)
    (tensor([3.]), tensor([2.]))
    """

    def __init__(self, trim: int | None = None) -> None:
        self._trim = trim
        self._result, self._rows = torch.empty(0), torch.empty(0)

    def tolerates(self, num_pushes: int) -> int:
        """How many pushes of a round may hold anything at all."""
        most = (num_pushes - 1) // 2
        return most if self._trim is None else min(self._trim, most)

    def __call__(self, pushes: list[Push], samples: int) -> Tensor:
        """Return the result, which the next call overwrites."""
        sound = [push for push in pushes if math.isfinite(push.update.sum().item())]
        trim, num_broken = self.tolerates(len(pushes)), len(pushes) - len(sound)
        if num_broken <= trim:  # else the result is not finite, which ends the run
            pushes, trim = sound, max(0, trim - num_broken) if self._trim is not None else self.tolerates(len(sound))
        first, count = pushes[0].update, len(pushes)
        if self._result.shape != first.shape:
            self._result = torch.empty_like(first)
        if len(self._rows) <= count:
            self._rows = torch.empty(count + 1, min(SPAN, first.numel()), device=first.device)
        trim = min(trim, (count - 1) // 2)
        for begin in range(0, first.numel(), SPAN):
            result = self._result[begin : begin + SPAN]
            rows = list(self._rows[: count + 1, : result.numel()])
            for row, push in zip(rows, pushes, strict=False):
                torch.nan_to_num(push.update[begin : begin + SPAN], math.inf, math.inf, -math.inf, out=row)
            kept = _sorted(rows, count)[trim : count - trim]
            result.copy_(kept[0])
            for row in kept[1:]:
                result.add_(row)
            result.div_(len(kept))
        return self._result


def _sorted(rows: list[Tensor], count: int) -> list[Tensor]:
    """Sort `count` rows in each column; the row after them is scratch memory."""
    *rows, spare = rows
    for low, high in comparators(count):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows


@cache
def comparators(count: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort for `count` values: pairs of places to put in order, one after another.

    Whole rows are compared at once, which takes a tenth of the time of sorting each column.

    >>> comparators(3)
    ((0, 1), (0, 2), (1, 2))
    """
    return tuple(_comparators(count))


def _comparators(count: int) -> Iterator[tuple[int, int]]:
    merged = 1
    while merged < count:
        step = merged
        while step:
            for low in range(step % merged, count - step):
                in_turn = (low - step % merged) % (2 * step) < step
                if in_turn and low // (2 * merged) == (low + step) // (2 * merged):
                    yield low, low + step
            step //= 2
        merged *= 2
