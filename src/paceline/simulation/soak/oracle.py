"""What one process would make of the same pushes in the same order, and how far from the answer it can be then.

It follows one coordinate in double precision, so that it shares no code with the rules it is held against.
"""

from __future__ import annotations

import math
from typing import NamedTuple

BETAS, EPS = (0.5, 0.9), 0.5
"""Adam with a short memory; near the answer it is sgd with lr / EPS, which must not be too long a step."""


class Part(NamedTuple):
    """One push of an update: the version it was computed from, its samples, how steep its batch was."""

    version: int
    samples: int
    curvature: float


class Oracle:
    """The coordinate that starts at 0 and should come to `answer`, under sgd (momentum, nesterov) or adam.

    The bound is on |x - answer| / |answer|. With s the version a push saw, a = lr / (1 - m), h its curvature and
    c = a m (nesterov: a m^2), z = x - c v moves like sgd without momentum: z' = z - a h x_s. As x_s is z but for the
    steps of z since s and for c v_s, |z'| <= |1 - a h| |z| + a h (sum of those steps + c |v_s|).
    """

    def __init__(self, optimizer: str, lr: float, momentum: float, answer: float) -> None:
        self._optimizer, self._lr, self._momentum, self._answer = optimizer, lr, momentum, answer
        self._step = lr / (1.0 - momentum)
        self._lead = self._step * momentum ** (2 if optimizer == "nesterov" else 1) if momentum else 0.0
        self.points = [0.0]
        self.most_stale = 0
        self._velocity = self._mean = self._square = 0.0
        self._z, self._moved, self._velocities = 1.0, [0.0], [0.0]
        self._distances = [1.0]

    def apply(self, parts: list[Part]) -> float:
        """One update; returns where the coordinate is now."""
        samples = sum(part.samples for part in parts)
        steep = sum(part.samples * part.curvature for part in parts) / samples
        oldest = min(part.version for part in parts)
        pull = sum(p.samples * p.curvature * (self.points[p.version] - self._answer) for p in parts) / samples
        self.most_stale = max(self.most_stale, len(self.points) - 1 - oldest)
        self.points.append(self.points[-1] - self._change(pull))
        self._widen(steep, oldest)
        return self.points[-1]

    def _change(self, pull: float) -> float:
        """What the optimizer takes off."""
        if self._optimizer == "adam":
            beta1, beta2 = BETAS
            count = len(self.points)
            self._mean = beta1 * self._mean + (1.0 - beta1) * pull
            self._square = beta2 * self._square + (1.0 - beta2) * pull * pull
            root = math.sqrt(self._square / (1.0 - beta2**count))
            return self._lr * self._mean / (1.0 - beta1**count) / (root + EPS)
        self._velocity = self._momentum * self._velocity + pull
        if self._optimizer == "nesterov":
            return self._lr * (pull + self._momentum * self._velocity)
        return self._lr * self._velocity

    def _widen(self, steep: float, seen: int) -> None:
        """The bound after one more update that is computed from version `seen`."""
        gain, distance = self._step * steep, self._distances[seen]
        error = self._moved[-1] - self._moved[seen] + self._lead * self._velocities[seen]
        self._z = abs(1.0 - gain) * self._z + gain * error
        self._moved.append(self._moved[-1] + gain * distance)
        self._velocities.append(self._momentum * self._velocities[-1] + steep * distance)
        self._distances.append(self._z + self._lead * self._velocities[-1])

    def tolerance(self, start: float) -> float:
        """How far from the answer a coordinate that started at distance `start` may be now.

        For adam this is no proof but an estimate with room: it goes at least a quarter of lr an update, passes the
        answer by what pushes under way and its mean still carry, and then settles as sgd with lr / EPS does.
        """
        if self._optimizer != "adam":
            return start * self._distances[-1]
        settling = len(self.points) - 1 - start / (0.25 * self._lr)
        if settling < 0:
            return start + 2.0 * self._lr * (self.most_stale + 2)
        decay: float = 1.0 - 0.25 * self._lr / EPS / (1 + self.most_stale)
        return 2.0 * self._lr * (self.most_stale + 2) * math.pow(decay, settling)
