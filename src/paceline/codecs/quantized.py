"""Codecs that send a few bits per value and one scale per block: int8 and sign."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from paceline.codecs.flat import CHUNK, MIN_CHUNK, FlatCodec, floats
from paceline.interfaces import Layout, State
from paceline.randomness import mix64, scramble

BLOCK = MIN_CHUNK
"""Values that share one scale; chunks are whole blocks, and the last block of an update may be shorter."""
STEPS = 127
MIN_SCALE = 1e-30  # scale of a block of zeros; smaller values stay in error feedback


class BlockQuantized(FlatCodec):
    """Base of codecs whose payload is one float per block, then the codes."""

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        super().__init__(layout, device)
        self._num_blocks = -(-self.size // BLOCK)
        self._values, self._other = self._scratch(), self._scratch()

    def _load(self, update: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """Return update plus error of a chunk as blocks, the last padded with zeros; and scratch of that shape."""
        size = update.numel()
        padded = -(-size // BLOCK) * BLOCK
        values = self._values[:padded]
        torch.add(update, error, out=values[:size])
        values[size:].zero_()
        return values.view(-1, BLOCK), self._other[:padded].view(-1, BLOCK)

    def _save_error(self, values: Tensor, codes: Tensor, scale: Tensor, error: Tensor) -> None:
        """Store what a chunk's codes leave out as its error feedback."""
        size = error.numel()
        if size == values.numel():
            torch.addcmul(values, codes, scale, value=-1, out=error.view_as(values))
        else:
            error.copy_(values.addcmul_(codes, scale, value=-1).view(-1)[:size])

    def _scale(self, out: Tensor, scales: Tensor) -> None:
        """Multiply each block of `out` by its scale."""
        whole = out.numel() // BLOCK
        out[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole, None])
        if whole < len(scales):
            out[whole * BLOCK :].mul_(scales[whole])

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        scales, codes = floats(payload, 0, self._num_blocks), payload[4 * self._num_blocks :]
        for begin, end in self._spans():
            self._unpack(codes, begin, end, out[begin:end])
            self._scale(out[begin:end], scales[begin // BLOCK : -(-end // BLOCK)])

    @abstractmethod
    def _unpack(self, codes: Tensor, begin: int, end: int, out: Tensor) -> None:
        """Write the codes of one chunk to `out` as floats."""


class Int8(BlockQuantized):
    """s = max|v| / 127 per block;  q = floor(v / s + r);  sent = s q;  e = v - sent, with v = u + e, r uniform in 0..1.

    r is a hash of (key, push number, index modulo CHUNK): rounding is unbiased, and a recomputed push rounds the same
    way. `first` is the index at which a slice of a longer update begins. P + P / 64 bytes to a server; (n - 1) times
    that on a ring, by gather, because blocks of different scales cannot be added. (QSGD, arXiv 1610.02132; error
    feedback, arXiv 1901.09847)

    >>> from paceline.interfaces import pack
    >>> codec = Int8(pack([("w", (2048,), True)]))
    >>> codec.capacity, codec.ring_nbytes(3)
    (2080, 4160)
    """

    name = "int8"

    def __init__(self, layout: Layout, device: torch.device | None = None, first: int = 0) -> None:
        super().__init__(layout, device)
        begin = first % CHUNK
        self._counter = torch.arange(begin, begin + self._chunk, dtype=torch.int32, device=self.device) % CHUNK
        self._bits, self._spare = torch.empty_like(self._counter), torch.empty_like(self._counter)
        self._noise = self._scratch()

    @property
    def capacity(self) -> int:
        return 4 * self._num_blocks + self.size

    def start(self, key: int = 0) -> State:
        """Return the initial memory; `address` holds the key and the number of pushes, on the host."""
        return {**super().start(), "address": torch.tensor([key & (1 << 63) - 1, 0])}

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        error, address = memory["error"], memory["address"]
        scales = floats(out, 0, self._num_blocks)
        codes = out[4 * self._num_blocks : self.capacity].view(torch.int8)
        self._draw(mix64(*address.tolist()))
        for begin, end in self._spans():
            values, steps = self._load(update[begin:end], error[begin:end])
            scale = scales[begin // BLOCK : -(-end // BLOCK), None]
            torch.amax(torch.abs(values, out=steps), 1, keepdim=True, out=scale)
            scale.mul_(1 / STEPS).clamp_min_(MIN_SCALE)
            noise = self._noise[: values.numel()].view_as(values)
            torch.addcmul(noise, values, scale.reciprocal(), out=steps).floor_()
            codes[begin:end].copy_(steps.view(-1)[: end - begin])
            self._save_error(values, steps, scale, error[begin:end])
        address[1] += 1
        return self.capacity

    def _draw(self, key: int) -> None:
        """Fill the noise with midpoints of 4096 equal parts of 0..1, so that 127 + r never reaches 128."""
        bits = scramble(self._counter, key, self._bits, self._spare).bitwise_right_shift_(20)
        self._noise.copy_(bits).add_(2048.5).mul_(1 / 4096)

    def _unpack(self, codes: Tensor, begin: int, end: int, out: Tensor) -> None:
        out.copy_(codes[begin:end].view(torch.int8))


_EIGHT_TWOS = 0x0202020202020202
_GATHER_BITS = sum(1 << 55 - 7 * bit for bit in range(8))
"""Factor that gathers eight bytes of 0 or 2 into the highest byte, the first as its lowest bit, without carries."""


class Sign(BlockQuantized):
    """m = mean|v| per block;  sent = m sign(v);  e = v - sent, with v = u + e; the sign of 0 is its sign bit.

    P / 8 + P / 64 bytes to a server; (n - 1) times that on a ring, by gather. (EF-SignSGD, arXiv 1901.09847)

    >>> from paceline.interfaces import pack
    >>> codec = Sign(pack([("w", (2048,), True)]))
    >>> codec.capacity, codec.ring_nbytes(3)
    (288, 576)
    """

    name = "sign"

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        super().__init__(layout, device)
        counts = torch.full((self._num_blocks,), float(BLOCK))
        counts[-1] -= self._num_blocks * BLOCK - self.size
        counts -= torch.bincount(self._gaps.cpu() // BLOCK, minlength=self._num_blocks)
        self._shares = counts.clamp_min(1).reciprocal().to(self.device)[:, None]
        signs = 1 - 2 * (torch.arange(256)[:, None] >> torch.arange(8) & 1)
        self._eight_signs = signs.to(torch.int8).view(torch.int64).flatten().to(self.device)
        self._one = torch.ones((), device=self.device)
        self._bytes, self._packed = self._scratch(torch.int8), self._scratch(torch.int64, 8)

    @property
    def capacity(self) -> int:
        return 4 * self._num_blocks + -(-self.size // 8)

    def _encode(self, update: Tensor, memory: State, out: Tensor) -> int:
        error, scales = memory["error"], floats(out, 0, self._num_blocks)
        codes = out[4 * self._num_blocks : self.capacity]
        for begin, end in self._spans():
            values, signs = self._load(update[begin:end], error[begin:end])
            blocks = slice(begin // BLOCK, -(-end // BLOCK))
            scale = scales[blocks, None]
            torch.sum(torch.abs(values, out=signs), 1, keepdim=True, out=scale)
            scale.mul_(self._shares[blocks])
            torch.copysign(self._one, values, out=signs)
            self._pack(signs.view(-1), codes[begin // 8 : -(-end // 8)])
            self._save_error(values, signs, scale, error[begin:end])
        error.index_fill_(0, self._gaps, 0.0)
        return self.capacity

    def _pack(self, signs: Tensor, codes: Tensor) -> None:
        """Pack one bit per sign, set for -1, whose byte is all ones."""
        eights = self._bytes[: signs.numel()].copy_(signs).view(torch.int64)
        packed = torch.bitwise_and(eights, _EIGHT_TWOS, out=self._packed[: eights.numel()])
        codes.view(torch.int8).copy_(packed.mul_(_GATHER_BITS).bitwise_right_shift_(56)[: codes.numel()])

    def _unpack(self, codes: Tensor, begin: int, end: int, out: Tensor) -> None:
        eights = self._eight_signs.index_select(0, codes[begin // 8 : -(-end // 8)].int())
        out.copy_(eights.view(torch.int8)[: end - begin])

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        super()._decode(payload, out)
        out.index_fill_(0, self._gaps, 0.0)
