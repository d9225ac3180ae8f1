"""The messages between workers and the server. A log of every `Input` of a server replays a run."""

from __future__ import annotations

import enum
import math
from ctypes import c_float
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


class Join(NamedTuple):
    """A worker is ready. With a `quota` it works until that many batches count, else until the budget is spent.

    In a user's `own_loop` a dropped push is a step too: its scheduler has stepped, so it counts towards the quota.
    """

    worker: int
    incarnation: int
    quota: int | None = None
    threads: int = 1
    own_loop: bool = False


class Push(NamedTuple):
    """A gradient, identified by (worker, incarnation, seq) and by the reply whose weights it was computed from.

    `update` (with a codec: the encoded payload) and `state` are views of the worker's memory: read them only before
    the worker is answered. `loss` is what `loss_of_push` returns. The mean of a round weighs a push by its `weight`, or
    by its samples if it has none; budgets and schedules go by samples. A second step on a batch has 0 samples. A push
    of weight 0 passes the barrier and changes nothing: a `GradScaler` skipped the step. `loop` is what a user's own
    loop says (see `OwnLoops`).
    """

    worker: int
    incarnation: int
    seq: int
    reply: int
    samples: int
    loss: float
    update: Tensor
    state: Tensor
    weight: float | None = None
    loop: Tensor | None = None
    optimizer: int = 0  # of several in one loop, the one that steps


def loss_of_push(loss: float | None) -> float:
    """Return a loss as a push holds it: float32, as the log stores it; infinity if not finite, NaN if unknown.

    >>> loss_of_push(0.5), loss_of_push(math.nan), loss_of_push(-math.inf), loss_of_push(1e300), loss_of_push(None)
    (0.5, inf, inf, inf, nan)
    """
    if loss is None:
        return math.nan
    value = c_float(loss).value
    return value if math.isfinite(value) else math.inf


class Leave(NamedTuple):
    """A worker is gone: it finished, was lost, or will never join. `done`: its own loop has come to its end.

    If it may come back (`returns`), the run is not over before it has joined again, or has left for good.
    """

    worker: int
    incarnation: int
    done: bool = False
    returns: bool = False


class Expel(NamedTuple):
    """A worker is turned out: the server computed its push again and found another, or discarded too many of them.

    Its push is not an input of its own. The worker counts as gone, and stays out until the run is resumed.
    """

    worker: int
    incarnation: int


class Discard(NamedTuple):
    """A push far beyond the run's history is discarded, with `--robust`; its worker computes the batch again."""

    worker: int
    incarnation: int
    seq: int


class SkipBatch(NamedTuple):
    """Never compute batch number `batch` of `worker`: it made the run diverge, and the run was resumed before it."""

    worker: int
    batch: int


class SetLocalSteps(NamedTuple):
    """Change a setting: from its next reply on, `worker` makes `steps` local steps per push."""

    worker: int
    steps: int


class ReadWeights(NamedTuple):
    """A user's own loop reads the weights that would be saved now, or (`final`) those that are saved at the end.

    It changes nothing, and neither do the next two: they are logged for a replay to answer them in order.
    """

    worker: int
    final: bool = False


class ReadOptimizer(NamedTuple):
    """A user's own loop reads the state of one of its optimizers, which the server holds."""

    worker: int
    optimizer: int = 0


class EstimatedStatistics(NamedTuple):
    """A user's own loop has estimated the running statistics that belong to the final weights.

    They lie in the worker's memory. The saved ones are the mixture over all workers, weighted by `samples`.
    """

    worker: int
    samples: int


class Drain(NamedTuple):
    """Let `worker` finish its current push and then leave, as an operator asked."""

    worker: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run now, as an operator asked."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on after a stop or a crash: every worker is gone and expected again.

    With `undone` the run goes on from a checkpoint: the last `undone` inputs in the log no longer count, and with them
    `lost` pushes that had been taken. The caller has restored the server to that checkpoint. If it `keeps` the workers'
    own states (of inner optimizers, say), their next incarnations begin with `own_states` of the server.
    """

    undone: int = 0
    lost: int = 0
    keeps: bool = False


OwnLoopInput: TypeAlias = ReadWeights | ReadOptimizer | EstimatedStatistics
GuardInput: TypeAlias = Expel | Discard | SkipBatch
Input: TypeAlias = Join | Push | Leave | GuardInput | SetLocalSteps | OwnLoopInput | Drain | Stop | Resume


class DataAssignment(NamedTuple):
    """An assignment of the data after a change of membership: each of `members`, in this order, has one part.

    Users' own loops divide their data by it from pass `first_pass` on, which none of them has begun before it hears of
    the assignment.
    """

    generation: int
    members: tuple[int, ...]
    first_pass: int = 0


class Reply(NamedTuple):
    """Tells a worker to compute batch `batch` on the weights of `version` in its memory, or that training is over.

    With `steps` above 0, the worker makes that many local steps at `lr`, from batch `batch` on, and pushes its drift.
    `assignment` assigns the data that batches are counted in; None: the config divides it. `discarded` counts pushes of
    this incarnation that the policy dropped: if it grew, the worker restores its own state from before its push.
    """

    worker: int
    incarnation: int
    serial: int
    version: int
    batch: int
    finished: bool = False
    steps: int = 0
    lr: float = 0.0
    assignment: DataAssignment | None = None
    dropped: int = 0
    """Dropped pushes of this worker that count as steps of its own loop; `batch` does not count them."""
    discarded: int = 0
    optimizer: int = 0
    """The optimizer whose push is answered, of several in one loop."""
    released: bool = False
    """Whether training is over for this worker alone: it was drained."""


class Disposition(enum.IntEnum):
    """What became of an input. The log records it, and a replay compares it."""

    TAKEN = 0
    """The push counts (now, or when its round closes), or another input took effect."""
    DROPPED = 1
    """The policy dropped the push; the worker computes its batch again."""
    REJECTED = 2
    """The push holds a NaN or an infinity, or its worker is not a member; it is never applied."""
    REPEATED = 3
    """The push is a duplicate: it is answered again and not applied again."""
    LATE = 4
    """The push arrived after the end of training."""
    DISCARDED = 5
    """The guard turned the push down; nothing has changed. The driver hands in a `Discard` instead of the push."""
    EXPELLED = 6
    """The guard turned the worker out; nothing has changed. The driver hands in an `Expel` instead of the push."""


class Outcome(NamedTuple):
    """What became of an input, and the replies to send, in order."""

    disposition: Disposition
    replies: tuple[Reply, ...] = ()
