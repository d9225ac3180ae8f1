"""Divide the samples of a data set: into shards, one per worker, and into train and validation parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError, unknown_name
from paceline.randomness import rng

Indices = NDArray[np.int64]

SPLITS = ("full", "iid", "labels", "dirichlet:ALPHA")
_MAX_CONCENTRATION = 1e12  # above it, a Dirichlet draw equals the weights to within a sample


@dataclass(frozen=True)
class Split:
    """A way to divide data over workers; only `dirichlet` has an `alpha`."""

    kind: str
    alpha: float | None = None

    def __str__(self) -> str:
        return self.kind if self.alpha is None else f"{self.kind}:{self.alpha:g}"


@cache
def parse_split(text: str) -> Split:
    """Parse a split as the user writes it.

    >>> parse_split("dirichlet:0.5")
    Split(kind='dirichlet', alpha=0.5)
    """
    kind, colon, argument = text.strip().partition(":")
    if kind == "dirichlet":
        try:
            alpha = float(argument)
        except ValueError:
            alpha = math.nan
        if not (math.isfinite(alpha) and alpha > 0):
            found = f"'{argument}'" if colon else "none"
            what = f"a positive number after 'dirichlet:', found {found}"
            raise UserError(f"split '{text}' needs {what}: try dirichlet:0.5")
        return Split("dirichlet", alpha)
    if kind not in ("full", "iid", "labels"):
        raise unknown_name("split", text, SPLITS)
    if colon:
        raise UserError(f"split '{text}' was asked for, but '{kind}' takes no argument: write '{kind}'")
    return Split(kind)


def partition(
    labels: NDArray[Any], num_workers: int, split: Split, seed: int, weights: Sequence[float] | None = None
) -> list[Indices]:
    """Return the sorted sample indices of each worker: disjoint and complete, except for `full` (all for each)."""
    shares = _shares(num_workers, split, weights)
    if len(labels) == 0:
        raise UserError(f"split {split} was asked for over a data set without samples: use another data set")
    if split.kind == "full":
        return [np.arange(len(labels), dtype=np.int64) for _ in range(num_workers)]
    if split.kind == "iid":
        shards = _divide(rng(seed, "split iid").permutation(len(labels)), shares)
    elif split.kind == "labels":
        generator = rng(seed, "split labels")
        classes = _classes(labels)
        order = [generator.permutation(classes[number]) for number in generator.permutation(len(classes))]
        shards = _divide(np.concatenate(order), shares)
    else:
        shards = _dirichlet(_classes(labels), shares, split, seed)
    for worker, shard in enumerate(shards):
        if len(shard) == 0:
            what = f"{len(labels)} samples over {num_workers} workers leaves worker {worker} with none"
            raise UserError(f"split {split} of {what}: {_remedy(split, weights)}")
    return [np.sort(shard).astype(np.int64) for shard in shards]


def hold_out(labels: int | NDArray[Any], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Return sorted train and validation indices: `fraction` of each class, to within a sample, is held out."""
    if not 0 <= fraction < 1:
        raise UserError(f"a validation fraction of {fraction:g} was asked for: choose at least 0 and less than 1")
    classes = [np.arange(labels, dtype=np.int64)] if isinstance(labels, int) else _classes(labels)
    total = sum(len(members) for members in classes)
    if fraction == 0:
        return np.arange(total, dtype=np.int64), np.empty(0, dtype=np.int64)
    # Rounding the running total keeps both the whole and each class within one sample of the exact fraction.
    bounds = [_round(Fraction(fraction) * so_far) for so_far in accumulate((len(c) for c in classes), initial=0)]
    train, validation = [], []
    for number, members in enumerate(classes):
        shuffled = rng(seed, "hold out", number).permutation(members)
        num_held = bounds[number + 1] - bounds[number]
        validation.append(shuffled[:num_held])
        train.append(shuffled[num_held:])
    if bounds[-1] in (0, total):
        side = "training" if bounds[-1] else "validation"
        what = f"a validation fraction of {fraction:g} of {total} samples leaves none for {side}"
        raise UserError(f"{what}: choose another fraction or more data")
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(validation))


@cache
def parse_fold(text: str) -> tuple[int, int]:
    """Parse a fold as the user writes it: number, and how many folds.

    >>> parse_fold("2/5")
    (2, 5)
    """
    number, slash, folds = text.partition("/")
    if not (slash and number.isdecimal() and folds.isdecimal() and 1 <= int(number) <= int(folds) >= 2):
        raise UserError(f"fold '{text}': write its number and how many folds there are, as in 2/5")
    return int(number), int(folds)


def hold_out_fold(labels: NDArray[Any], number: int, folds: int, seed: int) -> tuple[Indices, Indices]:
    """Return sorted train and held-out indices of fold `number` of `folds`, stratified by class to within a sample."""
    if folds > len(labels):
        raise UserError(f"{folds} folds of {len(labels)} samples leave some empty: use fewer folds")
    order = [rng(seed, "folds", place).permutation(members) for place, members in enumerate(_classes(labels))]
    held = np.zeros(len(labels), bool)
    held[np.concatenate(order)[number - 1 :: folds]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _shares(num_workers: int, split: Split, weights: Sequence[float] | None) -> list[Fraction]:
    """Return each worker's share of the data; the shares sum to exactly one."""
    if num_workers < 1:
        raise UserError(f"{num_workers} workers were asked for: choose at least 1")
    if weights is None:
        return [Fraction(1, num_workers)] * num_workers
    if split.kind == "full":
        raise UserError("weights were given with split full, which gives each worker all data: use iid, or no weights")
    if len(weights) != num_workers:
        raise UserError(f"{len(weights)} weights were given for {num_workers} workers: give one per worker")
    for worker, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"worker {worker} was given weight {weight:g}: weights are positive numbers")
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _classes(labels: NDArray[Any]) -> list[Indices]:
    """Return the indices of each class that occurs, ordered by label."""
    order = np.argsort(labels, kind="stable").astype(np.int64)
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _divide(indices: Indices, shares: Sequence[Fraction]) -> list[Indices]:
    """Divide `indices` into one piece per share, each within one sample of its exact size."""
    total = sum(shares)
    return np.split(indices, [_round(len(indices) * so_far / total) for so_far in accumulate(shares[:-1])])


def _round(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


def _dirichlet(classes: list[Indices], shares: list[Fraction], split: Split, seed: int) -> list[Indices]:
    """Divide each class by its own proportions, drawn from Dirichlet(alpha x workers x share)."""
    assert split.alpha is not None
    weights = np.array([float(share) for share in shares])
    concentration = np.maximum(min(split.alpha * len(shares), _MAX_CONCENTRATION) * weights, np.finfo(float).tiny)
    pieces: list[list[Indices]] = [[] for _ in shares]
    for number, members in enumerate(classes):
        generator = rng(seed, "split dirichlet", number)
        proportions = generator.dirichlet(concentration)
        if not np.isfinite(proportions).all() or proportions.sum() <= 0:
            # The draw underflows for a tiny alpha; its limit gives each class whole to one worker.
            proportions = np.eye(len(shares))[generator.choice(len(shares), p=weights / weights.sum())]
        divided = _divide(generator.permutation(members), [Fraction(float(part)) for part in proportions])
        for shard, piece in zip(pieces, divided, strict=True):
            shard.append(piece)
    return [np.concatenate(shard) for shard in pieces]


def _remedy(split: Split, weights: Sequence[float] | None) -> str:
    remedies = ["use fewer workers"]
    if split.kind == "dirichlet":
        remedies += ["a larger alpha", "another seed"]
    if weights is not None:
        remedies.append("more similar weights")
    return " or ".join([", ".join(remedies[:-1]), remedies[-1]] if len(remedies) > 1 else remedies)
