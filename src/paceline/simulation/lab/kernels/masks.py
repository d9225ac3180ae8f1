"""The dropout mask of `models.dropout`, inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.randomness import MULTIPLIER_A, MULTIPLIER_B

FIRST = tl.constexpr(MULTIPLIER_A)
SECOND = tl.constexpr(MULTIPLIER_B)


@triton.jit
def kept(counter, low, high, THRESHOLD: tl.constexpr):
    """Return whether the value of each counter is kept, in wrapping 32-bit arithmetic."""
    bits = counter ^ low
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * FIRST
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = (bits + high) * SECOND
    return bits >= THRESHOLD
