"""How long training lasts, and its learning rate: functions of the samples applied, never of time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """When training ends: after `samples` samples, after `steps` updates, or (`per_worker`) when every worker is done.

    With `per_worker`, `samples` is the sum over all workers' passes and only scales the schedules; it is 0 if users'
    own loops alone decide when to stop. With `pushes`, training ends after that many pushes, or local steps.
    """

    samples: int
    epoch_samples: int
    steps: int | None = None
    per_worker: bool = False
    pushes: int | None = None

    def exhausted(self, samples: int, version: int, pushes: int = 0) -> bool:
        """Whether the budget is used up. An `per_worker` budget never is: it ends by the workers' quotas."""
        if self.pushes is not None and pushes >= self.pushes:
            return True
        if self.steps is not None:
            return version >= self.steps
        return not self.per_worker and samples >= self.samples

    def local_steps(self, steps: int, taken: int, workers: int) -> int:
        """How many local steps to ask a worker for: `steps`, or its share of what is left.

        >>> [Budget(0, 1, pushes=50).local_steps(20, taken, workers=2) for taken in (0, 40, 49)]
        [20, 5, 1]
        """
        return steps if self.pushes is None else max(1, min(steps, -(-(self.pushes - taken) // max(1, workers))))

    @property
    def is_known(self) -> bool:
        """Whether the length of training is known, not only to users' own loops."""
        return self.steps is not None or self.samples > 0

    def fraction(self, samples: int, version: int) -> float:
        """How much of training is done, from 0 to 1; 0 if it is not known."""
        if self.steps is not None:
            return min(1.0, version / self.steps)
        return min(1.0, samples / self.samples) if self.samples else 0.0


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of how much of the budget is spent.

    It grows in a straight line over the first `warmup` of the budget, to where the schedule goes on from there:
    `cosine` falls over what remains of the budget, `exponential` has decayed since the start, `steps` decays at each
    of its milestones.

    >>> Schedule(0.1, "cosine").lr(0.5, epochs=3.0)
    0.05
    >>> [round(Schedule(0.1, "cosine", warmup=0.2).lr(done, 0.0), 3) for done in (0.1, 0.2, 0.6, 1.0)]
    [0.05, 0.1, 0.05, 0.0]
    >>> [Schedule(1.0, "steps", 0.5, milestones=(80, 120)).lr(0.5, epochs) for epochs in (79.9, 80.0, 120.0)]
    [1.0, 0.5, 0.25]
    """

    base: float
    kind: str = "constant"
    decay: float = 0.9
    warmup: float = 0.0
    passes: float | None = None  # of each worker over its own data, if epochs are counted so
    milestones: tuple[float, ...] = ()  # epochs after which `steps` has multiplied lr by `decay` once more

    def lr(self, fraction: float, epochs: float) -> float:
        """The learning rate after `fraction` of the budget and `epochs` passes over the data."""
        lr = self.base
        if self.kind == "exponential":
            lr *= self.decay ** math.floor(epochs)
        if self.kind == "steps":
            lr *= self.decay ** sum(epochs >= milestone for milestone in self.milestones)
        if fraction < self.warmup:
            return lr * max(fraction / self.warmup, 0.01)
        if self.kind == "cosine":
            lr *= 0.5 * (1.0 + math.cos(math.pi * (fraction - self.warmup) / (1.0 - self.warmup)))
        return lr


@dataclass(frozen=True)
class InnerLoop:
    """What a worker does between two pushes: `steps` local steps, at a learning rate with its own schedule."""

    steps: int
    schedule: Schedule


@dataclass(frozen=True)
class Training:
    """How long training lasts, the learning rate of its updates, and the local steps between them, if any."""

    budget: Budget
    schedule: Schedule
    inner: InnerLoop | None = None

    def lr(self, samples: int, version: int, local: bool = False) -> float:
        """The learning rate after `samples` samples and `version` updates: of an update, or of local steps if any."""
        schedule = self.inner.schedule if local and self.inner is not None else self.schedule
        if schedule.kind == "constant" and not schedule.warmup:
            return schedule.base
        if schedule.passes is not None:  # of a worker; `epoch_samples` is one pass of all, whoever reads a sample
            epochs = samples * schedule.passes / self.budget.samples
        else:
            epochs = samples / self.budget.epoch_samples
        return schedule.lr(self.budget.fraction(samples, version), epochs)
