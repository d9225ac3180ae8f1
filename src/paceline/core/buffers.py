"""The memory that one worker shares with the server: its parts, their sizes, and how they are read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.interfaces import State

COUNT_NBYTES = 8  # size of the length field in front of an encoded reply


class BufferSizes(NamedTuple):
    """Sizes of the parts: weights and state in floats; payloads and the worker's own state in bytes."""

    weights: int
    state: int = 0
    payload: int | None = None  # the largest encoded push; None if a push is the gradient itself
    pulled: int | None = None  # the largest encoded reply; None if a reply is weights
    local_state: int = 0
    loop: int = 0  # numbers that a user's own loop sends with each push

    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """Type and length of every part, in memory order."""
        return {
            "weights": (torch.float32, self.weights),
            "update": (torch.float32, self.weights) if self.payload is None else (torch.uint8, self.payload),
            "state": (torch.float32, self.state),
            "pulled": (torch.uint8, 0 if self.pulled is None else COUNT_NBYTES + self.pulled),
            "local_state": (torch.uint8, 2 * self.local_state),
            "loop": (torch.float64, self.loop),
        }


class WorkerBuffers:
    """The server writes weights and encoded replies; the worker writes the update, the state and its own state.

    The own state has two buffers. Push number s, after d dropped ones, fills buffer (s - d) % 2, so the other one holds
    the state of the last push that was not dropped, and the worker never writes to that. The server can read it at any
    time, and the worker goes back to it if push s is dropped.
    """

    def __init__(self, sizes: BufferSizes, parts: Mapping[str, Tensor]) -> None:
        self.sizes = sizes
        self.weights, self.update, self.state = parts["weights"], parts["update"], parts["state"]
        self.loop = parts["loop"]
        self._reply = parts["pulled"]
        self.pulled = parts["pulled"][COUNT_NBYTES:]
        self._count = parts["pulled"][:COUNT_NBYTES].view(torch.int64)
        self._own = parts["local_state"].view(2, sizes.local_state)
        self.nbytes = 0  # bytes of the last reply, set by the server
        self.brings_state = self.brings_own_state = False  # whether the server wrote what a worker begins with

    @staticmethod
    def private(sizes: BufferSizes, device: torch.device | None = None, **given: Tensor) -> WorkerBuffers:
        """Make memory for a worker in this process; parts that already exist can be passed in."""
        parts = {
            name: given[name] if name in given else torch.zeros(count, dtype=dtype, device=device)
            for name, (dtype, count) in sizes.parts().items()
        }
        return WorkerBuffers(sizes, parts)

    def part(
        self, span: slice, with_rest: bool, payload: int | None = None, pulled: int | None = None
    ) -> WorkerBuffers:
        """The memory of one shard: a range of weights and update; one shard also gets the state and the own state.

        If pushes or replies are encoded, the shard gets separate buffers of `payload` and `pulled` bytes for them.
        """
        state, local_state = self.sizes.state * with_rest, self.sizes.local_state * with_rest
        given = {"weights": self.weights[span]}
        if payload is None:
            given["update"] = self.update[span]
        if with_rest:
            given |= {"state": self.state, "local_state": self.saved_states}
        sizes = BufferSizes(span.stop - span.start, state, payload, pulled, local_state)
        return WorkerBuffers.private(sizes, None, **given)

    def of_optimizer(self, span: slice, sizes: BufferSizes) -> WorkerBuffers:
        """The memory of one of an own loop's optimizers: a range of the weights, and the begin of what all use in turn.

        Its own state is private.
        """
        update = self.update[span] if sizes.payload is None else self.update[: sizes.payload]
        reply = self._reply[: sizes.parts()["pulled"][1]]
        return WorkerBuffers.private(sizes, None, weights=self.weights[span], update=update, pulled=reply)

    def full_view(self, weights: Tensor, span: slice) -> WorkerBuffers:
        """Full-size buffers over `weights`; from now on this object's weights are the slice `span` of it."""
        self.weights = weights[span]
        sizes = self.sizes._replace(weights=weights.numel())
        given = {"update": self.update, "state": self.state, "pulled": self._reply, "local_state": self.saved_states}
        return WorkerBuffers.private(sizes, None, weights=weights, **given)

    def bring_own_state(self, saved: Tensor | None) -> None:
        """Write the own state that the worker begins with after a resume, if the server knows one."""
        if saved is not None and self.sizes.local_state:
            self._own.copy_(saved)
            self.brings_own_state = True

    @property
    def num_pulled(self) -> int:
        """Bytes of the encoded reply that the worker has not decoded yet."""
        return int(self._count.item()) if self._count.numel() else 0

    @num_pulled.setter
    def num_pulled(self, nbytes: int) -> None:
        self._count.fill_(nbytes)

    def bring_state(self, state: Tensor | None) -> None:
        """Write the state that the worker's model begins with, if the server knows one."""
        if state is not None:
            self.state.copy_(state)
            self.brings_state = True

    def save_state(self, local_state: State, place: int) -> None:
        """Save the worker's own state at `place`: the number of its push less the pushes dropped before."""
        save_local_state(local_state, self._own[place % 2])

    def saved_state(self, place: int) -> Tensor:
        """The bytes of the worker's own state that were saved at `place`."""
        return self._own[place % 2]

    @property
    def saved_states(self) -> Tensor:
        """The bytes of both saved states."""
        return self._own.view(-1)


MakeMemory: TypeAlias = Callable[[BufferSizes], WorkerBuffers]


def local_state_nbytes(local_state: State) -> int:
    """How many bytes a worker's own state takes."""
    return sum(tensor.nbytes for tensor in local_state.values())


def save_local_state(local_state: State, out: Tensor) -> None:
    """Write all tensors one after another, as bytes."""
    offset = 0
    for tensor in local_state.values():
        out[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += tensor.nbytes


def load_local_state(local_state: State, saved: Tensor) -> None:
    """Load what `save_local_state` wrote, in place."""
    nbytes = local_state_nbytes(local_state)
    assert saved.numel() == nbytes, f"{saved.numel()} bytes for a worker's state of {nbytes}"
    offset = 0
    for tensor in local_state.values():
        tensor.reshape(-1).view(torch.uint8).copy_(saved[offset : offset + tensor.nbytes])
        offset += tensor.nbytes


def view(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor, without a copy."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
