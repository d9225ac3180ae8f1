"""The share of a run's samples that count."""

from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.assembly.efficiency import FIT_ERROR, cost_of_many_workers, num_batches, statistical_efficiency
from paceline.config import RunConfig
from paceline.settings.strategies import worth_comparing

RUNS = Path(__file__).parents[2] / "docs/figures/useful_samples.csv"


@pytest.mark.parametrize("strategy", [name for name in worth_comparing(8, 16) if not name.startswith("backup")])
def test_one_worker_wastes_nothing_and_more_workers_waste_more(strategy: str) -> None:
    shares = [statistical_efficiency(RunConfig(strategy=strategy, workers=n), 2000) for n in (1, 2, 4, 8, 16, 32)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True) and 0.0 < shares[-1] < 0.5


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_many_batches_forgive_staleness_and_long_steps(strategy: str) -> None:
    config = RunConfig(strategy=strategy, workers=8, scale_lr="auto" if strategy == "sync" else "none")
    shares = [statistical_efficiency(config, batches) for batches in (100, 1000, 10_000, 10**8)]
    assert shares == sorted(shares) and shares[-1] > 0.99


def test_the_fit_is_as_close_to_the_runs_as_is_said() -> None:
    """Of `async`, whose share is on every line: the error over all cells, from the accuracies that were measured."""
    means: dict[tuple[str, int, float, float], list[float]] = {}
    with RUNS.open(newline="") as stream:
        for name, workers, lr, epochs, _, accuracy in csv.reader(stream):
            means.setdefault((name, int(workers), float(lr), float(epochs)), []).append(float(accuracy))
    errors = []
    for (name, workers, lr, epochs), found in means.items():
        if name == "async":
            accuracy = sum(found) / len(found)
            share = _epochs_alone(means, lr, accuracy) / epochs
            batches = num_batches(RunConfig(), 10_800 * epochs)
            errors.append(math.log(share / statistical_efficiency(RunConfig(workers=workers), batches)))
    assert len(errors) == 20
    assert math.exp(math.sqrt(sum(error**2 for error in errors) / len(errors))) < FIT_ERROR


def _epochs_alone(means: dict[tuple[str, int, float, float], list[float]], lr: float, accuracy: float) -> float:
    """The epochs that one worker needs, between two lengths on a logarithmic scale."""
    alone = sorted(
        (cell[3], sum(found) / len(found)) for cell, found in means.items() if cell[0] == "alone" and cell[2] == lr
    )
    for (shorter, before), (longer, after) in pairwise(alone):
        if before <= accuracy <= after:
            return shorter * (longer / shorter) ** ((accuracy - before) / (after - before))
    raise AssertionError(f"no run of one worker is as good as {accuracy}")


def test_a_user_is_told_what_many_workers_cost() -> None:
    assert cost_of_many_workers(RunConfig(strategy="bounded:2", workers=32), 12_000) is not None
    assert cost_of_many_workers(RunConfig(strategy="sync", workers=32), 12_000) is None
