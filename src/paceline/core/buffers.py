"""A worker's memory as worker and server share it: what lies in it, and how large it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.interfaces import State

COUNT_NBYTES = 8
"""Before an encoded reply: how many bytes it has."""


class Sizes(NamedTuple):
    """How large the parts are: weights and state in floats, what codecs and the worker's own state need in bytes."""

    weights: int
    state: int = 0
    payload: int | None = None
    """Of the largest encoded push; None where a push is the gradient itself."""
    pulled: int | None = None
    """Of the largest encoded reply; None where a reply is weights."""
    own: int = 0

    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """Type and length of every part, in the order they lie in."""
        update = (torch.float32, self.weights) if self.payload is None else (torch.uint8, self.payload)
        return {
            "weights": (torch.float32, self.weights),
            "update": update,
            "state": (torch.float32, self.state),
            "pulled": (torch.uint8, 0 if self.pulled is None else COUNT_NBYTES + self.pulled),
            "own": (torch.uint8, 2 * self.own),
        }


class Memory:
    """Weights and encoded replies (the server writes), update, state and the worker's own state (the worker writes).

    The own state has two places: push number s leaves it in place s % 2, which the worker touches again only after
    push s + 1 was answered. So whoever has taken push s, and not yet push s + 1, can read it at any moment.
    """

    def __init__(self, sizes: Sizes, parts: Mapping[str, Tensor]) -> None:
        self.sizes = sizes
        self.weights, self.update, self.state = parts["weights"], parts["update"], parts["state"]
        self._reply = parts["pulled"]
        self.pulled = parts["pulled"][COUNT_NBYTES:]
        self._count = parts["pulled"][:COUNT_NBYTES].view(torch.int64)
        self._own = parts["own"].view(2, sizes.own)
        self.nbytes = 0
        """Of the last reply, as the server counts."""

    @staticmethod
    def private(sizes: Sizes, device: torch.device | None = None, **given: Tensor) -> Memory:
        """Of a worker in the server's process; parts that somebody has already can be given."""
        parts = {
            name: given[name] if name in given else torch.zeros(count, dtype=dtype, device=device)
            for name, (dtype, count) in sizes.parts().items()
        }
        return Memory(sizes, parts)

    def part(self, span: slice, with_rest: bool, payload: int | None = None, pulled: int | None = None) -> Memory:
        """What one server of several has to do with: a range of weights and update; state and own with one of them.

        Where pushes or replies are encoded, their parts have memory of their own, of `payload` and `pulled` bytes.
        """
        state, own = self.sizes.state * with_rest, self.sizes.own * with_rest
        given = {"weights": self.weights[span]}
        if payload is None:
            given["update"] = self.update[span]
        if with_rest:
            given |= {"state": self.state, "own": self._own.view(-1)}
        return Memory.private(Sizes(span.stop - span.start, state, payload, pulled, own), None, **given)

    def widened(self, weights: Tensor, span: slice) -> Memory:
        """The memory of which this is the part `span`: its weights are `weights`, and ours lie in them from now on."""
        self.weights = weights[span]
        sizes = self.sizes._replace(weights=weights.numel())
        given = {"update": self.update, "state": self.state, "pulled": self._reply, "own": self._own.view(-1)}
        return Memory.private(sizes, None, weights=weights, **given)

    @property
    def num_pulled(self) -> int:
        """Bytes of the encoded reply that the worker has not used yet."""
        return int(self._count.item()) if self._count.numel() else 0

    @num_pulled.setter
    def num_pulled(self, nbytes: int) -> None:
        self._count.fill_(nbytes)

    def keep(self, own: State, seq: int) -> None:
        """The worker's own state as push number `seq` leaves it."""
        save_own(own, self._own[seq % 2])

    def kept(self, seq: int) -> Tensor:
        """The bytes of the worker's own state as push number `seq` left it."""
        return self._own[seq % 2]


MakeMemory: TypeAlias = Callable[[Sizes], Memory]


def own_nbytes(own: State) -> int:
    """Bytes of a worker's own state."""
    return sum(tensor.nbytes for tensor in own.values())


def save_own(own: State, out: Tensor) -> None:
    """All tensors one after another, as bytes."""
    offset = 0
    for tensor in own.values():
        out[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += tensor.nbytes


def load_own(own: State, saved: Tensor) -> None:
    """The inverse of `save_own`, in place."""
    assert saved.numel() == own_nbytes(own), f"{saved.numel()} bytes for an own state of {own_nbytes(own)}"
    offset = 0
    for tensor in own.values():
        tensor.reshape(-1).view(torch.uint8).copy_(saved[offset : offset + tensor.nbytes])
        offset += tensor.nbytes


def view(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor, as they lie in memory."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
