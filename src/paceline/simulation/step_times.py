"""Step times of simulated workers: a function of (seed, worker, step), independent of earlier draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.step_times import read_step_times
from paceline.errors import UserError, unknown_name
from paceline.randomness import rng
from paceline.settings.notation import seconds

FORM = (
    "write 30ms, 1,1,1,4 (seconds of each worker), lognormal:30ms,.3, exponential:30ms, gamma:30ms,.1, measured:RUN; "
    "then *1,1,4"
)
BLOCK = 128
MIN_SECONDS, MAX_SECONDS = 1e-9, 1e9
MAX_SPREAD = 5.0


@dataclass(frozen=True)
class StepTimeDistribution:
    """Distribution of step times: mean, and spread as a share of the mean or as measured quantiles of time / mean.

    `gamma` has a second spread, that of the workers' own means, which are drawn once per run.
    """

    kind: str
    mean: float
    spread: float = 0.0
    quantiles: tuple[float, ...] = ()
    machine_spread: float = 0.0

    def draw(self, generator: np.random.Generator, number: int) -> np.ndarray[Any, Any]:
        """Draw `number` step times."""
        if self.kind == "exponential":
            return generator.exponential(self.mean, number)
        if self.kind == "lognormal":
            return generator.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, number)
        if self.kind == "gamma":
            return self.mean * _gamma(generator, self.spread, number)
        if self.kind == "normal":
            return np.maximum(0.0, self.mean * (1.0 + self.spread * generator.standard_normal(number)))
        if self.kind == "measured":
            levels = np.linspace(0.0, 1.0, len(self.quantiles))
            return self.mean * np.interp(generator.random(number), levels, self.quantiles)
        return np.full(number, self.mean)


def _gamma(generator: np.random.Generator, spread: float, number: int) -> np.ndarray[Any, Any]:
    """Draw from the gamma distribution of mean 1 and standard deviation `spread`; ones if that is 0."""
    return generator.gamma(spread**-2, spread**2, number) if spread else np.ones(number)


class StepTimes:
    """Draws step times per worker, in blocks; workers beyond the list repeat its distributions."""

    def __init__(self, distributions: list[StepTimeDistribution], seed: int) -> None:
        self.distributions, self._seed = distributions, seed
        self._blocks: dict[int, tuple[int, list[float]]] = {}
        self._machines: dict[int, float] = {}

    @property
    def mean(self) -> float:
        """Mean step time of all workers."""
        return sum(one.mean for one in self.distributions) / len(self.distributions)

    def seconds(self, worker: int, step: int) -> float:
        """Return the seconds that step `step` of `worker` takes."""
        distribution = self.distributions[worker % len(self.distributions)]
        if distribution.kind == "constant":
            return distribution.mean
        number, place = divmod(step, BLOCK)
        held, block = self._blocks.get(worker, (-1, []))
        if held != number:
            drawn = distribution.draw(rng(self._seed, "step time", worker, number), BLOCK)
            block = (drawn * self._machine(worker, distribution.machine_spread)).tolist()
            self._blocks[worker] = (number, block)
        return block[place]

    def _machine(self, worker: int, spread: float) -> float:
        """Return the worker's mean step time as a factor of that of all workers."""
        if worker not in self._machines:
            factor = _gamma(rng(self._seed, "machine time", worker), spread, 1)[0]
            self._machines[worker] = max(float(factor), MIN_SECONDS)
        return self._machines[worker]


def parse_speeds(text: str, num_workers: int) -> list[StepTimeDistribution]:
    """Parse `--speeds` into one distribution per worker.

    >>> [one.mean for one in parse_speeds("1,1,4", 3)]
    [1.0, 1.0, 4.0]
    >>> parse_speeds("lognormal:30ms,.5*1,2", 2)[1]
    StepTimeDistribution(kind='lognormal', mean=0.06, spread=0.5, quantiles=(), machine_spread=0.0)
    """
    try:
        base, star, factors = text.partition("*")
        scales = _per_worker(_scales(factors if star else "1"), num_workers)
        return [replace(d, mean=d.mean * s) for d, s in zip(_base(base, num_workers), scales, strict=True)]
    except UserError as error:
        raise UserError(f"--speeds '{text}': {error}; {FORM}") from None


def parse_factors(text: str, num_workers: int) -> list[float]:
    """Parse `--speeds` with `--like` into one factor per worker.

    >>> parse_factors("1,4", 2)
    [1.0, 4.0]
    """
    try:
        return _per_worker(_scales(text), num_workers)
    except UserError as error:
        raise UserError(f"--speeds '{text}': {error}; with --like give factors alone, as in 1,1,4") from None


def _base(text: str, num_workers: int) -> list[StepTimeDistribution]:
    kind, colon, arguments = text.partition(":")
    if colon:
        return [_distribution(kind.strip(), arguments.split(","))] * num_workers
    times = [_seconds_or_factor(part) for part in text.split(",")]
    return [StepTimeDistribution("constant", time) for time in _per_worker(times, num_workers)]


def _distribution(kind: str, arguments: list[str]) -> StepTimeDistribution:
    takes = {"lognormal": 2, "normal": 2, "exponential": 1, "gamma": 2, "measured": 1}
    if kind not in takes:
        raise unknown_name("distribution", kind, takes)
    if kind == "measured":
        found = read_step_times(Path(",".join(arguments)))
        return StepTimeDistribution(kind, found.step_seconds, quantiles=found.quantiles)
    if kind == "gamma":
        return _gamma_distribution(arguments)
    if len(arguments) != takes[kind]:
        raise UserError(f"{kind} takes {takes[kind]} numbers, got {len(arguments)}")
    mean = _positive(seconds(arguments[0]), arguments[0])
    if kind == "exponential":
        return StepTimeDistribution(kind, mean)
    spread = seconds(arguments[1]) / mean if kind == "normal" else _factor(arguments[1])
    return StepTimeDistribution(kind, mean, _small(spread))


def _gamma_distribution(arguments: list[str]) -> StepTimeDistribution:
    """Parse MEAN,SPREAD[,SPREAD OF THE WORKERS' MEANS], the spreads as shares of the mean (arXiv 1907.11612)."""
    if len(arguments) not in (2, 3):
        raise UserError(f"gamma takes 2 or 3 numbers, got {len(arguments)}")
    steps, machines = (_small(_factor(part)) for part in [*arguments[1:], "0"][:2])
    mean = _positive(seconds(arguments[0]), arguments[0])
    return StepTimeDistribution("gamma", mean, steps, machine_spread=machines)


def _small(spread: float) -> float:
    if not 0.0 <= spread <= MAX_SPREAD:
        raise UserError(f"a spread of {spread:g} times the mean is not between 0 and {MAX_SPREAD:g}")
    return spread


def _seconds_or_factor(text: str) -> float:
    text = text.strip()
    return _positive(_factor(text) if text and text[-1] in "0123456789." else seconds(text), text)


def _scales(text: str) -> list[float]:
    return [_positive(_factor(part), part) for part in text.split(",")]


def _factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"'{text}' is not a number") from None


def _positive(value: float, text: str) -> float:
    if not value >= MIN_SECONDS:
        raise UserError(f"'{text}' is not a number above zero (at least a nanosecond)")
    if value > MAX_SECONDS:
        raise UserError(f"'{text}' is above {MAX_SECONDS:g} seconds, 30 years")
    return value


def _per_worker(values: list[float], num_workers: int) -> list[float]:
    """Return one value per worker, from one value for all or one for each."""
    if len(values) == 1:
        return values * num_workers
    if len(values) != num_workers:
        raise UserError(f"there are {len(values)} speeds for {num_workers} workers")
    return values
