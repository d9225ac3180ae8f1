"""What a run reserves of a Ray cluster: checked against its nodes at once, then reserved as a placement group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError

SERVER_CPUS = 0.01
PLACING_SECONDS = 60.0
RAY_UNITS = 10_000  # Ray counts resources in units of 0.0001


@dataclass(frozen=True)
class WorkerResources:
    """The CPUs and the part of a GPU that each worker has."""

    threads: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.gpus <= 1.0 or round(self.gpus * RAY_UNITS) != round(self.gpus * RAY_UNITS, 6):
            what = f"--gpus-per-worker {self.gpus:g}: a worker computes on one GPU or shares it"
            raise UserError(f"{what}; write 1, or a part of at most 4 decimals, as in 0.5")

    @property
    def device(self) -> str:
        """Where a worker computes."""
        return "cuda" if self.gpus else "cpu"

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for a worker. Its CPUs leave room for the server, so that N workers fit on N CPUs."""
        reserved = {"CPU": round(self.threads - SERVER_CPUS, 4)}
        return {**reserved, "GPU": self.gpus} if self.gpus else reserved

    def __str__(self) -> str:
        return f"{self.threads} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")


def count_places(nodes: Sequence[Mapping[str, float]], address: str, each: WorkerResources) -> int | None:
    """How many workers fit beside the server on nodes that do nothing else. None: not even the server does.

    `nodes` holds the resources of each node, as Ray names them. The server is on the node with this address.

    >>> here = {"CPU": 2.0, "node:10.0.0.1": 1.0}
    >>> count_places([here, {"CPU": 3.0, "GPU": 2.0}], "10.0.0.1", WorkerResources())
    5
    >>> count_places([here, {"CPU": 3.0, "GPU": 2.0}], "10.0.0.1", WorkerResources(gpus=0.5))
    3
    """
    free = [_places(node, 0.0, each) for node in nodes]
    beside = [
        sum(free) - free[i] + _places(node, SERVER_CPUS, each)
        for i, node in enumerate(nodes)
        if f"node:{address}" in node and node.get("CPU", 0.0) >= SERVER_CPUS
    ]
    return max(beside, default=None)


def _places(node: Mapping[str, float], taken: float, each: WorkerResources) -> int:
    places = _units(node.get("CPU", 0.0) - taken) // _units(each.bundle["CPU"])
    if not each.gpus:
        return places
    return min(places, int(node.get("GPU", 0.0)) * (RAY_UNITS // _units(each.gpus)))


def _units(amount: float) -> int:
    return round(amount * RAY_UNITS)


@contextlib.contextmanager
def placement(ray: Any, workers: int, each: WorkerResources, address: str) -> Iterator[Any]:
    """Reserve the server's place on this node, then one for each worker, spread over nodes. Yield the group."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    _require_places(nodes, workers, each, address)
    server = {"CPU": SERVER_CPUS, f"node:{address}": 0.001}
    group = ray.util.placement_group([server, *(each.bundle for _ in range(workers))], strategy="SPREAD")
    try:
        if not group.wait(PLACING_SECONDS):
            what = f"Ray found no room within {PLACING_SECONDS:g} s for a server and {workers} workers of {each}"
            raise UserError(f"{what}, although its nodes are large enough: see 'ray status' for what else runs there")
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _require_places(nodes: Sequence[Mapping[str, float]], workers: int, each: WorkerResources, address: str) -> None:
    places = count_places(nodes, address, each)
    if places is None:
        what = f"this node ({address}) offers Ray no CPU, and the server needs {SERVER_CPUS:g} where its folder is"
        raise UserError(f"{what}: run the command on another node, or start Ray here with --num-cpus 1")
    if places < workers:
        cpus, gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
        found = f"the Ray cluster (nodes: {len(nodes)}, CPUs: {cpus:g}, GPUs: {gpus:g}) has room for {places}"
        fewer = "--workers, --threads or --gpus-per-worker" if each.gpus else "--workers or --threads"
        raise UserError(f"--workers {workers} of {each} each, but {found}: ask for fewer {fewer}, or add nodes to it")
