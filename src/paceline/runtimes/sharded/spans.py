"""Divide the flat weight vector among servers, and refuse settings that need it whole. Imports no torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.codecs import CODECS, build_part, codec_of
from paceline.settings.rules import chosen
from paceline.settings.strategies import strategy_of

if TYPE_CHECKING:
    from paceline.codecs.slices import CodecSlice, RowSlice
    from paceline.interfaces import Layout

GRAIN, CODED_GRAIN = 64, 256
"""Ranges begin at multiples of so many floats. No vector instruction takes more at once, so a range gets the same bits
as within the whole. With a codec, blocks of CODED_GRAIN floats share a scale."""


def require_cuttable(config: RunConfig, servers: int) -> None:
    """Refuse settings that need all weights in one server."""
    if servers < 1:
        raise UserError(f"--servers {servers}: a run needs at least one")
    if servers == 1:
        return
    divided = f"--servers {servers} divides the weights into ranges, and"
    if config.robust:
        raise UserError(f"{divided} --robust needs the norm of a whole push: leave out one of the two")
    pull = config.pull_codec
    if pull is not None and not codec_of(pull).traits.by_range:
        known = ", ".join(name for name, traits in CODECS.items() if traits.by_range)
        raise UserError(f"{divided} --pull-codec {pull} looks at all of them at once: use one of {known}")
    if strategy_of(config).is_local:
        return  # clipping, lars and muon happen inside the workers
    if config.clip is not None:
        raise UserError(f"{divided} --clip {config.clip:g} needs the norm of all of them: leave out one of the two")
    whole = {"lars": ("the norm of each layer", "sgd"), "muon": ("whole matrices", "adamw")}
    if config.optimizer in whole:
        needed, instead = whole[config.optimizer]
        raise UserError(f"{divided} {config.optimizer} needs {needed}: leave out one, or use --optimizer {instead}")
    if config.rule == "auto" and chosen(config, None).is_measured:
        raise UserError(f"{divided} --rule auto measures its steps on all of them: use --rule auto-counted")


def grain_of(config: RunConfig) -> int:
    """The number of floats that every range begins at a multiple of."""
    return GRAIN if config.codec is None and config.pull_codec is None else CODED_GRAIN


def spans_of(size: int, servers: int, grain: int = GRAIN) -> list[slice]:
    """Divide a vector of `size` floats into one range a server, as equal as whole grains allow.

    >>> spans_of(320, 2)
    [slice(0, 192, None), slice(192, 320, None)]
    """
    grains = -(-size // grain)
    if grains < servers:
        most = f"{size} floats make {grains} ranges of {grain} at most"
        raise UserError(f"--servers {servers}: {most}; use fewer servers")
    ends = [min(size, grain * -(-grains * number // servers)) for number in range(servers + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def part_of(layout: Layout, span: slice) -> Layout:
    """The layout of a range: its parameters, or flat slices of them.

    >>> from paceline.interfaces import pack
    >>> part_of(pack([("a", (100,), True), ("b", (7, 9), False)]), slice(64, 192)).parameters
    (Parameter(name='a', shape=(36,), offset=0, decay=True), Parameter(name='b', shape=(63,), offset=48, decay=False))
    """
    from paceline.interfaces import Layout, Parameter

    pieces = []
    for parameter in layout.parameters:
        first, last = max(parameter.offset, span.start), min(parameter.offset + parameter.size, span.stop)
        if first < last:
            pieces.append(Parameter(parameter.name, (last - first,), first - span.start, parameter.decay))
    return Layout(tuple(pieces), span.stop - span.start)


class SpanCodecs(NamedTuple):
    """The codecs of one range's pushes and replies; None if they are not encoded."""

    push: CodecSlice | None = None
    pull: RowSlice | None = None

    @property
    def capacities(self) -> tuple[int | None, int | None]:
        """The most bytes of a part of a push and of a reply."""
        push, pull = self.push, self.pull
        return push.capacity if push is not None else None, pull.capacity if pull is not None else None


def coding_of(config: RunConfig, layout: Layout, span: slice) -> SpanCodecs:
    """The codecs of a run, restricted to the range `span`."""
    from paceline.codecs.slices import RowSlice

    push, pull = (
        build_part(name, layout, span, part_of(layout, span)) if name is not None else None
        for name in (config.codec, config.pull_codec)
    )
    assert pull is None or isinstance(pull, RowSlice), "others were refused at the start"
    return SpanCodecs(push, pull)
