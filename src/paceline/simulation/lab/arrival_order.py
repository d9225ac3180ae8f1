"""Arrival order of a simulated run: the workers and batches of each update, and the workers that got its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.assembly.core import make_policy, make_rule, make_training
from paceline.assembly.run import make_roster
from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Disposition, Input, Join, Reply
from paceline.core.server import AppliedUpdate, Exchange, Server
from paceline.core.worker import LocalWorker
from paceline.data.sampler import Batches
from paceline.interfaces import Batch, Layout
from paceline.simulation.cluster import cluster_of
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.simulator import Simulation
from paceline.tasks.synthetic import TimingModel

NO_WORKER = -1


@dataclass(frozen=True)
class ArrivalOrder:
    """One row per update, padded with `NO_WORKER` to the maximum number of pushes and releases."""

    workers: NDArray[np.int32]  # [T, pushes]
    batches: NDArray[np.int32]  # [T, pushes]
    released: NDArray[np.int32]  # [T, releases]
    staleness: NDArray[np.int32]  # [T]: the maximum of its pushes
    lr: NDArray[np.float32]  # [T]
    num_live: NDArray[np.int32]  # [T]
    present: NDArray[np.float32]  # [T]
    left: NDArray[np.int32]  # [number, 2]: update after which a worker had finished its work, worker
    virtual_seconds: float
    server: Server  # the server after the simulation, with its counts of versions, samples, drops and staleness

    def __len__(self) -> int:
        return len(self.workers)


class _TracingDriver(BareDriver):
    """Records the updates and replies of the real server, so that the lab follows every policy without its code."""

    def __init__(self, server: Server, send: Callable[[Reply], None]) -> None:
        super().__init__(server, send)
        server.on_update = self._record
        self.rows: list[tuple[list[int], list[int], int, float, int, float]] = []
        self.released: list[list[int]] = [[]]  # by version, the workers that were sent on with its weights
        self.left: list[tuple[int, int]] = []

    def _record(self, update: AppliedUpdate) -> None:
        workers = [push.worker for push in update.pushes]
        batches = [self.server.members[worker].accepted - 1 for worker in workers]
        row = (workers, batches, max(update.staleness), update.lr, update.num_live, update.present)
        self.rows.append(row)
        self.released.append([])

    def handle(self, message: Input) -> None:
        outcome = self.server.handle(message)
        for reply in outcome.replies if outcome.disposition != Disposition.REPEATED else ():
            if not reply.finished:
                self.released[reply.version].append(reply.worker)
            elif self.server.members[reply.worker].inactive:
                self.left.append((reply.version - 1, reply.worker))
        self.answer(outcome.replies)


@dataclass(frozen=True)
class _SizesOnly:
    """Batches without data, with their sizes."""

    batches: Batches

    def batch(self, number: int) -> Batch:
        return Batch(None, None, self.batches.samples_before(number + 1) - self.batches.samples_before(number), 0)


def trace_of(config: RunConfig, work: WorkAssignment, num_floats: int) -> ArrivalOrder:
    """Simulate the run without computing gradients and return its arrival order."""
    num_workers = config.workers or 1
    model = TimingModel(num_floats, config.batch_size)
    drivers: list[_TracingDriver] = []

    def start(send: Callable[[Reply], None]) -> BareDriver:
        rule, training = make_rule(config, Layout((), 0)), make_training(config, work.budget)
        exchange = Exchange(nbytes=4 * num_floats)
        server = Server(torch.empty(0), rule, make_policy(config), training, make_roster(config), exchange)
        drivers.append(_TracingDriver(server, send))
        return drivers[-1]

    def make_worker(worker: int, incarnation: int) -> LocalWorker:
        join = Join(worker, incarnation, work.quotas[worker])
        return LocalWorker(model, _SizesOnly(work.batches(worker, config)), join)

    queue = EventQueue()
    Simulation(queue, cluster_of(config, num_floats), num_workers, make_worker, start).run()
    trace = drivers[-1]
    trace.server.on_update = None  # the trace outlives the driver
    workers, batches, staleness, lr, live, present = zip(*trace.rows, strict=True)
    padded = _padded(workers), _padded(batches), _padded(trace.released[1:])
    numbers = np.array(staleness, np.int32), np.array(lr, np.float32), np.array(live, np.int32)
    left = np.array(trace.left, np.int32).reshape(-1, 2)
    return ArrivalOrder(*padded, *numbers, np.array(present, np.float32), left, queue.now, trace.server)


def _padded(rows: Any) -> NDArray[np.int32]:
    """Return lists of unequal length as one array, padded with `NO_WORKER`."""
    widest = max(1, max(map(len, rows)))
    if all(len(row) == widest for row in rows):
        return np.array(rows, np.int32)
    return np.array([[*row, *[NO_WORKER] * (widest - len(row))] for row in rows], np.int32)
