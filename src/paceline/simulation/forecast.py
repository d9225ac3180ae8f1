"""Forecast how fast a strategy trains on a cluster: simulate times only, without a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.assembly.efficiency import num_batches, statistical_efficiency
from paceline.assembly.run import timing_server
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Join, Reply
from paceline.core.schedules import Budget
from paceline.core.worker import LocalWorker
from paceline.interfaces import Layout
from paceline.runs.result import staleness_summary
from paceline.settings.resolve import lr_scale
from paceline.settings.strategies import moves_bytes, on_ring, strategy_of
from paceline.simulation.cluster import cluster_of
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.simulator import Simulation
from paceline.tasks.synthetic import TimingModel

PUSHES_A_WORKER = 40
MIN_PUSHES = 400


@dataclass(frozen=True)
class Forecast:
    """The speed, efficiency and staleness of one strategy on one number of workers."""

    strategy: str
    lr_scale: float
    workers: int
    samples_per_second: float
    efficiency: float  # the share of these samples that count: `statistical_efficiency`
    useful_per_second: float
    staleness: float
    staleness_p95: float
    computing: float
    bytes_per_second: float


def forecast(config: RunConfig, layout: Layout, samples: float | None = None) -> Forecast:
    """Simulate the cluster of `config` for about 40 pushes of each worker, of a run over so many samples."""
    workers = config.workers or 1
    pushes = max(MIN_PUSHES, PUSHES_A_WORKER * workers)
    updates = -(-pushes // strategy_of(config).pushes_per_update(workers))
    model = TimingModel(layout.size, config.batch_size)
    budget = Budget(1, 1, steps=updates)
    config = replace(config, lr=config.lr or 1.0)
    queue, cluster = EventQueue(), cluster_of(config, layout.size)

    def start(send: Callable[[Reply], None]) -> BareDriver:
        return BareDriver(timing_server(config, layout, budget), send)

    simulation = Simulation(queue, cluster, workers, lambda w, i: LocalWorker(model, model, Join(w, i)), start)
    simulation.run()
    server, elapsed = simulation.side.server, queue.now
    staleness = staleness_summary(server.staleness)
    moved = server.bytes_pushed + server.bytes_pulled if moves_bytes(config) else 0
    if on_ring(config):
        moved = server.nbytes * 2 * (workers - 1) * server.version
    computing = sum(worker.computing for worker in simulation.workers) / (workers * elapsed)
    speed = server.samples / elapsed
    efficiency = statistical_efficiency(config, num_batches(config, samples))
    rates = speed, efficiency, speed * efficiency
    stale = staleness["mean"], staleness["p95"]
    return Forecast(config.strategy, lr_scale(config), workers, *rates, *stale, computing, moved / elapsed)
