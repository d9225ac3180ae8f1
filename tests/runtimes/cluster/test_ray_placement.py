"""How many workers a Ray cluster holds, counted without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UserError
from paceline.runtimes.cluster.ray_placement import WorkerResources, count_places, placement

HERE, ONE = "10.0.0.1", {"node:10.0.0.1": 1.0}


@pytest.mark.parametrize(
    ("nodes", "each", "expected"),
    [
        ([{"CPU": 2.0, **ONE}], WorkerResources(), 2),
        ([{"CPU": 1.0, **ONE}], WorkerResources(), 1),
        ([{"CPU": 64.0, **ONE}], WorkerResources(4), 16),
        ([{"CPU": 3.0, **ONE}, {"CPU": 3.0}], WorkerResources(2), 2),  # four CPUs are on no node together
        ([{"CPU": 1.0, **ONE}, {"CPU": 3.0, "GPU": 2.0}], WorkerResources(1, 1.0), 2),
        ([{"CPU": 9.0, "GPU": 2.0, **ONE}], WorkerResources(1, 0.6), 2),  # a part is of one GPU, not of two
        ([{"CPU": 9.0, "GPU": 1.0, **ONE}], WorkerResources(1, 0.1), 9),
        ([{"CPU": 8.0, **ONE}], WorkerResources(1, 0.5), 0),
        ([{**ONE}, {"CPU": 8.0}], WorkerResources(), None),  # nothing for the server on its node
    ],
)
def test_places_are_counted_node_by_node(
    nodes: list[dict[str, float]], each: WorkerResources, expected: int | None
) -> None:
    assert count_places(nodes, HERE, each) == expected


@pytest.mark.parametrize("gpus", [-1.0, 1.5, 2.0, float("nan"), float("inf"), 0.33333])
def test_a_part_of_a_gpu_is_one_that_ray_can_count(gpus: float) -> None:
    with pytest.raises(
        UserError, match=r"--gpus-per-worker .*: a worker computes on one GPU or shares it; write 1, or"
    ):
        WorkerResources(1, gpus)


class FakeRay:
    """A cluster of one node that keeps what is reserved, and is full if `busy`."""

    def __init__(self, resources: dict[str, float], busy: bool = False) -> None:
        self.node, self.busy = {"Alive": True, "Resources": {**ONE, **resources}}, busy
        self.util, self.reserved, self.removed = self, [], 0

    def nodes(self) -> list[dict[str, Any]]:
        return [self.node, {"Alive": False, "Resources": {"CPU": 100.0}}]

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> FakeRay:
        self.reserved = bundles
        return self

    def wait(self, seconds: float) -> bool:
        return not self.busy

    def remove_placement_group(self, group: FakeRay) -> None:
        self.removed += 1


def test_server_and_workers_are_reserved_and_given_back() -> None:
    ray = FakeRay({"CPU": 2.0, "GPU": 1.0})
    with placement(ray, 2, WorkerResources(1, 0.5), HERE):
        assert not ray.removed
    worker = {"CPU": 0.99, "GPU": 0.5}
    assert ray.reserved == [{"CPU": 0.01, "node:10.0.0.1": 0.001}, worker, worker]
    assert ray.removed == 1


@pytest.mark.parametrize(
    ("ray", "expected"),
    [
        (
            FakeRay({"CPU": 2.0}),
            r"--workers 3 of 1 CPU each, but the Ray cluster \(nodes: 1, CPUs: 2, .* room for 2: ask",
        ),
        (FakeRay({}), r"this node \(10.0.0.1\) offers Ray no CPU.*: run the command on another node"),
        (
            FakeRay({"CPU": 4.0}, busy=True),
            "Ray found no room within 60 s for a server and 3 workers of 1 CPU, although",
        ),
    ],
)
def test_a_cluster_without_room_is_one_line(ray: FakeRay, expected: str) -> None:
    with pytest.raises(UserError, match=expected), placement(ray, 3, WorkerResources(), HERE):
        pass
    assert ray.removed == ray.busy
