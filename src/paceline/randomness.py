"""Counter-based random numbers: each value is a function of (seed, purpose, address), never of earlier draws."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

from paceline.errors import UserError

_WORD = 2**32


def rng(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """Return the generator of one address: the same in every process, independent between addresses.

    >>> int(rng(1, "batches", 0, 3).integers(1000)) == int(rng(1, "batches", 0, 3).integers(1000))
    True
    """
    # SeedSequence pads with zeros and splits large integers. Two words per number and the length of the address keep
    # different addresses apart.
    words = [zlib.crc32(purpose.encode()), len(address)]
    for value in (seed, *address):
        if not 0 <= value < _WORD**2:
            raise UserError(
                f"seed or address {value} of '{purpose}' is not in 0 to 2^64 - 1: choose a number in that range"
            )
        words += [value % _WORD, value // _WORD]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


_MASK64 = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(*words: int) -> int:
    """Hash integers into 64 well-mixed bits (the splitmix64 finaliser after each word).

    >>> mix64(1, 2) != mix64(2, 1)
    True
    """
    value = 0
    for word in words:
        value = (value + _GOLDEN + (word & _MASK64)) & _MASK64
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK64
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK64
        value ^= value >> 31
    return value


def mix64_array(*words: Any) -> NDArray[np.uint64]:
    """Apply `mix64` elementwise to integer arrays that broadcast together.

    >>> int(mix64_array(3, np.arange(2))[1]) == mix64(3, 1)
    True
    """
    golden, first, second = np.uint64(_GOLDEN), np.uint64(_FIRST), np.uint64(_SECOND)
    value = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            value = value + golden + np.asarray(word).astype(np.uint64)
            value = (value ^ (value >> np.uint64(30))) * first
            value = (value ^ (value >> np.uint64(27))) * second
            value = value ^ (value >> np.uint64(31))
    return value


def _signed32(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


MULTIPLIER_A = 0x7FEB352D
MULTIPLIER_B = 0x846CA68B - (1 << 32)  # as int32


def halves(key: int) -> tuple[int, int]:
    """Split a 64-bit key into two int32: the low and the high half."""
    return _signed32(key), _signed32(key >> 32)


def scramble(counter: Tensor, key: int | Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """Hash each int32 in `counter` under `key` (or its halves, int32 [2]) into 32 bits, written to `out`.

    Two rounds of multiply and xor-shift. The upper bits are mixed best. Wrapping int32 arithmetic gives the same bits
    on every device.
    """
    import torch  # here, because locating a data set must not import torch

    low, high = halves(key) if isinstance(key, int) else key.unbind()
    torch.bitwise_xor(counter, low, out=out)
    torch.bitwise_right_shift(out, 16, out=spare)
    out.bitwise_xor_(spare.bitwise_and_(0xFFFF)).mul_(MULTIPLIER_A)
    torch.bitwise_right_shift(out, 15, out=spare)
    out.bitwise_xor_(spare.bitwise_and_(0x1FFFF)).add_(high).mul_(MULTIPLIER_B)
    return out
