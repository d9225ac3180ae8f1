"""The two sides of every transport: a worker holds a `Transport`, the server one `Peer` per worker."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import DataAssignment, Join, OwnLoopInput, Push, Reply
from paceline.errors import ProtocolError
from paceline.interfaces import MAX_WORKERS, State
from paceline.system.memory import available_memory
from paceline.system.terminal import printable
from paceline.transports.frames import ANYTHING, FLAG, UINT32, Schema, checked, integer, nullable, optional

MEMBER_NBYTES, PASS_NBYTES = 2, 4
MAX_ASSIGNMENT_NBYTES = PASS_NBYTES + MEMBER_NBYTES * MAX_WORKERS
MAX_SECONDS = 1e8  # of one step: three years
MAX_WEIGHT = 2.0**53
BY_SAMPLES = -1.0  # in place of the weight of a push that has none
MAX_NAMES, MAX_NAME = 1000, 100  # how many metrics a worker may report at once, and how long a name may be
HELLO_FIELDS: Schema = {
    "worker": optional(ANYTHING),  # who sends it is known
    "incarnation": optional(ANYTHING),
    "quota": nullable(integer(0, UINT32 - 1)),
    "threads": integer(1, 1 << 16),
    "own_loop": optional(FLAG, False),
    "sizes": ANYTHING,
}
"""The fields of a hello. All others are facts about model and data, which are only compared."""
_COUNT = integer(0, 1 << 48)
_SIZES: Schema = dict.fromkeys(BufferSizes._fields, _COUNT) | dict.fromkeys(("payload", "pulled"), nullable(_COUNT))


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


class RequestKind(enum.IntEnum):
    """What a user's own loop may ask for beside the replies to its pushes."""

    WEIGHTS = 0
    FINAL_WEIGHTS = 1
    OPTIMIZER = 2
    STATISTICS = 3  # of all workers, for its own


@dataclass(frozen=True)
class InitialTensors:
    """What the model of an own loop begins with, from the worker that is asked for it; no push brings it.

    `frozen` belongs to the saved weights, `optimizers` are the states of optimizers that were used before.
    """

    worker: int
    weights: Tensor
    frozen: State
    optimizers: State


class Keepalive(enum.Enum):
    """What shows that a worker is alive, and gives the server nothing to do."""

    HEARD = "heartbeat"  # of a worker that has begun no step since its last message
    STEPPED = "heartbeat after a step"
    PARTIAL = "part of a message"


HEARD = Keepalive.HEARD

Message: TypeAlias = Hello | InitialTensors | Push | OwnLoopInput | ReportedFigures | Keepalive
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
    """What a user's own loop needs besides: it evaluates and saves what the server has."""

    def read_weights(self, final: bool) -> bool | None:
        """Get the weights that would be saved now into the buffers given to `hello`; `final`: wait for the last ones.

        Return whether they are averaged, or None if the server is gone.
        """

    def read_optimizer(self, number: int) -> State | None:
        """Return the state of one of the loop's optimizers as the server has it; None if the server is gone."""

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


class ScriptPeer(Peer, Protocol):
    """The connection to a worker that runs a user's own loop: it also asks for what is evaluated and saved."""

    @property
    def slot(self) -> WorkerBuffers | None:
        """The worker's buffers, once it has said hello."""

    def confirm(self, averaged: bool = False) -> None:
        """Answer the worker's last request: the weights or statistics that it waits for are in its buffers."""

    def send_optimizer(self, state: State) -> None:
        """Answer the worker's last request with the state of an optimizer."""


def parse_hello(worker: int, incarnation: int, fields: Mapping[str, Any]) -> tuple[Join, Any, dict[str, Any]]:
    """Return a worker's join, the sizes it asks for, which are not checked yet, and its facts."""
    found = checked(fields, HELLO_FIELDS)
    facts = {name: value for name, value in fields.items() if name not in HELLO_FIELDS}
    return Join(worker, incarnation, found["quota"], found["threads"], found["own_loop"]), found["sizes"], facts


def parse_sizes(asked: Any) -> BufferSizes:
    """Return the sizes of a worker's buffers: whole numbers, and null for what an exchange does not have.

    >>> parse_sizes([10, 0, None, None, 0, 0])
    BufferSizes(weights=10, state=0, payload=None, pulled=None, local_state=0, loop=0)
    """
    if not isinstance(asked, list) or len(asked) != len(_SIZES):
        raise ProtocolError("a hello without sizes")
    return BufferSizes(**checked(dict(zip(BufferSizes._fields, asked, strict=True)), _SIZES))


def _within(size: int | None, most: int | None) -> bool:
    """Whether the size of a part is allowed; None if there is no such part."""
    return size is most if size is None or most is None else 0 <= size <= most


def require_fitting(sizes: BufferSizes, most: BufferSizes | None) -> None:
    """Check the sizes of a worker's buffers before allocating them; without `most`, that they leave half of the memory.

    >>> require_fitting(BufferSizes(10), BufferSizes(10))
    >>> require_fitting(BufferSizes(11), BufferSizes(10))
    Traceback (most recent call last):
    paceline.errors.ProtocolError: buffers with weights of 11, which may have at most 10
    """
    if most is None:
        nbytes, free = sum(dtype.itemsize * count for dtype, count in sizes.parts().values()), available_memory()
        if nbytes > free // 2:  # the server needs as much for the weights and its optimizer
            raise ProtocolError(f"buffers of {nbytes} bytes, and {free} are free: they may take half of that")
        return
    for name, count, limit in zip(BufferSizes._fields, sizes, most, strict=True):
        if not _within(count, limit):
            raise ProtocolError(f"buffers with {name} of {count}, which may have at most {limit}")


def parse_figures(worker: int, fields: Mapping[str, Any]) -> ReportedFigures:
    """Return reported metrics. Values are numbers, or numbers as text, since JSON has no NaN.

    >>> parse_figures(0, {"loss": 0.5, "f1": "nan"}).values
    {'loss': 0.5, 'f1': nan}
    """
    if len(fields) > MAX_NAMES or any(len(name) > MAX_NAME for name in fields):
        raise ProtocolError(f"more than {MAX_NAMES} metrics, or names of more than {MAX_NAME} characters")
    if any(type(value) not in (int, float, str) for value in fields.values()):
        raise ProtocolError("metrics that are not numbers by name")
    try:
        return ReportedFigures(worker, {printable(name, MAX_NAME): float(value) for name, value in fields.items()})
    except (ValueError, OverflowError):
        raise ProtocolError("metrics that are not numbers by name") from None


def check_push(seq: int, reply: int, samples: int, loss: float, timing: Timing, weight: float | None) -> None:
    """Raise ProtocolError if no worker can mean these numbers. A loss may be infinite or unknown (NaN).

    A push that has a weight may have no samples: it is another step on the same batch.

    >>> check_push(0, 0, 32, 0.5, Timing(0.1, math.nan, 0.0), None)
    Traceback (most recent call last):
    paceline.errors.ProtocolError: a push that took nan seconds
    """
    if seq != reply:
        raise ProtocolError(f"push {seq} for reply {reply}")
    if not samples and weight is None:
        raise ProtocolError("a push of no samples")
    if loss == -math.inf:
        raise ProtocolError("a push with a loss of -inf")
    for seconds in timing:
        if not 0.0 <= seconds <= MAX_SECONDS:
            raise ProtocolError(f"a push that took {seconds:g} seconds")
    if weight is not None and not 0.0 <= weight <= MAX_WEIGHT:
        raise ProtocolError(f"a push of weight {weight:g}")


def unreadable(worker: int, error: Exception) -> ProtocolError:
    """Make the error for bytes of a worker that no check foresaw: it ends that worker's connection, not the run."""
    return ProtocolError(f"worker {worker} sent what cannot be read ({type(error).__name__}: {printable(str(error))})")


def pack_assignment(assignment: DataAssignment) -> bytes:
    """Encode the first pass of an assignment, and its members, two bytes each."""
    return struct.pack(f"<I{len(assignment.members)}H", assignment.first_pass, *assignment.members)


def unpack_assignment(generation: int, packed: bytes | bytearray) -> DataAssignment:
    """Decode what `pack_assignment` encoded.

    >>> unpack_assignment(3, pack_assignment(DataAssignment(3, (0, 2), 7)))
    DataAssignment(generation=3, members=(0, 2), first_pass=7)
    """
    first_pass, *members = struct.unpack(f"<I{(len(packed) - PASS_NBYTES) // MEMBER_NBYTES}H", packed)
    return DataAssignment(generation, tuple(members), first_pass)
