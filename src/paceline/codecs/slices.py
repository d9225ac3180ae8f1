"""The part of a payload that belongs to a range of the update: what one of several servers is sent.

A push is encoded once, as for one server, so what its codec leaves out and what it decodes to have the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.codecs.dense import Exact, Rounded
from paceline.codecs.flat import FlatCodec, floats
from paceline.codecs.quantized import BLOCK, Int8, Sign
from paceline.codecs.sparse import ENTRY_NBYTES, TopK
from paceline.errors import ProtocolError
from paceline.interfaces import Codec


class CodecPart(ABC):
    """What becomes of payloads of `whole` where they are cut: the part of `span`, and what that decodes to."""

    is_shared = False
    """Whether every part is all of the payload."""

    def __init__(self, whole: FlatCodec, span: slice) -> None:
        self._whole, self._span = whole, span
        self._size: int = span.stop - span.start

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The most bytes that a part takes."""

    @abstractmethod
    def cut(self, payload: Tensor, out: Tensor) -> int:
        """Write the part of a payload into the bytes of `out`; how many."""

    @abstractmethod
    def decode(self, part: Tensor, out: Tensor) -> None:
        """Fill `out`, as long as the range; ProtocolError for bytes that are no part."""


class Sliced(CodecPart):
    """Of a payload of rows, each with so many bytes for so many floats: a piece of every row.

    >>> from paceline.interfaces import pack
    >>> whole, half = (Rounded(pack([("w", (size,), True)]), torch.bfloat16) for size in (512, 256))
    >>> part, out = Sliced(whole, slice(256, 512), half), torch.zeros(512, dtype=torch.uint8)
    >>> part.cut(torch.arange(1024).to(torch.uint8), out), out[:3].tolist()
    (512, [0, 1, 2])
    """

    def __init__(self, whole: FlatCodec, span: slice, codec: FlatCodec) -> None:
        super().__init__(whole, span)
        assert span.start % BLOCK == 0, f"a range of encoded floats begins at a multiple of {BLOCK}, not {span.start}"
        self.codec: Codec = codec
        """Of the range alone: it encodes to the part of what `whole` would."""
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

    def cut(self, payload: Tensor, out: Tensor) -> int:
        torch.cat([payload[piece] for piece in self._pieces], out=out[: self.capacity])
        return self.capacity

    def paste(self, part: Tensor, payload: Tensor) -> None:
        """The inverse of `cut`: put a part where it belongs."""
        begin = 0
        for piece in self._pieces:
            end = begin + piece.stop - piece.start
            payload[piece].copy_(part[begin:end])
            begin = end

    def decode(self, part: Tensor, out: Tensor) -> None:
        self._decodes.decode(part, out)


class Picked(CodecPart):
    """Of the largest values, those in the range; places are counted from its begin."""

    def __init__(self, whole: TopK, span: slice) -> None:
        super().__init__(whole, span)
        self._most = min(whole.capacity // ENTRY_NBYTES, self._size)

    @property
    def capacity(self) -> int:
        return ENTRY_NBYTES * self._most

    def cut(self, payload: Tensor, out: Tensor) -> int:
        num = payload.numel() // ENTRY_NBYTES
        places, values = payload[: 4 * num].view(torch.int32), floats(payload, 4 * num, num)
        mine = ((places >= self._span.start) & (places < self._span.stop)).nonzero().flatten()
        count: int = mine.numel()
        out[: 4 * count].view(torch.int32).copy_(places.index_select(0, mine).sub_(self._span.start))
        floats(out, 4 * count, count).copy_(values.index_select(0, mine))
        return ENTRY_NBYTES * count

    def decode(self, part: Tensor, out: Tensor) -> None:
        num = part.numel() // ENTRY_NBYTES
        places = part[: 4 * num].view(torch.int32).long()
        if part.numel() % ENTRY_NBYTES or num > self._most:
            raise ProtocolError(f"{part.numel()} bytes by codec {self._whole.name}: at most {self.capacity} expected")
        if num and not 0 <= places.amin().item() <= places.amax().item() < self._size:
            raise ProtocolError(f"a place that is not among the {self._size} of its range, by codec {self._whole.name}")
        out.zero_().index_copy_(0, places, floats(part, 4 * num, num))


class Shared(CodecPart):
    """Of factors of whole layers: everything. Each server multiplies them, and keeps its range."""

    is_shared = True

    def __init__(self, whole: FlatCodec, span: slice) -> None:
        super().__init__(whole, span)
        self._decoded: Tensor | None = None

    @property
    def capacity(self) -> int:
        return self._whole.capacity

    def cut(self, payload: Tensor, out: Tensor) -> int:
        out[: payload.numel()].copy_(payload)
        return payload.numel()

    def decode(self, part: Tensor, out: Tensor) -> None:
        if self._decoded is None:
            self._decoded = torch.empty(self._whole.size)
        self._whole.decode(part, self._decoded)
        out.copy_(self._decoded[self._span])


def _rows(codec: FlatCodec) -> tuple[tuple[int, int], ...]:
    """Floats and bytes of one entry, for each row of a payload."""
    match codec:
        case Exact():
            return ((1, 4),)
        case Rounded():
            return ((1, 2),)
        case Int8():
            return (BLOCK, 4), (1, 1)
        case Sign():
            return (BLOCK, 4), (8, 1)
    raise AssertionError(f"payloads of {codec.name} have no rows")


def part_of_codec(whole: FlatCodec, span: slice, codec: FlatCodec) -> CodecPart:
    """How payloads of `whole` are cut for `span`; `codec` is the same one, built for that range."""
    if isinstance(whole, TopK):
        return Picked(whole, span)
    return Sliced(whole, span, codec) if isinstance(whole, Exact | Rounded | Int8 | Sign) else Shared(whole, span)
