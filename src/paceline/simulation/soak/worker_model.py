"""Model of one worker: the update that it owes for a reply, and what its error feedback must hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.buffers import load_local_state
from paceline.core.messages import Reply
from paceline.simulation.soak.oracle import ScalarOptimizer
from paceline.simulation.soak.violation import require
from paceline.tasks.synthetic import OPTIMUM, curvature

if TYPE_CHECKING:
    from paceline.simulation.soak.draw import Trial

ROUNDING = 1e-5  # tolerance of a sum of float32 values, relative to the sum of their magnitudes
Vector = list[float]


class WorkerModel:
    """One incarnation of a worker, in double precision, without code of the checked classes.

    For each coordinate: the sum of decoded updates that counted + error feedback = the sum of updates that counted.
    """

    def __init__(self, trial: Trial) -> None:
        self._inner = [ScalarOptimizer(trial.optimizer, trial.lr, trial.momentum) for _ in OPTIMUM]
        self._local_state = trial.make_local_state()
        self._owed, self._magnitude = [0.0] * len(OPTIMUM), [0.0] * len(OPTIMUM)
        self.discarded = 0

    def update_of(self, sent: Tensor, reply: Reply, shard: int) -> Vector:
        """Return the gradient of one batch at the weights `sent`, or the drift of local steps from there."""
        begin: Vector = sent.tolist()
        if not reply.steps:
            return [curvature(shard, reply.batch) * (x - best) for x, best in zip(begin, OPTIMUM, strict=True)]
        point = list(begin)
        for batch in range(reply.batch, reply.batch + reply.steps):
            for place, (optimizer, best) in enumerate(zip(self._inner, OPTIMUM, strict=True)):
                point[place] -= optimizer.change(curvature(shard, batch) * (point[place] - best))
        return [before - after for before, after in zip(begin, point, strict=True)]

    def count(self, update: Vector, decoded: Tensor) -> None:
        """Count an update that was applied as `decoded`."""
        for place, (due, got) in enumerate(zip(update, decoded.tolist(), strict=True)):
            self._owed[place] += due - got
            self._magnitude[place] += abs(due) + abs(got)

    def check_left_out(self, saved: Tensor) -> None:
        """Require that the worker's saved state holds what the applied pushes left out; without a codec nothing is."""
        load_local_state(self._local_state, saved)
        error = self._local_state.get("codec.error")
        left_out = error.tolist() if error is not None else [0.0] * len(OPTIMUM)
        promise = "feedback" if error is not None else "weights"
        for owed, kept, magnitude in zip(self._owed, left_out, self._magnitude, strict=True):
            near = math.isclose(owed, kept, abs_tol=ROUNDING * (1.0 + magnitude + abs(kept)))
            require(near, promise, "{} was left out of the pushes that count, the worker keeps {}", owed, kept)
