"""Encode the inputs that the first server sends to the other servers of a run, as JSON values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Input, Push
from paceline.core.server import Server
from paceline.errors import ProtocolError
from paceline.interfaces import State

_INPUTS = {kind.__name__: kind for kind in get_args(Input)}
EMPTY = torch.empty(0)


class PushId(NamedTuple):
    """Identifies a worker's message: a push, or its hello before the first one (seq -1)."""

    worker: int
    incarnation: int
    seq: int


def to_words(message: Input) -> list[Any]:
    """An input without its tensors.

    >>> to_words(Push(1, 0, 7, 7, 32, 0.5, EMPTY, EMPTY))
    ['Push', 1, 0, 7, 7, 32, '0.5', None]
    """
    if isinstance(message, Push):
        return ["Push", *message[:5], repr(message.loss), message.weight]  # JSON has no NaN
    return [type(message).__name__, *(message if isinstance(message, tuple) else dataclasses.astuple(message))]


def from_words(words: list[Any]) -> Input:
    """The inverse of `to_words`; the tensors of a push are empty.

    >>> from_words(["Leave", 3, 1])
    Leave(worker=3, incarnation=1, done=False, returns=False)
    >>> from_words(["Leave", [3], 1])
    Traceback (most recent call last):
    paceline.errors.ProtocolError: an order that is no input of a server
    """
    name, *fields = words
    try:
        if name == "Push":
            fields[5:] = float(fields[5]), EMPTY, EMPTY, fields[6]
        if any(type(field) is int and not 0 <= field < 1 << 63 for field in fields):
            raise ValueError("a count is out of range")
        if any(not isinstance(field, int | float | Tensor | None) for field in fields):
            raise TypeError("a field is no number")
        message: Input = _INPUTS[name](*fields)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        raise ProtocolError("an order that is no input of a server") from None
    return message


def is_finite(update: Tensor) -> bool:
    """Whether all numbers are finite: usually the sum shows it; if it overflows, every number is checked."""
    return math.isfinite(update.sum().item()) or bool(torch.isfinite(update).all())


def poison(update: Tensor) -> None:
    """Make an update non-finite, because another server's part of the push is."""
    update[0] = math.nan


def at_work(server: Server) -> list[int]:
    """The workers whose last sent weights belong in a checkpoint."""
    return [worker for worker, member in sorted(server.members.items()) if member.live and not member.inactive]


def tensors_of(weights: Tensor, state: State, sent: list[Tensor]) -> list[Tensor]:
    """All tensors of a shard, in the order in which they are sent."""
    return [weights, *(state[name] for name in sorted(state)), *sent]


def sent_to(server: Server, memories: dict[int, WorkerBuffers]) -> list[Tensor]:
    """The weights that each active worker has: as last sent or, if replies are encoded, the sum of what was sent."""
    held = server.differences.held if server.differences is not None else {}
    return [held[worker] if worker in held else memories[worker].weights for worker in at_work(server)]
