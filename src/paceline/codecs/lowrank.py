"""The codec that sends two thin factors of every matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.flat import FlatCodec, floats
from paceline.interfaces import Layout, Parameter, Primitive, State
from paceline.randomness import mix64, scramble


@dataclass(frozen=True)
class Matrix:
    """A parameter as rows (its first axis) by columns (all others), and where its factors begin."""

    offset: int
    rows: int
    columns: int
    rank: int
    left: int
    right: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)

    def left_of(self, flat: Tensor) -> Tensor:
        return flat[self.left : self.left + self.rows * self.rank].view(self.rows, self.rank)

    def right_of(self, flat: Tensor) -> Tensor:
        """As rank by columns: products with a thin factor are several times faster along the rows of both."""
        return flat[self.right : self.right + self.columns * self.rank].view(self.rank, self.columns)


class LowRank(FlatCodec):
    """L = orthonormal(M R'^T);  R = L^T M;  sent = L R;  E = M - sent, with M = U + E, R' the R of the last push.

    One step of power iteration a push. Vectors, and matrices too small to gain, are sent as they are. 4 bytes for each
    of R (rows + columns) floats a matrix and of those others; on a ring both factors are linear in the update, so they
    go by reduce, first all of M R'^T, then all of L^T M: 2 (n - 1) / n times that. (PowerSGD, arXiv 1905.13727)

    >>> from paceline.interfaces import pack
    >>> codec = LowRank(pack([("w", (100, 50), True), ("b", (50,), True)]), 2)
    >>> codec.name, codec.capacity == 4 * (2 * (100 + 50) + 50), codec.ring_nbytes(2)
    ('lowrank:2', True, 1400)
    """

    primitive: ClassVar[Primitive] = "reduce"

    def __init__(self, layout: Layout, rank: int, device: torch.device | None = None) -> None:
        super().__init__(layout, device)
        self._rank = rank
        thin = [parameter for parameter in layout.parameters if _gains(parameter, rank)]
        self._num_right = rank * sum(parameter.size // parameter.shape[0] for parameter in thin)
        self._matrices, left, right = [], self._num_right, 0
        for parameter in thin:
            rows, columns = parameter.shape[0], parameter.size // parameter.shape[0]
            self._matrices.append(Matrix(parameter.offset, rows, columns, rank, left, right))
            left, right = left + rank * rows, right + rank * columns
        self._dense = []
        for parameter in layout.parameters:
            if parameter not in thin:
                self._dense.append((slice(parameter.offset, parameter.offset + parameter.size), left))
                left += parameter.size
        self._num_floats = left

    @property
    def name(self) -> str:
        return f"lowrank:{self._rank}"

    @property
    def capacity(self) -> int:
        return 4 * self._num_floats

    def start(self, key: int = 0) -> State:
        """The first factors are the same for every worker, whatever its key."""
        counter = torch.arange(self._num_right, dtype=torch.int32)
        hashed = scramble(counter, mix64(self._rank), torch.empty_like(counter), torch.empty_like(counter))
        return {**super().start(), "factors": (hashed.float() * 2.0**-31).to(self.device)}

    def encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        with one_thread():
            return super().encode(update, memory, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        with one_thread():
            super().decode(payload, out)

    def reduce(self, memory: State, out: Tensor, average: Callable[[Tensor], None]) -> None:
        """Among workers that average with each other: `out` becomes the mean of what all send, one product for all.

        The memory's error holds M = U + E before, and E = M - L R after; L and R are of the mean of all M. `average`
        makes a vector the mean of everybody's.
        """
        sent, error, factors = out.new_empty(self._num_floats), memory["error"], memory["factors"]
        with one_thread():
            for matrix in self._matrices:
                matrix.left_of(sent).copy_(_project(matrix.view(error), matrix.right_of(factors)))
            for span, begin in self._dense:
                sent[begin : begin + span.stop - span.start].copy_(error[span])
                error[span].zero_()
            average(sent[self._num_right :])
            for matrix in self._matrices:
                left = matrix.left_of(sent)
                left.copy_(torch.linalg.qr(left).Q)
                torch.mm(left.T, matrix.view(error), out=matrix.right_of(sent))
            average(sent[: self._num_right])
            for matrix in self._matrices:
                left, right = matrix.left_of(sent), matrix.right_of(sent)
                matrix.view(error).sub_(torch.mm(left, right, out=matrix.view(out)))
                _keep_direction(matrix.right_of(factors), right)
            self._fill_dense(sent, out)

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        sent, error, factors = floats(out, 0, self._num_floats), memory["error"], memory["factors"]
        for matrix in self._matrices:
            values, last = matrix.view(error), matrix.right_of(factors)
            left, right = matrix.left_of(sent), matrix.right_of(sent)
            values.add_(matrix.view(update))
            left.copy_(torch.linalg.qr(_project(values, last)).Q)
            torch.mm(left.T, values, out=right)
            values.addmm_(left, right, alpha=-1)
            _keep_direction(last, right)
        for span, begin in self._dense:
            sent[begin : begin + span.stop - span.start].copy_(update[span])
        return self.capacity

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        self._fill(floats(payload, 0, self._num_floats), out)

    def _fill(self, sent: Tensor, out: Tensor) -> None:
        for matrix in self._matrices:
            torch.mm(matrix.left_of(sent), matrix.right_of(sent), out=matrix.view(out))
        self._fill_dense(sent, out)

    def _fill_dense(self, sent: Tensor, out: Tensor) -> None:
        for span, begin in self._dense:
            out[span].copy_(sent[begin : begin + span.stop - span.start])
        out.index_fill_(0, self._gaps, 0.0)


def _project(values: Tensor, right: Tensor) -> Tensor:
    """values right^T, as the transpose of a product that is almost twice as fast."""
    return torch.mm(right, values.T).T


def _keep_direction(last: Tensor, right: Tensor) -> None:
    """The next push starts from this one's factor; a factor of zeros says nothing."""
    largest = right.abs().amax()
    last.copy_(torch.where(largest > 0, right / largest, last))


@contextmanager
def one_thread() -> Iterator[None]:
    """Thin products have other last bits on other numbers of threads, and are faster on one."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _gains(parameter: Parameter, rank: int) -> bool:
    """Whether two factors are fewer floats than the parameter."""
    if len(parameter.shape) < 2 or not parameter.size:
        return False
    return rank * (parameter.shape[0] + parameter.size // parameter.shape[0]) < parameter.size
