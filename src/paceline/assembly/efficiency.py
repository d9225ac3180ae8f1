"""How far a strategy gets with its samples: the share of them that count, fitted on simulated runs."""

from __future__ import annotations

import math

from paceline.config import RunConfig
from paceline.settings.resolve import lr_scale
from paceline.settings.strategies import strategy_of

FIT_ERROR = 1.3
"""A share is off by this factor (root mean square), up or down; docs/simulate.md has the error of each strategy."""
USUAL_BATCHES = 2000  # the length of a run whose data set is not known
STALE_BATCHES = 3.0
MEAN_EXPONENT, OUTER_EXPONENT, STALE_DRIFT_EXPONENT = 0.9, 0.8, 1.0
FEW = 0.5  # below this share of useful samples the user is told


def num_batches(config: RunConfig, samples: float | None) -> float:
    """Return how many batches a run applies, whose budget is so many samples unless `--steps` sets it.

    >>> from paceline.settings.strategies import SYNC
    >>> num_batches(RunConfig(batch_size=100), 5000), num_batches(RunConfig(strategy=SYNC, workers=4, steps=10), None)
    (50.0, 40.0)
    """
    if config.steps is not None:
        return float(config.steps * strategy_of(config).pushes_per_update(config.workers or 1))
    return float(USUAL_BATCHES) if samples is None else max(1.0, samples / config.batch_size)


def statistical_efficiency(config: RunConfig, batches: float) -> float:
    """Return the share of a run's samples that count: one worker gets as far with so many of them.

    Stale pushes of c workers, or steps along means at c times the lr, cost 1 / (1 + 3 (c - 1) / sqrt(batches)). A mean
    of k batches at c < k times the lr goes (c / k)^0.9 of the way. Fitted on LeNet5 with SGD, at most 32 workers
    (`benchmarks/useful_samples.py`).

    >>> from paceline.settings.strategies import ASYNC, SYNC
    >>> [round(statistical_efficiency(RunConfig(strategy=name, workers=4), 2000), 2) for name in (ASYNC, SYNC)]
    [0.83, 0.29]
    >>> round(statistical_efficiency(RunConfig(strategy=SYNC, workers=4, scale_lr="auto"), 2000), 2)
    0.83
    """
    strategy, workers = strategy_of(config), config.workers or 1
    if strategy.is_local:
        mean = MEAN_EXPONENT if strategy.kind.outer is None else OUTER_EXPONENT
        return float(workers ** -(mean if strategy.in_rounds else STALE_DRIFT_EXPONENT))
    averaged = strategy.pushes_per_update(workers)
    longer = workers if strategy.is_stale else min(lr_scale(config), averaged)
    reached = 1.0 if strategy.is_stale else min(1.0, longer / averaged) ** MEAN_EXPONENT
    return float(reached / (1.0 + STALE_BATCHES * max(0.0, longer - 1.0) / math.sqrt(batches)))


def cost_of_many_workers(config: RunConfig, samples: float) -> str | None:
    """Say what an asynchronous run on many workers loses, if it is much.

    >>> cost_of_many_workers(RunConfig(workers=16), 16_000)
    '16 workers make 500 batches: about 33 % as many samples take one worker as far (a fit, off by a factor of 1.3): \
train longer, or on fewer workers'
    >>> cost_of_many_workers(RunConfig(workers=4), 16_000)
    """
    batches = num_batches(config, samples)
    share = statistical_efficiency(config, batches)
    if not strategy_of(config).is_stale or share >= FEW:
        return None
    cost = f"about {100 * share:.0f} % as many samples take one worker as far"
    fit = f"a fit, off by a factor of {FIT_ERROR:g}"
    return f"{config.workers} workers make {batches:.0f} batches: {cost} ({fit}): train longer, or on fewer workers"
