"""Both ends of an encoded exchange: pushes that the worker encodes, replies that the server does.

A reply carries how far the worker's weights are from those wanted, so what one leaves out is in the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.buffers import Memory, Sizes, own_nbytes
from paceline.interfaces import Codec, State, Task

LEFT_OUT = "error"
"""The name of what a codec's memory has left out so far."""


def _no_key(worker: int) -> int:
    return 0


class Codecs(NamedTuple):
    """How pushes and replies are encoded (None: as they are), and the key of each worker's memory."""

    push: Codec | None = None
    pull: Codec | None = None
    key: Callable[[int], int] = _no_key

    @property
    def names(self) -> list[str]:
        """As the user writes them."""
        return [codec.name if codec is not None else "none" for codec in (self.push, self.pull)]

    @property
    def capacities(self) -> tuple[int | None, int | None]:
        """The most bytes of an encoded push and of an encoded reply."""
        push, pull = self.push, self.pull
        return push.capacity if push is not None else None, pull.capacity if pull is not None else None


DENSE = Codecs()


class WorkerEnd:
    """Between a task and the memory that the server sees: encoded replies come in, encoded pushes go out."""

    def __init__(self, codecs: Codecs, worker: int, task: Task, device: torch.device | None = None) -> None:
        self._codecs, self._device = codecs, device
        self.decodes = codecs.pull is not None
        """Whether replies are encoded: then `receive` is called for each."""
        self._left_out = codecs.push.start(codecs.key(worker)) if codecs.push is not None else {}
        self.own: State = {**task.own, **{f"codec.{name}": tensor for name, tensor in self._left_out.items()}}
        self.sizes = Sizes(task.layout.size, task.state_size, *codecs.capacities, own_nbytes(self.own))
        self.encodes = codecs.push is not None or self.sizes.own > 0
        """Whether a push is more than the gradient as it lies in memory: then `send` is called for each."""

    def bind(self, memory: Memory, task: Task) -> None:
        """Use this memory from now on; with a codec the gradient itself is private."""
        self._memory = memory
        self._gradient = memory.update
        if self._codecs.push is not None:
            self._gradient = torch.zeros(self.sizes.weights, device=self._device)
        task.bind(memory.weights, self._gradient, memory.state)

    def receive(self) -> None:
        """Bring the weights to where the reply wants them; the gradient's memory is free meanwhile."""
        memory, codec = self._memory, self._codecs.pull
        assert codec is not None
        nbytes = memory.num_pulled
        if nbytes:
            codec.decode(memory.pulled[:nbytes], self._gradient)
            memory.weights.add_(self._gradient)
            memory.num_pulled = 0

    def send(self, seq: int) -> Tensor:
        """What push number `seq` carries; the worker's own state is kept as it leaves it."""
        memory, codec = self._memory, self._codecs.push
        update = memory.update
        if codec is not None:
            update = update[: codec.encode(self._gradient, self._left_out, update)]
        if self.sizes.own:
            memory.keep(self.own, seq)
        return update


class Decodes(Protocol):
    """What turns payloads into updates: a codec, or of several servers the part of one."""

    def decode(self, payload: Tensor, out: Tensor) -> None: ...


class Decoded:
    """Memory for decoded updates: as much as the most pushes that were held at once."""

    def __init__(self, codec: Decodes, like: Tensor) -> None:
        self._codec, self._like = codec, like
        self._free: list[Tensor] = []

    def decode(self, payload: Tensor) -> Tensor:
        """The update that was encoded, in memory that nobody else has; ProtocolError for bytes that are none."""
        if not self._free:
            self._free.append(torch.empty_like(self._like))
        self._codec.decode(payload, self._free[-1])
        return self._free.pop()

    def nbytes_of(self, payload: Tensor) -> int:
        """What it weighs on the way."""
        return payload.nbytes

    def free(self, update: Tensor) -> None:
        """Nobody needs it any more."""
        self._free.append(update)


class Opened(Decoded):
    """The same where a push is decoded when it comes, so that all servers know whether its parts are finite."""

    nbytes = 0
    """What all parts together weighed of the push that the server is about to take."""

    def open(self, payload: Tensor) -> Tensor:
        """As `decode` of others does."""
        return super().decode(payload)

    def decode(self, payload: Tensor) -> Tensor:
        """It is decoded already."""
        return payload

    def nbytes_of(self, payload: Tensor) -> int:
        return self.nbytes


class Differences:
    """What each worker has, as the server knows it; its replies are encoded differences to that."""

    def __init__(self, codec: Codec, key: Callable[[int], int], like: Tensor) -> None:
        self._codec, self._key = codec, key
        self._wanted = torch.empty_like(like)
        self._span = slice(None)
        self._left_out = codec.start().get(LEFT_OUT)
        self.held: dict[int, Tensor] = {}
        self.states: dict[int, State] = {}

    def keep_to(self, codec: Codec, span: slice) -> None:
        """From now on replies are of this range alone, which `codec` was built for."""
        self._codec, self._span = codec, span
        self._left_out = codec.start().get(LEFT_OUT)

    def begin(self, worker: int, weights: Tensor) -> None:
        """A worker was sent all weights as they are."""
        self.held[worker] = weights.clone()
        self.states[worker] = {
            name: tensor for name, tensor in self._codec.start(self._key(worker)).items() if name != LEFT_OUT
        }

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        self.held.pop(worker, None)
        self.states.pop(worker, None)

    def encode(self, worker: int, write_wanted: Callable[[Tensor], None], out: Tensor) -> int:
        """Write the way from what the worker has to what it should have into `out`; how many bytes.

        The codec's own memory starts empty each time: the difference holds all that was left out before.
        """
        held, difference = self.held[worker][self._span], self._wanted[self._span]
        write_wanted(self._wanted)
        difference.sub_(held)
        memory = self.states[worker]
        if self._left_out is not None:
            memory = {**memory, LEFT_OUT: self._left_out.zero_()}
        nbytes = self._codec.encode(difference, memory, out)
        self._codec.decode(out[:nbytes], difference)
        held.add_(difference)
        return nbytes

    def restore(self, held: dict[int, Tensor], states: dict[int, State]) -> None:
        """Become what these were taken from."""
        for worker, weights in held.items():
            self.begin(worker, weights)
            for name, tensor in states[worker].items():
                self.states[worker][name].copy_(tensor)
