"""PowerSGD codec: send two low-rank factors of each matrix."""

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
    """A parameter as rows (its first axis) by columns (all others), with the offsets of its factors."""

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
        """Return the right factor as [rank, columns], the layout in which products are several times faster."""
        return flat[self.right : self.right + self.columns * self.rank].view(self.rank, self.columns)


class LowRank(FlatCodec):
    """L = orthonormal(M R'^T);  R = L^T M;  sent = L R;  E = M - sent, with M = U + E, R' the R of the last push.

    One step of power iteration per push. Vectors, and matrices too small to gain, are sent unchanged. A push takes
    4 bytes per float: rank (rows + columns) floats per matrix, plus the unchanged ones. On a ring both factors are
    linear in the update, so they go by reduce, first M R'^T of all matrices, then L^T M: 2 (n - 1) / n times as many
    bytes. (PowerSGD, arXiv 1905.13727)

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
        """Return the initial memory; the first factors are the same for all workers and keys."""
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
        """Fill `out` with the mean over a ring: L and R are factors of the mean of all workers' M.

        `memory["error"]` holds M = U + E before, and E = M - L R after. `average` replaces a vector by its mean over
        all workers.
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
                _save_direction(matrix.right_of(factors), right)
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
            _save_direction(last, right)
        for span, begin in self._dense:
            sent[begin : begin + span.stop - span.start].copy_(update[span])
        return self.capacity

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        sent = floats(payload, 0, self._num_floats)
        for matrix in self._matrices:
            torch.mm(matrix.left_of(sent), matrix.right_of(sent), out=matrix.view(out))
        self._fill_dense(sent, out)

    def _fill_dense(self, sent: Tensor, out: Tensor) -> None:
        for span, begin in self._dense:
            out[span].copy_(sent[begin : begin + span.stop - span.start])
        out.index_fill_(0, self._gaps, 0.0)


def _project(values: Tensor, right: Tensor) -> Tensor:
    """Return values right^T, as the transpose of a product that is almost twice as fast."""
    return torch.mm(right, values.T).T


def _save_direction(last: Tensor, right: Tensor) -> None:
    """Save the normalised factor as the start of the next push; skip a factor of zeros."""
    largest = right.abs().amax()
    last.copy_(torch.where(largest > 0, right / largest, last))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: thin products are faster there, and their last bits depend on the number of threads."""
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
    """Return whether the two factors have fewer floats than the parameter."""
    if len(parameter.shape) < 2 or not parameter.size:
        return False
    return rank * (parameter.shape[0] + parameter.size // parameter.shape[0]) < parameter.size
