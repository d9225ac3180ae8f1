"""A run's own numbers: a float where there is one run, a tensor [runs, 1] where there are many.

Formulas are written once over both. A float costs a small model's update far less than a tensor of one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = float | Tensor


def load(kept: Tensor) -> Scalar:
    """A number of the state: [1] or [] is one run's, [runs, 1] stays where it is."""
    return float(kept.item()) if kept.dim() < 2 else kept


def keep(place: Tensor, value: Scalar) -> None:
    """Into the state."""
    if isinstance(value, Tensor):
        place.copy_(value)
    elif place.is_cuda:
        place.fill_(value)
    else:
        place.numpy()[...] = value  # the same memory, at a third of the price


def load_all(kept: Tensor) -> list[Scalar]:
    """Several numbers of the state at once: one run's row [K], or rows [runs, K] as K times [runs, 1]."""
    return list(kept.tolist()) if kept.dim() == 1 else list(torch.split(kept, 1, -1))


def keep_all(kept: Tensor, values: Sequence[Scalar]) -> None:
    """The inverse of `load_all`.

    >>> row = torch.zeros(2)
    >>> keep_all(row, [1.0, 2.0])
    >>> load_all(row)
    [1.0, 2.0]
    """
    if kept.dim() > 1:
        torch.cat([torch.as_tensor(value).to(kept.dtype) for value in values], -1, out=kept)
    elif kept.is_cuda:
        kept.copy_(torch.tensor(values, dtype=kept.dtype))
    else:
        kept.numpy()[:] = values


def at_least(value: Scalar, least: Scalar) -> Scalar:
    """The larger of the two.

    >>> at_least(0.5, 1.0), at_least(torch.tensor([[0.5], [2.0]]), 1.0).tolist()
    (1.0, [[1.0], [2.0]])
    """
    if isinstance(value, Tensor):
        return value.clamp(min=least)
    assert not isinstance(least, Tensor), "one run has plain numbers"
    return max(value, least)


def at_most(value: Scalar, most: Scalar) -> Scalar:
    """The smaller of the two.

    >>> at_most(3, 1.0), at_most(torch.tensor([[0], [3]]), torch.tensor([[1.0], [2.0]])).tolist()
    (1.0, [[0.0], [2.0]])
    """
    if isinstance(most, Tensor):
        return torch.minimum(torch.as_tensor(value).to(most.dtype), most)
    assert not isinstance(value, Tensor), "one run has plain numbers"
    return min(value, most)


def add_scaled(vector: Tensor, other: Tensor, factor: Scalar, out: Tensor | None = None) -> None:
    """vector + factor other, into `out` or in place."""
    out = vector if out is None else out
    if isinstance(factor, Tensor):
        torch.addcmul(vector, other, factor.to(vector.dtype), out=out)
    else:
        torch.add(vector, other, alpha=factor, out=out)


def scale(vector: Tensor, factor: Scalar) -> None:
    """vector *= factor"""
    vector.mul_(factor.to(vector.dtype) if isinstance(factor, Tensor) else factor)


def move_towards(vector: Tensor, other: Tensor, share: Scalar) -> None:
    """vector += share (other - vector)"""
    vector.lerp_(other, share.to(vector.dtype) if isinstance(share, Tensor) else share)
