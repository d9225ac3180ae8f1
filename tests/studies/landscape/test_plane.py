"""The nearest plane is what a singular value decomposition finds, and says how far points are from it."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UserError
from paceline.studies.landscape import plane as planes
from paceline.studies.landscape.plane import nearest_plane


@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_a_singular_value_decomposition_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "COLUMNS_PER_SLICE", 64)  # several parts, the last one shorter
    generator = torch.Generator().manual_seed(seed)
    stretch = torch.linspace(1.0, 3.0, 9)[:, None]
    points = torch.randn(9, 300, generator=generator) * stretch + 5.0
    plane = nearest_plane(points)
    centred = points.double() - points.double().mean(0)
    left, singular, right = torch.linalg.svd(centred, full_matrices=False)
    shares = singular.square() / singular.square().sum()
    torch.testing.assert_close(torch.tensor(plane.shares), shares.float(), rtol=1e-5, atol=1e-7)
    for number in (0, 1):
        assert abs(float(plane.directions[number].double() @ right[number])) == pytest.approx(1.0, abs=1e-5)
    places = plane.coordinates(points)
    torch.testing.assert_close(places.abs(), (left[:, :2] * singular[:2]).abs(), rtol=1e-4, atol=1e-4)
    beside = centred - (centred @ right[:2].T) @ right[:2]
    torch.testing.assert_close(plane.distances(points), beside.norm(dim=1), rtol=1e-4, atol=1e-4)


def test_directions_point_from_the_first_snapshot_to_the_farthest() -> None:
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(6, 40, generator=generator)
    plane = nearest_plane(points)
    rises = plane.coordinates(points) - plane.coordinates(points)[0]
    assert (rises.amax(0) >= -rises.amin(0)).all()
    mirrored = nearest_plane(-points)
    torch.testing.assert_close(mirrored.coordinates(-points), plane.coordinates(points))


def test_points_of_the_plane_come_back() -> None:
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(2, 50, generator=generator)
    flat = torch.rand(7, 2, generator=generator) @ points + 1.0
    plane = nearest_plane(flat)
    assert sum(plane.shares[:2]) == pytest.approx(1.0)
    for place, point in zip(plane.coordinates(flat).tolist(), flat, strict=True):
        torch.testing.assert_close(plane.at(*place), point, rtol=1e-5, atol=1e-5)
    assert float(plane.distances(flat).max()) < 1e-5


@pytest.mark.parametrize(("points", "said"), [(torch.ones(4, 5), "same point"), (torch.eye(4)[:2], "straight line")])
def test_what_makes_no_plane_is_one_clear_line(points: torch.Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said):
        nearest_plane(points)
