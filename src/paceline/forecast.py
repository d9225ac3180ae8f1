"""How fast a cluster would be: a simulation of times alone, without a run folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.assemble import (
    make_inside,
    make_policy,
    make_rule,
    make_schedule,
    on_ring,
    parse_strategy,
    pushes_per_update,
)
from paceline.clusters import cluster_of
from paceline.config import RunConfig
from paceline.core.messages import Join
from paceline.core.schedules import Budget
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.runs.result import staleness_summary
from paceline.runtimes.agenda import Agenda
from paceline.runtimes.simulated import Simulation
from paceline.runtimes.unlogged import Unlogged
from paceline.tasks.timing import TimingModel

PUSHES_A_WORKER = 40
FEWEST_PUSHES = 400


@dataclass(frozen=True)
class Forecast:
    """What one strategy on one number of workers comes to."""

    strategy: str
    workers: int
    samples_per_second: float
    staleness: float
    staleness_p95: float
    computing: float
    bytes_per_second: float


def forecast(config: RunConfig, num_parameters: int) -> Forecast:
    """Simulate `config` (its strategy, workers, speeds, links) for some tens of pushes a worker."""
    workers, strategy = config.workers or 1, parse_strategy(config.strategy)
    pushes = max(FEWEST_PUSHES, PUSHES_A_WORKER * workers)
    updates = -(-pushes // pushes_per_update(strategy, workers))
    model = TimingModel(num_parameters, config.batch_size)
    budget = Budget(1, 1, steps=updates)
    config = replace(config, lr=config.lr or 1.0)

    def start() -> Unlogged:
        rule, policy = make_rule(config, model.layout), make_policy(config)
        schedule, inside = make_schedule(config), make_inside(config)
        return Unlogged(Server(model.initial(), rule, policy, budget, schedule, workers, inside))

    agenda = Agenda()
    simulation = Simulation(
        agenda, cluster_of(config, num_parameters), workers, lambda w, i: Seat(model, model, Join(w, i)), start
    )
    simulation.run()
    server, ages = simulation.side.server, staleness_summary(simulation.side.server.staleness)
    moved = 4 * num_parameters * (server.pushes + server.replies)
    if on_ring(config):
        moved = 4 * num_parameters * 2 * (workers - 1) * server.version
    return Forecast(
        config.strategy,
        workers,
        server.samples / agenda.now,
        ages["mean"],
        ages["p95"],
        sum(worker.computing for worker in simulation.workers) / (workers * agenda.now),
        moved / agenda.now,
    )
