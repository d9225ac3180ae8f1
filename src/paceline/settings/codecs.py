"""The codecs by name: what each does, and how to build it. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UserError
from paceline.settings.notation import name_and_argument

if TYPE_CHECKING:
    import torch

    from paceline.codecs.flat import FlatCodec
    from paceline.codecs.slices import CodecSlice
    from paceline.interfaces import Layout

MAX_FRACTION = 0.5  # of the values that `topk` sends: beyond it, indices and values take more bytes than all values


@dataclass(frozen=True)
class CodecTraits:
    """What is known of a codec before it is built."""

    text: str
    letter: str = ""  # stands for the number behind the colon
    by_range: bool = True  # whether it can encode a range of an update without the rest


CODECS = {
    "none": CodecTraits("every float as it is"),
    "fp16": CodecTraits("every value in 16 bits, 11 of them significant"),
    "bf16": CodecTraits("every value in 16 bits, 8 of them significant"),
    "int8": CodecTraits("every value in 8 bits, a scale for each 256"),
    "sign": CodecTraits("every sign, a magnitude for each 256"),
    "topk": CodecTraits("the largest values, a share F of all: topk:F", letter="F", by_range=False),
    "lowrank": CodecTraits("two factors of R columns for each matrix: lowrank:R", letter="R", by_range=False),
}


class NamedCodec(NamedTuple):
    """A codec as the user names it, and the number behind its colon."""

    name: str
    number: float

    @property
    def traits(self) -> CodecTraits:
        return CODECS[self.name]


@cache
def codec_of(text: str) -> NamedCodec:
    """Parse `int8` or `lowrank:4`, once for each text.

    >>> codec_of("lowrank:4")
    NamedCodec(name='lowrank', number=4.0)
    """
    name, argument = name_and_argument("codec", text, {name: traits.letter for name, traits in CODECS.items()})
    letter = CODECS[name].letter
    if letter == "R" and (not argument.isdecimal() or int(argument) < 1):
        raise UserError(f"codec '{text}': the rank after the colon must be a whole number of at least 1")
    return NamedCodec(name, _fraction(text, argument) if letter == "F" else float(argument or 0))


def _fraction(text: str, argument: str) -> float:
    try:
        fraction = float(argument)
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction <= MAX_FRACTION:
        raise UserError(f"codec '{text}': the share after the colon must be above 0 and at most {MAX_FRACTION}")
    return fraction


def build_codec(text: str, layout: Layout, device: torch.device | None = None, first: int = 0) -> FlatCodec:
    """Build a codec for updates of `layout`, which may be the range of a longer layout that begins at `first`."""
    import torch

    from paceline.codecs.dense import HalfPrecision, Uncompressed
    from paceline.codecs.lowrank import LowRank
    from paceline.codecs.quantized import Int8, Sign
    from paceline.codecs.sparse import TopK

    name, number = codec_of(text)
    match name:
        case "fp16" | "bf16":
            return HalfPrecision(layout, torch.float16 if name == "fp16" else torch.bfloat16, device)
        case "int8":
            return Int8(layout, device, first)
        case "sign":
            return Sign(layout, device)
        case "topk":
            return TopK(layout, number, device)
        case "lowrank":
            return LowRank(layout, int(number), device)
    return Uncompressed(layout, device)


def build_part(text: str, layout: Layout, span: slice, part: Layout) -> CodecSlice:
    """Build the codec of one of several servers, which holds the range `span` of `layout`, laid out as `part`."""
    from paceline.codecs.slices import slice_codec

    return slice_codec(build_codec(text, layout), span, build_codec(text, part, first=span.start))
