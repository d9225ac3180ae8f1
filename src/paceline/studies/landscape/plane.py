"""The plane nearest to a set of weight vectors: their mean and first two principal components."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import UserError

COLUMNS_PER_SLICE = 1 << 18  # columns converted to double precision at a time
MIN_SHARE = 1e-12  # smaller shares of the variance are rounding errors


@dataclass(frozen=True)
class Plane:
    """`origin` [P] and two orthonormal `directions` [2, P]; `shares` of the variance of each principal direction."""

    origin: Tensor
    directions: Tensor
    shares: tuple[float, ...]

    def to(self, device: torch.device) -> Plane:
        """Return the plane on `device`."""
        return Plane(self.origin.to(device), self.directions.to(device), self.shares)

    def at(self, x: float, y: float) -> Tensor:  # [P]
        """Return the weights at a point of the plane."""
        return torch.add(self.origin, self.directions[0], alpha=x).add_(self.directions[1], alpha=y)

    def coordinates(self, points: Tensor) -> Tensor:  # [n, P] -> [n, 2]
        """Project weights onto the plane."""
        found = torch.zeros(len(points), 2, dtype=torch.float64)
        for part, columns in _centred(points, self.origin):
            found += part @ self.directions[:, columns].double().T
        return found

    def distances(self, points: Tensor) -> Tensor:  # [n, P] -> [n]
        """Return the distance of weights from the plane."""
        coordinates = self.coordinates(points)
        squares = torch.zeros(len(points), dtype=torch.float64)
        for part, columns in _centred(points, self.origin):
            squares += (part - coordinates @ self.directions[:, columns].double()).square().sum(1)
        return squares.sqrt()


def nearest_plane(points: Tensor) -> Plane:
    """Fit a plane to the rows of `points` [n, P] by principal components, from the n x n Gram matrix (n << P).

    With D = points - mean and D D^T v = s v, the direction is D^T v / sqrt(s) and its share of the variance s / trace.
    Each direction is signed from the first row towards the row farthest along it.
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
    if len(shares) < 2 or shares[1] < MIN_SHARE:
        raise UserError("all snapshots lie on one straight line and span no plane: keep more, from a longer run")
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
    """Yield points minus origin in double precision, one slice of columns at a time, in a fixed order."""
    for start in range(0, points.shape[1], COLUMNS_PER_SLICE):
        columns = slice(start, start + COLUMNS_PER_SLICE)
        yield points[:, columns].double() - origin[columns].double(), columns
