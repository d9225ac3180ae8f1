"""Slice a payload by ranges of the update, to send each of several servers its part.

A push is encoded once, as for one server, so error feedback and decoded values have the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.codecs.dense import HalfPrecision, Uncompressed
from paceline.codecs.flat import FlatCodec, floats
from paceline.codecs.quantized import BLOCK, Int8, Sign
from paceline.codecs.sparse import ENTRY_NBYTES, TopK
from paceline.errors import ProtocolError
from paceline.interfaces import Codec


class CodecSlice(ABC):
    """Extracts the part of a payload of codec `whole` that belongs to `span`, and decodes it."""

    is_replicated = False  # whether each server gets the whole payload

    def __init__(self, whole: FlatCodec, span: slice) -> None:
        self._whole, self._span = whole, span
        self._size: int = span.stop - span.start

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Maximum bytes of a part."""

    @abstractmethod
    def extract(self, payload: Tensor, out: Tensor) -> int:
        """Write the part of a payload into `out` (uint8) and return its number of bytes."""

    @abstractmethod
    def decode(self, part: Tensor, out: Tensor) -> None:
        """Decode a part into `out`, as long as the range; raise ProtocolError for invalid bytes."""


class RowSlice(CodecSlice):
    """Part of a payload that consists of rows with a fixed number of bytes per float: a piece of each row.

    >>> from paceline.interfaces import pack
    >>> whole, half = (HalfPrecision(pack([("w", (size,), True)]), torch.bfloat16) for size in (512, 256))
    >>> part, out = RowSlice(whole, slice(256, 512), half), torch.zeros(512, dtype=torch.uint8)
    >>> part.extract(torch.arange(1024).to(torch.uint8), out), out[:3].tolist()
    (512, [0, 1, 2])
    """

    def __init__(self, whole: FlatCodec, span: slice, codec: FlatCodec) -> None:
        super().__init__(whole, span)
        assert span.start % BLOCK == 0, f"a range must begin at a multiple of {BLOCK}, not {span.start}"
        self.codec: Codec = codec
        """Codec of the range alone: it encodes to the same bytes as the part of a whole payload."""
        self._decodes = codec
        self._pieces = list(self._find_pieces(_rows(whole)))

    def _find_pieces(self, rows: tuple[tuple[int, int], ...]) -> Iterator[slice]:
        begin = 0
        for count, nbytes in rows:
            first, last = self._span.start // count, -(-self._span.stop // count)
            yield slice(begin + nbytes * first, begin + nbytes * last)
            begin += nbytes * -(-self._whole.size // count)

    @property
    def capacity(self) -> int:
        return self._decodes.capacity

    def extract(self, payload: Tensor, out: Tensor) -> int:
        torch.cat([payload[piece] for piece in self._pieces], out=out[: self.capacity])
        return self.capacity

    def insert(self, part: Tensor, payload: Tensor) -> None:
        """Write a part into its place in a whole payload: the inverse of `extract`."""
        begin = 0
        for piece in self._pieces:
            end = begin + piece.stop - piece.start
            payload[piece].copy_(part[begin:end])
            begin = end

    def decode(self, part: Tensor, out: Tensor) -> None:
        self._decodes.decode(part, out)


class TopKSlice(CodecSlice):
    """Part of a top-k payload: the entries in the range, with indices relative to its begin."""

    def __init__(self, whole: TopK, span: slice) -> None:
        super().__init__(whole, span)
        self._max_entries = min(whole.capacity // ENTRY_NBYTES, self._size)

    @property
    def capacity(self) -> int:
        return ENTRY_NBYTES * self._max_entries

    def extract(self, payload: Tensor, out: Tensor) -> int:
        num = payload.numel() // ENTRY_NBYTES
        indices, values = payload[: 4 * num].view(torch.int32), floats(payload, 4 * num, num)
        chosen = ((indices >= self._span.start) & (indices < self._span.stop)).nonzero().flatten()
        count: int = chosen.numel()
        out[: 4 * count].view(torch.int32).copy_(indices.index_select(0, chosen).sub_(self._span.start))
        floats(out, 4 * count, count).copy_(values.index_select(0, chosen))
        return ENTRY_NBYTES * count

    def decode(self, part: Tensor, out: Tensor) -> None:
        num = part.numel() // ENTRY_NBYTES
        indices = part[: 4 * num].view(torch.int32).long()
        if part.numel() % ENTRY_NBYTES or num > self._max_entries:
            raise ProtocolError(f"{part.numel()} bytes by codec {self._whole.name}: at most {self.capacity} expected")
        if num and not 0 <= indices.amin().item() <= indices.amax().item() < self._size:
            raise ProtocolError(f"an index outside the range of {self._size} values, by codec {self._whole.name}")
        out.zero_().index_copy_(0, indices, floats(part, 4 * num, num))


class ReplicatedSlice(CodecSlice):
    """The whole payload, for factors of whole layers: each server multiplies them and keeps its range."""

    is_replicated = True

    def __init__(self, whole: FlatCodec, span: slice) -> None:
        super().__init__(whole, span)
        self._decoded: Tensor | None = None

    @property
    def capacity(self) -> int:
        return self._whole.capacity

    def extract(self, payload: Tensor, out: Tensor) -> int:
        out[: payload.numel()].copy_(payload)
        return payload.numel()

    def decode(self, part: Tensor, out: Tensor) -> None:
        if self._decoded is None:
            self._decoded = torch.empty(self._whole.size)
        self._whole.decode(part, self._decoded)
        out.copy_(self._decoded[self._span])


def _rows(codec: FlatCodec) -> tuple[tuple[int, int], ...]:
    """Return (floats, bytes) of one entry, for each row of a payload."""
    match codec:
        case Uncompressed():
            return ((1, 4),)
        case HalfPrecision():
            return ((1, 2),)
        case Int8():
            return (BLOCK, 4), (1, 1)
        case Sign():
            return (BLOCK, 4), (8, 1)
    raise AssertionError(f"payloads of {codec.name} have no rows")


def slice_codec(whole: FlatCodec, span: slice, codec: FlatCodec) -> CodecSlice:
    """Return how payloads of `whole` are sliced for `span`; `codec` is the same codec built for that range."""
    if isinstance(whole, TopK):
        return TopKSlice(whole, span)
    if isinstance(whole, Uncompressed | HalfPrecision | Int8 | Sign):
        return RowSlice(whole, span, codec)
    return ReplicatedSlice(whole, span)
