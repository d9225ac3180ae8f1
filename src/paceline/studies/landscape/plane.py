"""The plane that lies nearest to some weights: their mean and their two principal directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import UserError

PART = 1 << 18
"""Weights taken at once in double precision."""
NOTHING = 1e-12
"""A share of the variance below this is rounding."""


@dataclass(frozen=True)
class Plane:
    """`origin` [P] and two orthonormal `directions` [2, P]; `shares` of the variance of each principal direction."""

    origin: Tensor
    directions: Tensor
    shares: tuple[float, ...]

    def to(self, device: torch.device) -> Plane:
        """The same plane, on `device`."""
        return Plane(self.origin.to(device), self.directions.to(device), self.shares)

    def at(self, x: float, y: float) -> Tensor:  # [P]
        """The weights at a place of the plane."""
        return torch.add(self.origin, self.directions[0], alpha=x).add_(self.directions[1], alpha=y)

    def coordinates(self, points: Tensor) -> Tensor:  # [n, P] -> [n, 2]
        """Where weights lie when seen from straight above."""
        found = torch.zeros(len(points), 2, dtype=torch.float64)
        for part, columns in _centred(points, self.origin):
            found += part @ self.directions[:, columns].double().T
        return found

    def distances(self, points: Tensor) -> Tensor:  # [n, P] -> [n]
        """How far above the plane they are."""
        coordinates = self.coordinates(points)
        squares = torch.zeros(len(points), dtype=torch.float64)
        for part, columns in _centred(points, self.origin):
            squares += (part - coordinates @ self.directions[:, columns].double()).square().sum(1)
        return squares.sqrt()


def nearest_plane(points: Tensor) -> Plane:
    """Principal components of the rows of `points` [n, P], n far below P: from the n x n Gram matrix.

    With D = points - mean and D D^T v = s v, the direction is D^T v / sqrt(s) and its share of the variance s / trace.
    Each direction points the way from the first row to the row that is farthest along it.
    """
    origin = points.mean(0, dtype=torch.float64).to(points.dtype)
    gram = torch.zeros(len(points), len(points), dtype=torch.float64)
    for part, _ in _centred(points, origin):
        gram += part @ part.T
    values, vectors = (found.flip(-1) for found in torch.linalg.eigh(gram))
    whole = float(values.sum())
    if whole <= 0.0:
        raise UserError("all snapshots are the same point: train longer, or with another --lr")
    shares = tuple(max(0.0, value) / whole for value in values.tolist())
    if len(shares) < 2 or shares[1] < NOTHING:
        raise UserError("all snapshots lie on one straight line, which makes no plane: keep more, from a longer run")
    columns = vectors[:, :2] / values[:2].sqrt()
    columns = columns * _signs(columns - columns[0])
    directions = torch.empty(2, points.shape[1], dtype=points.dtype)
    for part, where in _centred(points, origin):
        directions[:, where] = (columns.T @ part).to(points.dtype)
    return Plane(origin, directions, shares)


def _signs(rises: Tensor) -> Tensor:  # [n, 2] -> [2]
    farthest = rises.abs().argmax(0, keepdim=True)
    return rises.gather(0, farthest).squeeze(0).sign()


def _centred(points: Tensor, origin: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Points minus origin in double precision, some columns at a time, always in the same order."""
    for start in range(0, points.shape[1], PART):
        columns = slice(start, start + PART)
        yield points[:, columns].double() - origin[columns].double(), columns
