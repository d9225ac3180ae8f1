"""Both ends of an encoded exchange: the worker encodes pushes, the server encodes replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers, load_local_state, local_state_nbytes
from paceline.interfaces import Codec, Layout, State

LEFT_OUT = "error"  # the name of the error-feedback buffer in a codec's memory


def _no_key(worker: int) -> int:
    return 0


class Codecs(NamedTuple):
    """The codecs of pushes and replies (None: not encoded), and the key of each worker's codec memory."""

    push: Codec | None = None
    pull: Codec | None = None
    key: Callable[[int], int] = _no_key

    @property
    def names(self) -> list[str]:
        """The names of both codecs, as the user writes them."""
        return [codec.name if codec is not None else "none" for codec in (self.push, self.pull)]

    @property
    def capacities(self) -> tuple[int | None, int | None]:
        """The largest encoded push and the largest encoded reply, in bytes."""
        push, pull = self.push, self.pull
        return push.capacity if push is not None else None, pull.capacity if pull is not None else None


DENSE = Codecs()


class Trained(Protocol):
    """What a worker trains, as its end of the exchange sees it: a `Task`, or the model of a user's own loop."""

    layout: Layout
    state_size: int
    local_state: State

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Use these buffers from now on."""


class WorkerCompression:
    """The worker's end, between a task and the memory shared with the server: decodes replies, encodes pushes."""

    def __init__(self, codecs: Codecs, worker: int, task: Trained, device: torch.device | None = None) -> None:
        self.codecs, self._device, self._worker = codecs, device, worker
        self._left_out = codecs.push.start(codecs.key(worker)) if codecs.push is not None else {}
        codec_state = {f"codec.{name}": tensor for name, tensor in self._left_out.items()}
        self.local_state: State = {**task.local_state, **codec_state}
        own_nbytes = local_state_nbytes(self.local_state)
        self.sizes = BufferSizes(task.layout.size, task.state_size, *codecs.capacities, own_nbytes)
        self.encodes = codecs.push is not None or self.sizes.local_state > 0
        """Whether a push is more than the gradient as it lies in memory: then `send` is called for each."""
        self._discarded = 0

    def bind(self, memory: WorkerBuffers, task: Trained, gradient: Tensor | None = None) -> None:
        """Use this memory from now on; with a push codec, the gradient gets a private buffer, or the one given."""
        self._memory, self._gradient = memory, memory.update
        if self.codecs.push is not None:
            new = gradient if gradient is not None else torch.zeros(self.sizes.weights, device=self._device)
            self._gradient = new
        task.bind(memory.weights, self._gradient, memory.state)
        self._save_as_start()

    def load_state(self, saved: Tensor) -> None:
        """Load the worker's own state from the bytes of a checkpoint."""
        load_local_state(self.local_state, saved)
        self._save_as_start()

    def begin(self) -> None:
        """Load the own state that a resumed run brings with its first reply; else it is that of the start."""
        if self.sizes.local_state:
            load_local_state(self.local_state, self._memory.saved_state(0))

    def _save_as_start(self) -> None:
        """Save the state before the first push, in case that push is dropped."""
        if self.sizes.local_state:
            for place in (0, 1):
                self._memory.save_state(self.local_state, place)

    def take_back(self, seq: int, discarded: int) -> None:
        """Restore the state from before push `seq`, which was dropped; `discarded` pushes were so far.

        Otherwise its error feedback would lose what that push sent.
        """
        self._discarded = discarded
        if self.sizes.local_state:
            load_local_state(self.local_state, self._memory.saved_state(seq - discarded))

    def receive(self) -> None:
        """Add the decoded reply to the weights; the gradient buffer is free meanwhile and holds it."""
        memory, codec = self._memory, self.codecs.pull
        nbytes = memory.num_pulled if codec is not None else 0
        if nbytes:
            assert codec is not None
            codec.decode(memory.pulled[:nbytes], self._gradient)
            memory.weights.add_(self._gradient)
            memory.num_pulled = 0

    def send(self, seq: int) -> Tensor:
        """Encode push number `seq`, save the worker's own state with it, and return what the push carries."""
        memory, codec = self._memory, self.codecs.push
        update = memory.update
        if codec is not None:
            update = update[: codec.encode(self._gradient, self._left_out, update)]
        if memory.sizes.local_state:
            memory.save_state(self.local_state, seq - self._discarded)
        return update

    def send_nothing(self, seq: int) -> Tensor:
        """Encode zeros as push number `seq`, of a step that was skipped; the worker's own state stays as it is."""
        left_out, codec = self._left_out, self.codecs.push
        self._gradient.zero_()
        if codec is not None:
            self._left_out = codec.start(self.codecs.key(self._worker))
        try:
            return self.send(seq)
        finally:
            self._left_out = left_out


class Decoder(Protocol):
    """Turns payloads into updates: a codec, or one shard's slice of a codec."""

    def decode(self, payload: Tensor, out: Tensor) -> None: ...


class PushDecoder:
    """Decodes pushes into a pool of buffers, which grows to the most pushes ever held at once."""

    def __init__(self, codec: Decoder, like: Tensor) -> None:
        self._codec, self._like = codec, like
        self._free: list[Tensor] = []

    def decode(self, payload: Tensor) -> Tensor:
        """Decode into a free buffer; raise ProtocolError if no encoder wrote these bytes."""
        if not self._free:
            self._free.append(torch.empty_like(self._like))
        self._codec.decode(payload, self._free[-1])
        return self._free.pop()

    def nbytes_of(self, payload: Tensor) -> int:
        """How many bytes the payload takes on the wire."""
        return payload.nbytes

    def free(self, update: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(update)


class PredecodedPushes(PushDecoder):
    """Decoder for sharded servers: decodes a push on arrival, so that each shard can vote on whether it is finite."""

    nbytes = 0  # bytes of all slices of the push that the server takes next

    def open(self, payload: Tensor) -> Tensor:
        """Decode on arrival, into a free buffer."""
        return super().decode(payload)

    def decode(self, payload: Tensor) -> Tensor:
        """Return the update: it is already decoded."""
        return payload

    def nbytes_of(self, payload: Tensor) -> int:
        return self.nbytes


class DeltaEncoder:
    """Encodes replies: tracks the weights that each worker has, and sends the difference to those it should have.

    So the next reply makes up for what this one leaves out.
    """

    def __init__(self, codec: Codec, key: Callable[[int], int], like: Tensor) -> None:
        self._key, self._wanted = key, torch.empty_like(like)
        self.restrict_to(codec, slice(None))
        self.held: dict[int, Tensor] = {}
        self.states: dict[int, State] = {}

    def restrict_to(self, codec: Codec, span: slice) -> None:
        """Encode only this range from now on; `codec` is built for it."""
        self._codec, self._span = codec, span
        self._left_out = codec.start().get(LEFT_OUT)

    def begin(self, worker: int, weights: Tensor) -> None:
        """Start to track a worker that was sent all weights."""
        self.held[worker] = weights.clone()
        started = self._codec.start(self._key(worker))
        self.states[worker] = {name: tensor for name, tensor in started.items() if name != LEFT_OUT}

    def forget(self, worker: int) -> None:
        """Stop tracking a worker that left."""
        self.held.pop(worker, None)
        self.states.pop(worker, None)

    def encode(self, worker: int, write_wanted: Callable[[Tensor], None], out: Tensor) -> int:
        """Encode into `out` the difference between the worker's weights and those it should have; return the bytes.

        The error-feedback buffer starts at zero each time: the difference already holds all that was left out before.
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
        """Track the same weights and codec memories as a checkpoint."""
        for worker, weights in held.items():
            self.begin(worker, weights)
            for name, tensor in states[worker].items():
                self.states[worker][name].copy_(tensor)
