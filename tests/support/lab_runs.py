"""Runs for tests of the lab: as rows of a batch, and as the simulator computes them."""

from __future__ import annotations

from collections.abc import Callable

from paceline.assembly.run import make_server, make_worker, work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Join, Reply
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.data.datasets import Dataset
from paceline.simulation.cluster import cluster_of
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.lab.arrival_order import trace_of
from paceline.simulation.lab.batch import LabRun
from paceline.simulation.lab.inputs import feed_of
from paceline.simulation.simulator import Simulation


def simulated_server(config: RunConfig, dataset: Dataset) -> Server:
    """What the pure server and workers come to under the simulator."""
    task = make_task(config, dataset)
    work = work_of(task, config)
    sides: list[BareDriver] = []

    def start(send: Callable[[Reply], None]) -> BareDriver:
        sides.append(BareDriver(make_server(config, task, work), send))
        return sides[-1]

    def come(worker: int, incarnation: int) -> LocalWorker:
        return make_worker(config, make_task(config, dataset), work, Join(worker, incarnation, work.quotas[worker]))

    cluster = cluster_of(config, task.layout.size)
    Simulation(EventQueue(), cluster, config.workers or 1, come, start).run()
    return sides[-1].server


def row_of(config: RunConfig, dataset: Dataset) -> LabRun:
    task = make_task(config, dataset)
    work = work_of(task, config)
    trace = trace_of(config, work, task.layout.size)
    return LabRun(config, trace, feed_of(trace, work, config), task.initial(), task.layout)


def silent(text: str, share: float) -> None:
    pass
