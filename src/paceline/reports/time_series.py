"""Time series with a bounded number of points: sums and extremes per span of time; spans grow with the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SPANS = 400
MIN_SPAN_SECONDS = 2.0**-20  # initial length of a span; it doubles when a run needs more than MAX_SPANS
DIGITS = 5
Column = NDArray[np.float64]


class TimeSeries:
    """Mean, minimum, maximum and last value of each quantity per span of time."""

    def __init__(self, *names: str, most: int = MAX_SPANS) -> None:
        self.names, self._most, self._seconds = names, most, MIN_SPAN_SECONDS
        self.count = np.zeros(most)
        self.ends = np.full(most, -np.inf)  # time of the last value in each span
        shape = (len(names), most)
        self._counts, self._sums = np.zeros(shape), np.zeros(shape)
        self._least, self._greatest = np.full(shape, np.inf), np.full(shape, -np.inf)
        self._last = np.full(shape, np.nan)

    def add(self, now: Column, values: Mapping[str, Column]) -> None:
        """Add values at these times; ignore values that are not finite."""
        usable = np.isfinite(now) & (now >= 0.0)
        if not usable.any():
            return
        now = now[usable]
        while now.max() >= self._seconds * self._most:
            self._halve()
        spans = (now / self._seconds).astype(np.int64)
        np.add.at(self.count, spans, 1.0)
        np.maximum.at(self.ends, spans, now)
        for row, name in enumerate(self.names):
            column = values[name][usable]
            known = np.isfinite(column)
            here, column = spans[known], column[known]
            np.add.at(self._counts[row], here, 1.0)
            np.add.at(self._sums[row], here, column)
            np.minimum.at(self._least[row], here, column)
            np.maximum.at(self._greatest[row], here, column)
            self._last[row, here] = column

    def _halve(self) -> None:
        """Merge each two spans into one."""
        self._seconds *= 2.0
        for table in (self.count, self._counts, self._sums):
            _fold(table, np.add, 0.0)
        for table in (self.ends, self._greatest):
            _fold(table, np.maximum, -np.inf)
        _fold(self._least, np.minimum, np.inf)
        _fold(self._last, lambda earlier, later: np.where(np.isfinite(later), later, earlier), np.nan)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Mask of spans with values."""
        return self.count > 0

    @property
    def times(self) -> Column:
        return self.ends[self.seen]

    def _of(self, table: Column, name: str) -> Column:
        found: Column = table[self.names.index(name), self.seen]
        return found

    def mean(self, name: str) -> Column:
        counts = self._of(self._counts, name)
        return self._of(self._sums, name) / np.where(counts > 0, counts, np.nan)

    def least(self, name: str) -> Column:
        return self._of(self._least, name)

    def greatest(self, name: str) -> Column:
        return self._of(self._greatest, name)

    def last(self, name: str) -> Column:
        return self._of(self._last, name)

    def total(self, name: str) -> Column:
        """Return the sum per span."""
        return self._of(self._sums, name)

    def carried(self, name: str) -> Column:
        """Return the last value per span; a span without one repeats the span before."""
        values = self.last(name)
        known = np.isfinite(values)
        places = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
        return np.where(places >= 0, values[places], np.nan)


def _fold(table: Column, join: Any, empty: float) -> None:
    folded = join(table[..., 0::2], table[..., 1::2])
    table[...] = empty
    table[..., : folded.shape[-1]] = folded


def plain(values: Column, digits: int = DIGITS) -> list[float | None]:
    """Return JSON values: rounded to `digits`, None if unknown, integers if all are whole.

    >>> plain(np.array([1.0, 0.123456789, np.nan, 123456.0]))
    [1.0, 0.12346, None, 123460.0]
    >>> plain(np.array([7.0, 123456.0]))
    [7, 123460]
    """
    known = np.isfinite(values)
    short = _short(np.where(known, values, 0.0), digits)
    if (short == np.floor(short)).all() and (np.abs(short) < 1e15).all():
        short = short.astype(np.int64)
    found: list[float | None] = short.tolist()
    return found if known.all() else [value if here else None for value, here in zip(found, known, strict=True)]


def _short(values: Column, digits: int) -> Column:
    """Round to significant digits; whole powers of ten give the float nearest to the decimal."""
    sizes = np.abs(values)
    shift = digits - 1 - np.floor(np.log10(np.where(sizes > 1e-200, sizes, 1.0)))
    finer, coarser = 10.0 ** np.clip(shift, 0.0, 300.0), 10.0 ** np.clip(-shift, 0.0, 300.0)
    rounded: Column = np.round(values * finer / coarser) / finer * coarser
    return rounded


def rates(times: Column, amounts: Column, most: int = 80) -> tuple[Column, Column]:
    """Return amounts per second over at most `most` equal intervals: their ends, and the rates."""
    if not len(times) or times[-1] <= 0.0:
        return np.zeros(0), np.zeros(0)
    stretches = max(1, min(most, len(times) // 4))
    edges = np.linspace(0.0, times[-1], stretches + 1)
    whole = np.interp(edges, np.concatenate([[0.0], times]), np.concatenate([[0.0], np.cumsum(amounts)]))
    return edges[1:], np.diff(whole) / np.diff(edges)
