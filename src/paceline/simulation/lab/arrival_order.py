"""Arrival order of a simulated run: which workers made each update from which batches, and which got its weights.

Recorded from the real `Server` under the simulator, so that the lab follows every policy without implementing any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.assembly.core import make_policy, make_rule, make_schedule
from paceline.assembly.work import Work
from paceline.config import RunConfig
from paceline.core.driver import Unlogged
from paceline.core.messages import Join, Reply
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.data.sampler import Batches
from paceline.interfaces import Batch, Layout
from paceline.simulation.cluster import cluster_of
from paceline.simulation.event_queue import Agenda
from paceline.simulation.simulator import Simulation
from paceline.tasks.synthetic import TimingModel

NO_WORKER = -1


@dataclass(frozen=True)
class Trace:
    """One row per update, padded with `NO_WORKER` to the maximum number of pushes and releases."""

    workers: NDArray[np.int32]  # [T, pushes]
    batches: NDArray[np.int32]  # [T, pushes]
    released: NDArray[np.int32]  # [T, releases]
    staleness: NDArray[np.int32]  # [T]: the maximum of its pushes
    lr: NDArray[np.float32]  # [T]
    num_live: NDArray[np.int32]  # [T]
    left: NDArray[np.int32]  # [number, 2]: update after which a worker had finished its work, worker
    virtual_seconds: float
    server: Server
    """The server after the simulation, with its counts of versions, samples, drops and staleness."""

    def __len__(self) -> int:
        return len(self.workers)


class _TracedServer(Server):
    """Records every update and every reply."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.rows: list[tuple[list[int], list[int], int, float, int]] = []
        self.released: list[list[int]] = [[]]
        self.left: list[tuple[int, int]] = []

    def _apply(self, workers: tuple[int, ...]) -> bool:
        staleness = max(self.version - self.members[worker].version for worker in workers)
        batches = [self.members[worker].accepted for worker in workers]
        self.rows.append((list(workers), batches, staleness, self.lr, self.num_live))
        self.released.append([])
        return super()._apply(workers)

    def _answer(self, worker: int, over: bool = False) -> Reply:
        if not over:
            self.released[-1].append(worker)
        elif self.members[worker].done:
            self.left.append((self.version - 1, worker))
        return super()._answer(worker, over)

    def without_records(self) -> Server:
        """Drop the records, which `ArrivalOrder` holds, and return the server."""
        self.rows, self.released, self.left = [], [], []
        return self


class _Counted:
    """Batches without data, with their sizes."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def batch(self, number: int) -> Batch:
        return Batch(None, None, self._batches.samples_before(number + 1) - self._batches.samples_before(number), 0)


def trace_of(config: RunConfig, work: Work, num_floats: int) -> Trace:
    """Simulate the run without computing gradients and return its arrival order."""
    num_workers = config.workers or 1
    model = TimingModel(num_floats, config.batch_size)
    servers: list[_TracedServer] = []

    def start() -> Unlogged:
        parts = (make_rule(config, Layout((), 0)), make_policy(config), work.budget, make_schedule(config))
        servers.append(_TracedServer(torch.empty(0), *parts, num_workers, nbytes=4 * num_floats))
        return Unlogged(servers[-1])

    def make_worker(worker: int, incarnation: int) -> Seat:
        return Seat(model, _Counted(work.batches(worker, config)), Join(worker, incarnation, work.quotas[worker]))

    queue = Agenda()
    Simulation(queue, cluster_of(config, num_floats), num_workers, make_worker, start).run()
    server = servers[-1]
    workers, batches, staleness, lr, live = zip(*server.rows, strict=True)
    return Trace(
        _padded(workers),
        _padded(batches),
        _padded(server.released[1:]),
        np.array(staleness, np.int32),
        np.array(lr, np.float32),
        np.array(live, np.int32),
        np.array(server.left, np.int32).reshape(-1, 2),
        queue.now,
        server.without_records(),
    )


def _padded(rows: Any) -> NDArray[np.int32]:
    """Return lists of unequal length as one array, padded with `NO_WORKER`."""
    widest = max(1, max(map(len, rows)))
    if all(len(row) == widest for row in rows):
        return np.array(rows, np.int32)
    return np.array([[*row, *[NO_WORKER] * (widest - len(row))] for row in rows], np.int32)
