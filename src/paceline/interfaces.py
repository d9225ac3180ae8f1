"""The types everything else is built from; read this file first, then `core/messages.py` and `transports/protocol.py`.

A worker turns weights into a push. The server turns pushes into weights. A worker waits until the server replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "dict[str, Tensor]"
"""Named tensors and nothing else, so that a state can be saved, restored and batched."""

Report: TypeAlias = Callable[[dict[str, Any]], None]
"""Takes one row of progress, for the console or a tracker."""

ALIGNMENT = 16
"""Parameters start at multiples of this many floats (one cache line), in every process."""


@dataclass(frozen=True)
class Parameter:
    """The place of one named parameter in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """All parameters of a model in one flat vector of `size` floats. Gaps between them are always zero."""

    parameters: tuple[Parameter, ...]
    size: int

    @property
    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter by name, as a view into `flat`."""
        return {p.name: flat[p.offset : p.offset + p.size].view(p.shape) for p in self.parameters}

    def to_rows(self) -> list[list[Any]]:
        """Convert the layout to plain lists, for JSON."""
        return [[p.name, list(p.shape), p.offset, p.decay] for p in self.parameters]

    @staticmethod
    def from_rows(rows: list[list[Any]]) -> Layout:
        """Build a layout from the lists of `to_rows`."""
        return pack([(name, tuple(shape), bool(decay)) for name, shape, _, decay in rows])


def pack(parameters: Sequence[tuple[str, tuple[int, ...], bool]]) -> Layout:
    """Place (name, shape, decay) triples one after another, each at an aligned offset.

    >>> pack([("a", (3,), True), ("b", (2, 2), True)]).parameters[1].offset
    16
    """
    laid, offset = [], 0
    for name, shape, decay in parameters:
        laid.append(Parameter(name, shape, offset, decay))
        offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(laid), max(offset, ALIGNMENT))


@dataclass(slots=True)
class Batch:
    """One batch: its data, the number of samples it counts for, and the 64-bit key of all its randomness.

    `weight` is how many items its mean loss counts, such as tokens, if these are not its samples.
    """

    inputs: Any
    targets: Any
    samples: int
    key: int
    weight: float | None = None


@dataclass(frozen=True)
class Scores:
    """The evaluation of some weights on some data."""

    loss: float
    correct: int
    total: int
    per_class: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the task, by name."""
    constant_correct: int = 0
    """How many samples have the most frequent class: what answering it always would get right."""
    constant_loss: float | None = None
    """The loss of predicting the class frequencies for every sample. None if targets are no class numbers."""

    def value(self, metric: str) -> float | None:
        """The value of a metric, the loss or the accuracy, by name. None if it was not measured."""
        if metric == "accuracy":
            return self.accuracy if self.per_class else None
        return self.loss if metric == "loss" else self.metrics.get(metric)

    @property
    def accuracy(self) -> float:
        """The accuracy in percent."""
        return 100.0 * self.correct / self.total if self.total else math.nan


class Loader(Protocol):
    """A worker's data: batch `number` depends on (seed, worker, number) only."""

    def batch(self, number: int) -> Batch:
        """Return batch `number`, counted from 0. A second call returns the same batch."""


class Task(Protocol):
    """A model and a loss over one flat vector. A worker builds it from the user's `paceline.Task`."""

    layout: Layout
    """The place of each parameter in that vector."""
    state_size: int
    """The number of floats sent with each push besides the gradient (running statistics)."""
    local_state: State
    """State that stays in the worker between pushes (an inner optimizer's state). Changed in place, often empty."""

    def initial(self) -> Tensor:
        """Return the initial weights, flat."""

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Use these buffers from now on. Called once per worker; their addresses never change."""

    def gradient(self, batch: Batch) -> float | None:
        """Fill the bound gradient (and state) from the bound weights. Return the loss; None if there is none."""


class Arrival(NamedTuple):
    """What a rule knows about the update it applies. `worker` is None for the mean of a round.

    For many runs at once (weights [runs, P]), `worker` is an int64 tensor [runs] and the others are tensors [runs, 1].
    """

    worker: int | Tensor | None
    staleness: int | Tensor
    """The number of updates made since the weights that it was computed from."""
    lr: Tensor
    num_live: int | Tensor
    """The number of live workers."""
    present: float | Tensor = 1.0
    """The share of the data that is still computed on: below 1 once workers with data of their own have finished."""


class Rule(Protocol):
    """How an update changes the weights: in place, elementwise over [..., P], without branching on an arrival's values.

    State tensors have the leading axes of the weights, so the state of run r of many is
    `{k: t[r] for k, t in state.items()}`. `join`, `leave` and `expire` name a worker of one run and get such a state.
    """

    @property
    def name(self) -> str:
        """The name as the user writes it. A checkpoint stores it with the state."""

    def start(self, weights: Tensor) -> State:
        """Return the state before the first update, for weights of this shape."""

    def join(self, state: State, worker: int) -> None:
        """Add `worker`, with an empty row."""

    def leave(self, state: State, worker: int) -> None:
        """Remove `worker`: set its rows to zero and subtract them from sums over all workers."""

    def recompute_sums(self, state: State) -> None:
        """Recompute sums over all workers from their rows, in worker order: running sums keep every rounding error."""

    def expire(self, state: State, worker: int) -> None:
        """Discard the worker's cached gradient because it has gone silent. It stays a member and may push again."""

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        """Make one update from `update` (a gradient, a mean of several, or a drift), which is only read."""

    def reply_weights(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        """Write the weights of the worker's next step to `out`, once per reply: a copy, unless the rule looks ahead."""

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        """Return the weights to evaluate and save: the live ones, unless the rule averages."""


Primitive: TypeAlias = Literal["reduce", "gather"]
"""How payloads are combined on a ring: by all-reduce, or by all-gather."""


class Codec(Protocol):
    """How an update is compressed; built for one layout. Decoded + new memory = update + old memory, up to rounding.

    Deterministic: the same update, memory and key give the same bytes. An update with a NaN or an infinity (or a value
    beyond 2^100) decodes to one with a NaN and leaves the memory unchanged. `none` sends its input.
    """

    @property
    def name(self) -> str:
        """The name as the user writes it. A checkpoint stores it with the memory."""

    @property
    def primitive(self) -> Primitive:
        """Whether payloads of several workers can be summed, or must be gathered."""

    @property
    def capacity(self) -> int:
        """The largest size of a payload, in bytes."""

    def ring_nbytes(self, num_workers: int) -> int:
        """The most bytes that one worker sends in one exchange of `num_workers` on a ring."""

    def start(self, key: int = 0) -> State:
        """Return a new worker's memory: `error` holds what was left out (error feedback), `key` seeds the rounding."""

    def encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        """Encode into `out` (uint8, at least `capacity` bytes, 8-byte aligned). Return the number of bytes written."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode into `out`, with zeros in gaps. Raise ProtocolError if the payload is malformed."""


class Decision(NamedTuple):
    """A policy's answer: which held pushes become one update now, and which workers get a reply after it."""

    apply: tuple[int, ...] = ()
    """Workers whose pushes are averaged into one update. Empty: no update now."""
    release: tuple[int, ...] = ()
    """Workers that get a reply, in this order."""
    dropped: bool = False
    """Whether the push is discarded and its batch assigned again."""


class Policy(Protocol):
    """When the server replies, which is how strategies differ. It sees worker numbers only, no tensors and no clock."""

    def join(self, worker: int) -> Decision:
        """A worker joins. The decision says whether it gets a reply now or waits at the start barrier."""

    def push(self, worker: int, staleness: int) -> Decision:
        """`worker` has pushed a gradient of weights `staleness` updates old, and waits until a decision releases it."""

    def leave(self, worker: int) -> Decision:
        """`worker` is gone. The decision releases workers that waited only for it."""

    def unblock(self) -> Decision:
        """Release the workers that wait here: those that they wait for wait elsewhere, for these."""

    def clear(self) -> None:
        """Remove all workers, because the run restarts from its current state."""

    def facts(self) -> dict[str, Any]:
        """Return everything needed to continue from here, as JSON values."""

    def restore(self, facts: dict[str, Any]) -> None:
        """Continue from the result of `facts`."""


MAX_WORKERS = 65_535
"""The log stores a worker's number in two bytes."""
