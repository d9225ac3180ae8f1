"""Base of all codecs: one layout, scratch memory, checks before encoding and decoding, bytes on a ring."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import ProtocolError
from paceline.interfaces import Layout, Primitive, State

CHUNK = 1 << 18  # floats that a CPU codec processes at a time, so that all its passes hit the cache; a power of two
MIN_CHUNK = 1 << 8
MAX_MAGNITUDE = 2.0**100  # above this a value counts as infinite, so that error feedback has room to add up


def is_encodable(update: Tensor) -> bool:
    """Return whether all values are finite, in one pass; only a sum of squares that overflows needs a second."""
    if math.isfinite(torch.dot(update, update).item()):
        return True
    return bool(update.abs().amax().item() <= MAX_MAGNITUDE)


class FlatCodec(ABC):
    """A codec for the updates of one layout on one device; one thread at a time, because of its scratch memory."""

    primitive: ClassVar[Primitive] = "gather"

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        assert layout.size < 1 << 31, "indices have 32 bits"
        self.layout, self.size = layout, layout.size
        self.device = torch.device("cpu") if device is None else device
        whole = max(MIN_CHUNK, 1 << (self.size - 1).bit_length())
        self._chunk = min(CHUNK, whole) if self.device.type == "cpu" else whole
        self._gaps = _gaps(layout).to(self.device)

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def capacity(self) -> int: ...

    @abstractmethod
    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int: ...

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor) -> None: ...

    def start(self, key: int = 0) -> State:
        return {"error": torch.zeros(self.size, device=self.device)}

    def encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        assert update.numel() == self.size, f"{update.numel()} floats for a layout of {self.size}"
        return self._encode(update, memory, out) if is_encodable(update) else self._poison(out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._check(payload.numel())
        self._decode(payload, out)

    def ring_nbytes(self, num_workers: int) -> int:
        """Return the bytes one worker sends for the mean: two passes of a reduce, or the other workers' payloads."""
        if self.primitive == "gather":
            return (num_workers - 1) * self.capacity
        return math.ceil(2 * (num_workers - 1) * self.capacity / num_workers)

    def _check(self, nbytes: int) -> None:
        if nbytes != self.capacity:
            raise ProtocolError(f"a push of {nbytes} bytes by codec {self.name}: {self.capacity} are expected")

    def _poison(self, out: Tensor) -> int:
        """Write the payload of an update that is not finite: bytes of ones are NaN in every float format."""
        out[: self.capacity].fill_(0xFF)
        return self.capacity

    def _scratch(self, dtype: torch.dtype = torch.float32, share: int = 1) -> Tensor:
        return torch.zeros(self._chunk // share, dtype=dtype, device=self.device)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each chunk."""
        for begin in range(0, self.size, self._chunk):
            yield begin, min(begin + self._chunk, self.size)


def _gaps(layout: Layout) -> Tensor:
    """Return the indices that belong to no parameter; they always hold zero."""
    free = torch.ones(layout.size, dtype=torch.bool)
    for parameter in layout.parameters:
        free[parameter.offset : parameter.offset + parameter.size] = False
    return free.nonzero().flatten()


def floats(payload: Tensor, begin: int, count: int) -> Tensor:
    """Return `count` floats of a payload, starting at byte `begin`, as a view."""
    return payload[begin : begin + 4 * count].view(torch.float32)
