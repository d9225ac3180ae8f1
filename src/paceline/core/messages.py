"""What travels between worker and server, and nothing else.

Join, Push, Leave, Steps, Drain, Stop and Resume are every input that can change a server; a log of them replays a run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class Join(NamedTuple):
    """A worker is ready; with a `quota` it has work for that many applied pushes, else until the budget is spent."""

    worker: int
    incarnation: int
    quota: int | None = None
    threads: int = 1


class Push(NamedTuple):
    """A gradient, named by (worker, incarnation, seq) and by the reply whose weights it was computed from.

    `update` (with a codec: its payload, the bytes that cross) and `state` are the worker's own memory, to be read only
    until the worker is answered.
    """

    worker: int
    incarnation: int
    seq: int
    reply: int
    samples: int
    loss: float
    update: Tensor
    state: Tensor


class Leave(NamedTuple):
    """A worker is gone: finished, lost, or never come."""

    worker: int
    incarnation: int


class Steps(NamedTuple):
    """A setting that changed: from its next reply on, `worker` makes so many local steps for a push."""

    worker: int
    steps: int


class Rate(NamedTuple):
    """A setting that changed: from now on the learning rate is `factor` times what the schedule says.

    The schedule of a user's own loop, as worker 0 follows it.
    """

    worker: int
    factor: float


class Drain(NamedTuple):
    """Somebody outside asks that `worker` finishes the push it is making, and is then told that it is over for it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Someone outside ends the run."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The run goes on after an end or a crash: everybody who was here is gone and is awaited again.

    With `undone` it goes on from a checkpoint: so many inputs logged before this one no longer count, and with them
    `lost` pushes that had been taken. Whoever feeds the server has put it back to there.
    """

    undone: int = 0
    lost: int = 0


Input: TypeAlias = Join | Push | Leave | Steps | Rate | Drain | Stop | Resume


class Deal(NamedTuple):
    """Who shares the data since a change of membership: each of `members`, in this order, has a part of it."""

    generation: int
    members: tuple[int, ...]


class Reply(NamedTuple):
    """Go on: weights of `version` lie in your memory; compute batch `batch` next. Or it is over.

    With `steps` above 0: step on that many batches from `batch` on by yourself, at `lr`, and push how far you drifted.
    Batches are counted, and their samples found, by `deal`; without one as the config divides the data.
    """

    worker: int
    incarnation: int
    serial: int
    version: int
    batch: int
    over: bool = False
    steps: int = 0
    lr: float = 0.0
    deal: Deal | None = None


class Verdict(enum.IntEnum):
    """What became of an input; the log keeps it, and replay compares it."""

    TAKEN = 0
    """A push that counts (now, or when its round closes), or a join, leave or stop that took effect."""
    DROPPED = 1
    """A push the policy had no use for: its batch is dealt again."""
    REJECTED = 2
    """A push with a NaN or an infinity, or from nobody we know: never applied."""
    REPEATED = 3
    """A push seen before: answered again, not applied again."""
    LATE = 4
    """A push that came after the budget was spent."""


class Outcome(NamedTuple):
    """Replies to send, in order, and what became of the input."""

    verdict: Verdict
    replies: tuple[Reply, ...] = ()
