"""Random numbers by address: every choice is a function of (seed, purpose, address), never of what was drawn before."""

from __future__ import annotations

import zlib

import numpy as np

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
