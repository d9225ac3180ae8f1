"""Codecs that send every value: as float32, or rounded to 16 bits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs.flat import FlatCodec, floats
from paceline.interfaces import Layout, Primitive, State


class Uncompressed(FlatCodec):
    """Every float unchanged: 4 P bytes to a server; 8 P (n - 1) / n on a ring, by reduce.

    >>> from paceline.interfaces import pack
    >>> codec = Uncompressed(pack([("w", (16,), True)]))
    >>> codec.capacity, codec.ring_nbytes(2), codec.start()
    (64, 64, {})
    """

    name = "none"
    primitive: ClassVar[Primitive] = "reduce"

    @property
    def capacity(self) -> int:
        return 4 * self.size

    def start(self, key: int = 0) -> State:
        return {}

    def encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        """Copy the update; a NaN is sent unchanged."""
        return self._encode(update, memory, out)

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        floats(out, 0, self.size).copy_(update)
        return self.capacity

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(floats(payload, 0, self.size))


class HalfPrecision(FlatCodec):
    """v = u + e;  sent = round16(v);  e = v - sent: 2 P bytes to a server; 4 P (n - 1) / n on a ring, by reduce.

    A value above the range of float16 is sent as its maximum and the rest later; values that round to zero add up in e.

    >>> from paceline.interfaces import pack
    >>> codec = HalfPrecision(pack([("w", (16,), True)]), torch.bfloat16)
    >>> codec.name, codec.capacity, codec.ring_nbytes(4)
    ('bf16', 32, 48)
    """

    primitive: ClassVar[Primitive] = "reduce"

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(layout, device)
        self._dtype, self._limit = dtype, torch.finfo(dtype).max
        self._values, self._sent = self._scratch(), self._scratch()

    @property
    def name(self) -> str:
        return "fp16" if self._dtype == torch.float16 else "bf16"

    @property
    def capacity(self) -> int:
        return 2 * self.size

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        codes, error = out[: self.capacity].view(self._dtype), memory["error"]
        for begin, end in self._spans():
            values, sent = self._values[: end - begin], self._sent[: end - begin]
            torch.add(update[begin:end], error[begin:end], out=values)
            if self._dtype == torch.float16:
                codes[begin:end].copy_(torch.clamp(values, -self._limit, self._limit, out=sent))
            else:
                codes[begin:end].copy_(values)
            torch.sub(values, sent.copy_(codes[begin:end]), out=error[begin:end])
        return self.capacity

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self._dtype))
