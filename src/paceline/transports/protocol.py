"""The messages of every transport besides the core's: timings, the hello of a worker, its figures and its members."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.buffers import Memory
from paceline.core.messages import Join

MEMBER_NBYTES = 2


class Timing(NamedTuple):
    """Seconds of a worker's step: on a processor, by the clock, and waiting for the reply before it."""

    cpu: float
    wall: float
    waited: float


def pack_members(members: tuple[int, ...]) -> bytes:
    """Two bytes a worker."""
    return struct.pack(f"<{len(members)}H", *members)


def unpack_members(packed: bytes | bytearray) -> tuple[int, ...]:
    """The inverse of `pack_members`."""
    return struct.unpack(f"<{len(packed) // MEMBER_NBYTES}H", packed)


@dataclass(frozen=True)
class Hello:
    """A worker's first words: its join, its memory, and what it says of itself."""

    join: Join
    slot: Memory
    facts: dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """What a script measured itself, for the result."""

    worker: int
    values: dict[str, float]
