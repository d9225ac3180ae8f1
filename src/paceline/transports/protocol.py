"""The two sides of every transport: a worker holds a `Transport`, the server one `Peer` per worker."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Join, OwnLoopInput, Push, Reply, SetLrFactor

MEMBER_NBYTES = 2


class Timing(NamedTuple):
    """Seconds of one worker step: CPU time, wall time, and the wait for the reply before it."""

    cpu: float
    wall: float
    waited: float


@dataclass(frozen=True)
class Hello:
    """A worker's first message: its join, its buffers, and facts that must match the server's."""

    join: Join
    slot: WorkerBuffers
    facts: dict[str, Any]


@dataclass(frozen=True)
class ReportedFigures:
    """Metrics that a script measured itself, for the run's result."""

    worker: int
    values: dict[str, float]


class Keepalive(enum.Enum):
    """What shows that a worker is alive, and gives the server nothing to do."""

    HEARD = "heartbeat"  # of a worker that has begun no step since its last message
    STEPPED = "heartbeat after a step"
    PARTIAL = "part of a message"


HEARD = Keepalive.HEARD

Message: TypeAlias = Hello | Push | OwnLoopInput | ReportedFigures | Keepalive
"""Everything that a server receives from a worker."""


class Transport(Protocol):
    """The client side: how a worker reaches its server, or all servers of a sharded run."""

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        """Join the run with these buffers. Return the first reply, or None if the server is gone."""

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send a push and wait for its reply. Return None if the server is gone.

        When it returns, the reply's weights (or the encoded difference to them) are in the buffers given to `hello`.
        """

    def report(self, figures: dict[str, float]) -> None:
        """Send metrics that belong in the run's result."""

    def close(self) -> None:
        """Leave the run."""


class ScriptTransport(Transport, Protocol):
    """What a user's own loop needs besides: its schedule runs in the worker, and so do its evaluations."""

    def set_rate(self, rate: SetLrFactor) -> None:
        """Change the learning rate from the next push on."""

    def read_weights(self, final: bool) -> bool | None:
        """Get the weights that would be saved now into the buffers given to `hello`; `final`: wait for the last ones.

        Return whether they are averaged, or None if the server is gone.
        """

    def merge_statistics(self, samples: int) -> bool:
        """Replace the statistics in the buffers by those of all workers at the end, weighted by samples.

        Return False if the server is gone.
        """


class Peer(Protocol):
    """The server side: the connection to one worker."""

    worker: int
    incarnation: int
    timing: Timing
    """Of the last push."""

    def fileno(self) -> int:
        """The descriptor to poll, or -1 if the connection is closed."""

    def receive(self) -> Message | None:
        """Read the next message. Return None if the worker is gone; raise ProtocolError if the bytes are malformed."""

    def answer(self, reply: Reply) -> None:
        """Send a reply. If the worker is gone, the next `receive` says so."""

    def close(self) -> None:
        """Close the connection."""


def pack_members(members: tuple[int, ...]) -> bytes:
    """Encode worker numbers, two bytes each."""
    return struct.pack(f"<{len(members)}H", *members)


def unpack_members(packed: bytes | bytearray) -> tuple[int, ...]:
    """Decode what `pack_members` encoded."""
    return struct.unpack(f"<{len(packed) // MEMBER_NBYTES}H", packed)
