"""Where the flat vector is cut for several servers, and which settings need it whole. It imports no torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from paceline.assemble import parse_strategy
from paceline.config import RunConfig
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.interfaces import Layout

GRAIN = 64
"""Floats. Vector instructions take this many or fewer at once, so a range has the bits that it has within the whole."""


def require_cuttable(config: RunConfig, servers: int) -> None:
    """Refuse what one server must see whole."""
    if servers < 1:
        raise UserError(f"--servers {servers}: a run needs at least one")
    if servers == 1:
        return
    asked = f"--servers {servers} cuts the weights into ranges, and"
    for flag, codec in (("--codec", config.codec), ("--pull-codec", config.pull_codec)):
        if codec not in (None, "none"):
            raise UserError(f"{asked} {flag} {codec} encodes them whole: leave out one of the two")
    if parse_strategy(config.strategy).is_local:
        return  # what needs the whole is inside the workers
    if config.clip is not None:
        raise UserError(f"{asked} --clip {config.clip:g} needs the norm of all of them: leave out one of the two")
    if config.optimizer == "lars":
        raise UserError(f"{asked} lars needs the norm of each layer: leave out one, or use --optimizer sgd")


def spans_of(size: int, servers: int) -> list[slice]:
    """As many ranges of a vector of `size` floats, as equal as whole grains allow.

    >>> spans_of(320, 2)
    [slice(0, 192, None), slice(192, 320, None)]
    """
    grains = -(-size // GRAIN)
    if grains < servers:
        raise UserError(
            f"--servers {servers}: {size} floats make {grains} ranges of {GRAIN} at most; use fewer servers"
        )
    ends = [min(size, GRAIN * -(-grains * number // servers)) for number in range(servers + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def part_of(layout: Layout, span: slice) -> Layout:
    """The layout of a range: its parameters, or flat pieces of them.

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
