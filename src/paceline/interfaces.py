"""The shapes everything else is built from; read this file first.

A worker turns weights into a push. A server turns pushes into weights. A reply withheld is a worker held back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "dict[str, Tensor]"
"""Named tensors and nothing else, so that it can be saved, restored and batched."""

Report: TypeAlias = Callable[[dict[str, Any]], None]
"""Takes one row of progress, for the console or a tracker."""

ALIGNMENT = 16
"""Parameters start at multiples of this many floats (one cache line), in every process alike."""


@dataclass(frozen=True)
class Parameter:
    """Where one named parameter lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Every parameter of a model in one flat vector of `size` floats; gaps hold zeros and stay zero."""

    parameters: tuple[Parameter, ...]
    size: int

    @property
    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter by name, as a view into `flat`."""
        return {p.name: flat[p.offset : p.offset + p.size].view(p.shape) for p in self.parameters}

    def to_rows(self) -> list[list[Any]]:
        """The layout as plain lists, for JSON."""
        return [[p.name, list(p.shape), p.offset, p.decay] for p in self.parameters]

    @staticmethod
    def from_rows(rows: list[list[Any]]) -> Layout:
        """The inverse of `to_rows`."""
        return pack([(name, tuple(shape), bool(decay)) for name, shape, _, decay in rows])


def pack(parameters: Sequence[tuple[str, tuple[int, ...], bool]]) -> Layout:
    """Lay (name, shape, decay) triples one after another, each at an aligned offset.

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
    """One batch: what is in it, how many samples it counts for, and the 64-bit key all its randomness comes from."""

    inputs: Any
    targets: Any
    samples: int
    key: int


@dataclass(frozen=True)
class Scores:
    """How good some weights are on some data."""

    loss: float
    correct: int
    total: int
    per_class: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the task measures, by name."""

    def value(self, metric: str) -> float | None:
        """Of a metric, the loss or the accuracy, by name; None where it was not measured."""
        if metric == "accuracy":
            return self.accuracy if self.per_class else None
        return self.loss if metric == "loss" else self.metrics.get(metric)

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100.0 * self.correct / self.total if self.total else math.nan


class Loader(Protocol):
    """A worker's data: batch `number` is a function of (seed, worker, number) alone."""

    def batch(self, number: int) -> Batch:
        """Batch `number`, counted from 0; asked for again it is the same."""
        ...


class Task(Protocol):
    """A model and a loss over one flat vector; what `paceline.Task` is made into for a worker."""

    layout: Layout
    """Where each parameter lies in that vector."""
    state_size: int
    """Floats of a worker's own state that ride behind each push (running statistics)."""
    own: State
    """What outlives a push and the server never needs (an inner optimizer's state); changed in place, often empty."""

    def initial(self) -> Tensor:
        """The weights training starts from, flat."""
        ...

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Once a worker: use these memories from now on; their addresses never change."""
        ...

    def gradient(self, batch: Batch) -> float:
        """Fill the bound gradient (and state) from the bound weights; return the loss."""
        ...


class Arrival(NamedTuple):
    """What a rule may know of the update it applies; `worker` is None for the mean of a round.

    Over many runs at once (weights [runs, P]) `worker` is an int64 tensor [runs], the others are tensors [runs, 1].
    """

    worker: int | Tensor | None
    staleness: int | Tensor
    """Updates made since the weights that it was computed from."""
    lr: Tensor
    num_live: int | Tensor
    """Workers that are taking part now."""


class Rule(Protocol):
    """How an update changes the weights: in place, elementwise over [..., P], no branch on an arrival's numbers.

    State has one leading axis a leading axis of the weights, so run r of many is `{k: t[r] for k, t in state.items()}`,
    a state of its own: that is how `join`, `leave` and `lapse`, which name one worker of one run, are called for it.
    """

    @property
    def name(self) -> str:
        """As the user writes it; a checkpoint says whose state it holds."""
        ...

    def start(self, weights: Tensor) -> State:
        """The state before the first update, for weights of this shape."""
        ...

    def join(self, state: State, worker: int) -> None:
        """Make room for `worker`, who starts from nothing."""
        ...

    def leave(self, state: State, worker: int) -> None:
        """Forget `worker`: its rows are zeros again, and what was summed over all no longer counts it."""
        ...

    def lapse(self, state: State, worker: int) -> None:
        """Go on without what `worker` last pushed, if that still moves the weights: it is silent, and may yet push."""
        ...

    def apply(self, weights: Tensor, state: State, update: Tensor, arrival: Arrival) -> None:
        """Make one update of `update` (a gradient, a mean of some, or a drift), which is only read."""
        ...

    def weights_for(self, weights: Tensor, state: State, worker: int | Tensor, out: Tensor) -> None:
        """What `worker` computes on next: a plain copy, unless the rule looks ahead; called once a reply."""
        ...

    def evaluated(self, weights: Tensor, state: State) -> Tensor:
        """The weights that are scored and saved: the live ones, unless the rule averages."""
        ...


Primitive: TypeAlias = Literal["reduce", "gather"]
"""How payloads meet on a ring: added up on the way round, or each carried to everybody."""


class Codec(Protocol):
    """How an update becomes fewer bytes; built for one layout. Decoded + new memory = update + old memory, to rounding.

    Nothing is drawn: the same update, memory and key give the same bytes. An update with a NaN or an infinity (or a
    value beyond 2^100) decodes to one with a NaN, and leaves the memory as it was. `none` sends what it is given.
    """

    @property
    def name(self) -> str:
        """As the user writes it; a checkpoint says whose memory it holds."""
        ...

    @property
    def primitive(self) -> Primitive:
        """Whether payloads of several workers can be added up, or have to be carried to everybody."""
        ...

    @property
    def capacity(self) -> int:
        """The most bytes that a payload takes."""
        ...

    def ring_nbytes(self, num_workers: int) -> int:
        """The most bytes that one worker sends for one exchange among `num_workers` on a ring."""
        ...

    def start(self, key: int = 0) -> State:
        """The memory of a worker that has not pushed yet: `error` is what was left out so far; `key` is its address."""
        ...

    def encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        """Write the payload into the bytes of `out` (`capacity` or more, from a multiple of 8 on); how many."""
        ...

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Fill `out`, gaps with zeros; ProtocolError for bytes that no encoder wrote."""
        ...


class Decision(NamedTuple):
    """A policy's answer: which held pushes become one update now, and who is answered after it."""

    apply: tuple[int, ...] = ()
    """Workers whose pushes are averaged into one update; none: no update now."""
    release: tuple[int, ...] = ()
    """Workers that are answered, in this order."""
    dropped: bool = False
    """Whether the push that was asked about is thrown away, and its batch dealt again."""


class Policy(Protocol):
    """When the server replies: what tells the strategies apart. Worker numbers alone, no tensors, no clock."""

    def join(self, worker: int) -> Decision:
        """Somebody new, who is answered if the decision says so (at the starting line: with everybody else)."""
        ...

    def push(self, worker: int, staleness: int) -> Decision:
        """`worker` has pushed, computed from weights `staleness` updates old; it waits until somebody releases it."""
        ...

    def leave(self, worker: int) -> Decision:
        """`worker` is gone; perhaps others only waited for it."""
        ...

    def clear(self) -> None:
        """Forget everybody: the run starts again from where it is."""
        ...

    def facts(self) -> dict[str, Any]:
        """Everything needed to go on from here, as JSON values."""
        ...

    def restore(self, facts: dict[str, Any]) -> None:
        """Go on from what `facts` told."""
        ...


MOST_WORKERS = 65_535
"""The log gives a worker's number two bytes."""
