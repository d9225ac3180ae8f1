"""Integer hashes inside a Triton kernel: dropout masks and the choices of augmentation, the same bits as on a CPU."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.randomness import MULTIPLIER_A, MULTIPLIER_B

FIRST = tl.constexpr(MULTIPLIER_A)
SECOND = tl.constexpr(MULTIPLIER_B)


@triton.jit
def scrambled(counter, low, high):
    """Hash each counter under a key of two halves, as `randomness.scramble` does, in wrapping 32-bit arithmetic."""
    bits = counter ^ low
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * FIRST
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    return (bits + high) * SECOND


@triton.jit
def kept(counter, low, high, THRESHOLD: tl.constexpr):
    """Return whether dropout keeps the value of each counter."""
    return scrambled(counter, low, high) >= THRESHOLD


@triton.jit
def chosen(counter, low, high, BOUND: tl.constexpr):
    """Return a number from 0 to BOUND - 1 for each counter, by the hash's upper bits, as `tasks.augmentation` does."""
    upper = (scrambled(counter, low, high) >> 8) & 0xFFFFFF
    return ((upper.to(tl.int64) * BOUND) >> 24).to(tl.int32)
