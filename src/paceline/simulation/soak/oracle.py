"""Serial oracles in double precision, without code of the checked rules: of one coordinate, and of its average."""

from __future__ import annotations

import math
from typing import NamedTuple

BETAS, EPS = (0.5, 0.9), 0.5  # of Adam: near the optimum it acts like sgd with lr / EPS, which must stay stable


class AppliedPush(NamedTuple):
    """One push of an update: the version it was computed from, its share of the mean, the curvature of its batch."""

    version: int
    weight: float
    curvature: float
    update: float | None = None  # the coordinate of an update that is not the gradient at that version (codec, drift)


class ScalarOptimizer:
    """Sgd (momentum, nesterov) or adam on one coordinate."""

    def __init__(self, name: str, lr: float, momentum: float) -> None:
        self._name, self._lr, self._momentum = name, lr, momentum
        self._velocity = self._mean = self._square = 0.0
        self._count = 0

    def change(self, gradient: float) -> float:
        """Return the next step, to be subtracted."""
        self._count += 1
        if self._name == "adam":
            beta1, beta2 = BETAS
            self._mean = beta1 * self._mean + (1.0 - beta1) * gradient
            self._square = beta2 * self._square + (1.0 - beta2) * gradient * gradient
            root = math.sqrt(self._square / (1.0 - beta2**self._count))
            return self._lr * self._mean / (1.0 - beta1**self._count) / (root + EPS)
        self._velocity = self._momentum * self._velocity + gradient
        if self._name == "nesterov":
            return self._lr * (gradient + self._momentum * self._velocity)
        return self._lr * self._velocity


class AverageOracle:
    """The running mean of each coordinate: average += a_t (weights - average), a_t as `--average` says.

    From update 64 on, only every eighth is averaged, with the share of eight. If workers have reached their quota, and
    nobody else computes on their data, a_t is multiplied by the share of the data that is still computed on, to the
    power of 4. Lost and drained workers change nothing.
    """

    def __init__(self, average: str, start: list[float]) -> None:
        self._horizon = None if average in ("auto", "on") else float(average)
        self.average, self._count = start, 0

    def apply(self, weights: list[float], present: float) -> None:
        """Follow one update; `present` is that share."""
        self._count += 1
        share = 9.0 / (self._count + 8.0)
        if self._horizon is not None:
            share = max(2.0 / (self._count + 1.0), 1.0 / self._horizon)
        if self._count >= 64:
            share = 1.0 - (1.0 - share) ** 8 if self._count % 8 == 0 else 0.0
        share *= present**4
        self.average = [old + share * (new - old) for old, new in zip(self.average, weights, strict=True)]


class SerialOracle:
    """Follows a coordinate from 0 to the optimum `answer`, under sgd (momentum, nesterov) or adam.

    The bound is on |x - answer| / |answer|. With s the version a push saw, a = lr / (1 - m), h its curvature and
    c = a m (nesterov: a m^2), z = x - c v moves like sgd without momentum: z' = z - a h x_s. As x_s is z but for the
    steps of z since s and for c v_s, |z'| <= |1 - a h| |z| + a h (sum of those steps + c |v_s|).
    """

    def __init__(self, optimizer: str, lr: float, momentum: float, answer: float) -> None:
        self._optimizer, self._lr, self._momentum, self._answer = optimizer, lr, momentum, answer
        self._scalar = ScalarOptimizer(optimizer, lr, momentum)
        self._step = lr / (1.0 - momentum)
        self._lead = self._step * momentum ** (2 if optimizer == "nesterov" else 1) if momentum else 0.0
        self.points, self.max_staleness = [0.0], 0
        self._z, self._moved, self._velocities, self._distances = 1.0, [0.0], [0.0], [1.0]

    def apply(self, parts: list[AppliedPush]) -> float:
        """Apply one update and return the new coordinate."""
        total = sum(part.weight for part in parts)
        curvature = sum(part.weight * part.curvature for part in parts) / total
        oldest = min(part.version for part in parts)
        gradient = sum(part.weight * self._update(part) for part in parts) / total
        self.max_staleness = max(self.max_staleness, len(self.points) - 1 - oldest)
        self.points.append(self.points[-1] - self._scalar.change(gradient))
        self._update_bound(curvature, oldest)
        return self.points[-1]

    def _update(self, part: AppliedPush) -> float:
        return part.curvature * (self.points[part.version] - self._answer) if part.update is None else part.update

    def _update_bound(self, curvature: float, seen: int) -> None:
        """Update the bound after one more update computed from version `seen`."""
        gain, distance = self._step * curvature, self._distances[seen]
        error = self._moved[-1] - self._moved[seen] + self._lead * self._velocities[seen]
        self._z = abs(1.0 - gain) * self._z + gain * error
        self._moved.append(self._moved[-1] + gain * distance)
        self._velocities.append(self._momentum * self._velocities[-1] + curvature * distance)
        self._distances.append(self._z + self._lead * self._velocities[-1])

    def tolerance(self, start: float) -> float:
        """Return how far from the optimum a coordinate that started at distance `start` may be now.

        For adam this is a generous estimate, not a proof: it moves at least lr / 4 per update, overshoots by what
        stale pushes and its running mean still carry, then converges like sgd with lr / EPS.
        """
        if self._optimizer != "adam":
            return start * self._distances[-1]
        settling = len(self.points) - 1 - start / (0.25 * self._lr)
        if settling < 0:
            return start + 2.0 * self._lr * (self.max_staleness + 2)
        decay: float = 1.0 - 0.25 * self._lr / EPS / (1 + self.max_staleness)
        return 2.0 * self._lr * (self.max_staleness + 2) * math.pow(decay, settling)
