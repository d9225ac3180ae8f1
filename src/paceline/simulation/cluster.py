"""Build the simulated cluster of a config, from stated speeds and links or from those of a real run."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.step_times import MeasuredStepTimes, read_step_times
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.settings.fault_table import Fault
from paceline.settings.notation import delays_of, seconds
from paceline.settings.strategies import moves_bytes, on_ring, strategy_of
from paceline.simulation.network import parse_link
from paceline.simulation.simulator import Cluster
from paceline.simulation.step_times import StepTimeDistribution, StepTimes, parse_factors, parse_speeds

DEFAULT_SPEED = "1s"
SWITCHING_LOSS = 0.08  # share of the cores lost to context switches: 4 LeNet5 workers on 2 cores lost about 10 %


def cluster_of(config: RunConfig, num_parameters: int, faults: tuple[Fault, ...] = ()) -> Cluster:
    """The times, links and faults of a simulation."""
    like = read_step_times(Path(config.like)) if config.like is not None else None
    link = parse_link(config.link) if config.link is not None else None
    delays = delays_of(config)

    def delay(worker: int, seq: int) -> float:
        return delays[worker].seconds(config.seed, worker, seq) if worker in delays else 0.0

    return Cluster(
        StepTimes(step_times(config, like), config.seed),
        4 * num_parameters,
        link=link,
        latency=like.latency if like is not None and moves_bytes(config) else 0.0,
        ring=on_ring(config),
        steps_per_push=strategy_of(config).local_steps,
        by_speed=config.local_steps == "speed",
        server_seconds=0.0 if on_ring(config) else _server_seconds(config, like),
        cores=config.cores if config.cores is not None or like is None or link is not None else like.cores,
        switching_loss=SWITCHING_LOSS if like is not None else 0.0,
        delay=delay if delays else None,
        faults=faults,
    )


def step_times(config: RunConfig, like: MeasuredStepTimes | None) -> list[StepTimeDistribution]:
    """One distribution of step times for each worker: as stated, or as measured times the stated factors."""
    workers = config.workers or 1
    if like is None:
        return parse_speeds(config.speeds or DEFAULT_SPEED, workers)
    factors = parse_factors(config.speeds, workers) if config.speeds is not None else [1.0] * workers
    means = [like.step_seconds * factor for factor in factors]
    return [StepTimeDistribution("measured", mean, quantiles=like.quantiles) for mean in means]


def _server_seconds(config: RunConfig, like: MeasuredStepTimes | None) -> float:
    if config.server_time is None:
        return like.server_seconds if like is not None else 0.0
    try:
        return seconds(config.server_time)
    except UserError as error:
        raise UserError(f"--server-time: {error}") from None
