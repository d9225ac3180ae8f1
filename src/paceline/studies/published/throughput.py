"""The course of a run in the units of published logs: data/sec by step, seconds and accuracy by epoch. Reads events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to; accuracies in percent, None where they were not measured."""

    number: int
    """From 1."""
    seconds: float
    test_seconds: float | None
    test_accuracy: float | None
    train_accuracy: float | None = None


def rates_by_step(events: Iterable[dict[str, Any]], every: int = 200) -> list[tuple[int, float]]:
    """(step, samples a second since the start) at every so many updates, between the rows that were kept.

    >>> rows = [{"kind": "progress", "now": 10.0, "updates": 100, "samples": 3200}]
    >>> rates_by_step([*rows, {"kind": "progress", "now": 20.0, "updates": 300, "samples": 9600}])
    [(200, 426.6666666666667)]
    """
    known = [(0, 0, 0.0)]
    known += [(row["updates"], row["samples"], row["now"]) for row in events if row.get("kind") == "progress"]
    found, step = [], every
    for (before, samples_before, began), (after, samples_after, ended) in pairwise(known):
        while before < step <= after:
            share = (step - before) / (after - before)
            seconds = began + share * (ended - began)
            if seconds > 0:
                found.append((step, (samples_before + share * (samples_after - samples_before)) / seconds))
            step += every
    return found


def epochs_of(events: Iterable[dict[str, Any]]) -> list[Epoch]:
    """Of a run that was evaluated after every epoch; the clock stood still while it was tested."""
    found: list[Epoch] = []
    before = 0.0
    for row in events:
        if row.get("kind") == "evaluation":
            accuracies = (row.get("test_accuracy"), row.get("train_accuracy"))
            found.append(Epoch(len(found) + 1, row["now"] - before, row.get("test_seconds"), *accuracies))
            before = row["now"]
    return found
