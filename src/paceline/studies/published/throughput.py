"""Figures of a run in the units of published logs: data/sec by step, seconds and accuracy by epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """Figures of one epoch; accuracies in percent, None if not measured."""

    number: int  # counted from 1
    seconds: float
    test_seconds: float | None
    test_accuracy: float | None
    train_accuracy: float | None = None


def rates_by_step(events: Iterable[dict[str, Any]], every: int = 200) -> list[tuple[int, float]]:
    """Return (step, samples per second since the start) every `every` updates, interpolated between progress events.

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
    """Return the epochs of a run evaluated after each epoch; their seconds exclude the evaluation."""
    found: list[Epoch] = []
    before = 0.0
    for row in events:
        if row.get("kind") == "evaluation":
            accuracies = (row.get("test_accuracy"), row.get("train_accuracy"))
            found.append(Epoch(len(found) + 1, row["now"] - before, row.get("test_seconds"), *accuracies))
            before = row["now"]
    return found
