"""The norm of the weights while they are trained, measured so rarely that nobody waits for it."""

from __future__ import annotations

import math
import time

import torch

from paceline.core.server import Server

SHARE = 0.002
"""Of the server's time, at most."""


class Weighing:
    """Says how long the vector of all weights is; None while it is too soon, or where there are none."""

    def __init__(self, server: Server, virtual: bool) -> None:
        self._server, self._virtual = server, virtual
        self._next = 0.0

    def norm(self) -> float | None:
        """To six digits; a virtual clock has it measured every time, so that equal runs have equal rows."""
        began = time.perf_counter()
        if not self._server.weights.numel() or (not self._virtual and began < self._next):
            return None
        norm = float(torch.linalg.vector_norm(self._server.weights))
        ended = time.perf_counter()
        self._next = ended + (ended - began) / SHARE
        return float(f"{norm:.6g}") if math.isfinite(norm) else None
