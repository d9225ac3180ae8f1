"""Optimizers written slowly and plainly, on lists of Python floats, for the oracles of rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from paceline.core.optimizers import Adam, Optimizer, Sgd


class SlowOptimizer(Protocol):
    def step(self, weights: list[float], gradient: list[float], lr: float) -> list[float]: ...


class SlowSgd:
    def __init__(self, momentum: float = 0.0) -> None:
        self.momentum = momentum
        self.velocity = [0.0] * 100

    def step(self, weights: list[float], gradient: list[float], lr: float) -> list[float]:
        self.velocity = [self.momentum * v + g for v, g in zip(self.velocity, gradient, strict=False)]
        return [w - lr * v for w, v in zip(weights, self.velocity, strict=True)]


class SlowAdam:
    def __init__(self) -> None:
        self.mean, self.square, self.count = [0.0] * 100, [0.0] * 100, 0

    def step(self, weights: list[float], gradient: list[float], lr: float) -> list[float]:
        self.count += 1
        self.mean = [0.9 * m + 0.1 * g for m, g in zip(self.mean, gradient, strict=False)]
        self.square = [0.999 * s + 0.001 * g * g for s, g in zip(self.square, gradient, strict=False)]
        means = [m / (1 - 0.9**self.count) for m in self.mean]
        squares = [s / (1 - 0.999**self.count) for s in self.square]
        return [w - lr * m / (math.sqrt(s) + 1e-8) for w, m, s in zip(weights, means, squares, strict=True)]


BOTH: dict[str, tuple[Callable[[], Optimizer], Callable[[], SlowOptimizer]]] = {
    "sgd": (lambda: Sgd(), lambda: SlowSgd()),
    "momentum": (lambda: Sgd(0.7), lambda: SlowSgd(0.7)),
    "adam": (lambda: Adam(), lambda: SlowAdam()),
}
"""Each optimizer and its oracle."""
