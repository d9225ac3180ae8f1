"""Random numbers by address: every choice is a function of (seed, purpose, address), never of what was drawn before."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

from paceline.errors import UserError

_WORD = 2**32


def rng(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """The generator of one address; the same in every process, and different addresses give unrelated streams.

    >>> int(rng(1, "batches", 0, 3).integers(1000)) == int(rng(1, "batches", 0, 3).integers(1000))
    True
    """
    # SeedSequence pads with zeros and splits large integers: two words for every number, and their count, keep apart
    # what differs.
    words = [zlib.crc32(purpose.encode()), len(address)]
    for value in (seed, *address):
        if not 0 <= value < _WORD**2:
            raise UserError(
                f"seed or address {value} of '{purpose}' is not in 0 to 2^64 - 1: choose a number in that range"
            )
        words += [value % _WORD, value // _WORD]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


_MASK64 = (1 << 64) - 1


def mix64(*words: int) -> int:
    """Hash integers into 64 well-mixed bits (the splitmix64 finaliser after each word).

    >>> mix64(1, 2) != mix64(2, 1)
    True
    """
    value = 0
    for word in words:
        value = (value + 0x9E3779B97F4A7C15 + (word & _MASK64)) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        value ^= value >> 31
    return value


def _signed32(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


MULTIPLIER_A = 0x7FEB352D
MULTIPLIER_B = 0x846CA68B - (1 << 32)  # as int32


def halves(key: int) -> tuple[int, int]:
    """A 64-bit key as two int32: the low and the high half."""
    return _signed32(key), _signed32(key >> 32)


def scramble(counter: Tensor, key: int | Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """Hash each int32 in `counter` under `key` (or its halves, int32 [2]) into 32 bits, the higher the better mixed.

    Two rounds of multiply and xor-shift on 32-bit lanes, written to `out`; only wrapping int32 arithmetic, which every
    device does alike.
    """
    import torch  # here, because data sets are located without torch

    low, high = halves(key) if isinstance(key, int) else key.unbind()
    torch.bitwise_xor(counter, low, out=out)
    torch.bitwise_right_shift(out, 16, out=spare)
    out.bitwise_xor_(spare.bitwise_and_(0xFFFF)).mul_(MULTIPLIER_A)
    torch.bitwise_right_shift(out, 15, out=spare)
    out.bitwise_xor_(spare.bitwise_and_(0x1FFFF)).add_(high).mul_(MULTIPLIER_B)
    return out
