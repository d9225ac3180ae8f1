"""Cells of `docs/scale.md`: one simulated strategy on one cluster, and the formulas to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.assembly.core import make_policy, make_training
from paceline.config import RunConfig
from paceline.core.driver import BareDriver
from paceline.core.messages import Input, Join, Reply
from paceline.core.optimizers import Sgd
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule
from paceline.core.server import Exchange, Roster, Server
from paceline.core.worker import LocalWorker
from paceline.randomness import rng
from paceline.settings.fault_table import Fault
from paceline.settings.strategies import strategy_of
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.network import NetworkLink, ring_seconds
from paceline.simulation.simulator import Cluster, Simulation
from paceline.simulation.step_times import StepTimeDistribution, StepTimes
from paceline.tasks.synthetic import TimingModel

PARAMETERS = 25_600_000
NBYTES = 4 * PARAMETERS
STEP_SECONDS, BATCH = 0.12, 32
SERVER_SECONDS = 0.025
LATENCY = 0.0001
LOCAL_STEPS, BOUND = 32, 3
SLOW_SHARE, SLOW_FACTOR, SPREAD = 0.05, 4.0, 0.3
CRASH_EVERY, NOTICED_AFTER, RESTART_AFTER = 3600.0, 5.0, 60.0
SEED = 0
LEAST_PUSHES, LEAST_ROUNDS, LEAST_CRASHES = 16_000, 8, 12
LEFT_OUT = 0.5
"""Share of a cell's samples that is not measured: at first all workers are in step."""
PATIENCE, LEAST_HORIZON = 3.0, 900.0
"""A cell with crashes ends after three times its duration without crashes, but not before 900 s."""

STRATEGIES = ("sync", "backup", "bounded", "async", "allreduce", "local")
WORKERS = (10, 100, 1_000, 10_000)
GBITS = (1, 10, 100)
CONDITIONS = ("even", "stragglers", "crashes")


@dataclass(frozen=True)
class Cell:
    """One strategy on one cluster."""

    strategy: str
    workers: int
    gbits: int
    condition: str = "even"

    @property
    def text(self) -> str:
        """The value for `--strategy`."""
        numbers = {"backup": num_slow(self.workers), "bounded": BOUND, "local": LOCAL_STEPS}
        return f"{self.strategy}:{numbers[self.strategy]}" if self.strategy in numbers else self.strategy

    @property
    def link(self) -> NetworkLink:
        return NetworkLink(self.gbits * 1e9 / 8, LATENCY)

    @property
    def on_ring(self) -> bool:
        return self.strategy in ("allreduce", "local")

    @property
    def steps_a_push(self) -> int:
        return strategy_of(self.text).local_steps

    @property
    def pushes(self) -> int:
        """Pushes to simulate: enough rounds and, if workers crash, enough crashes."""
        pushes = max(LEAST_PUSHES, LEAST_ROUNDS * self.workers)
        if self.condition != "crashes":
            return pushes
        rate = self.workers / round_seconds(self)
        return max(pushes, round(rate * LEAST_CRASHES * CRASH_EVERY / self.workers))


@dataclass(frozen=True)
class Found:
    """Figures of a cell, over the second half of its samples."""

    rate: float
    """Applied samples per second."""
    computing: float
    """Share of the workers' time spent on steps, including those of dropped pushes."""
    staleness: float
    dropped: float
    """Share of dropped pushes."""


def num_slow(workers: int) -> int:
    """Return the number of workers that are four times slower, which is also the number of `backup` workers."""
    return max(1, round(SLOW_SHARE * workers))


def exchange_seconds(link: NetworkLink) -> float:
    """Return the time of all weights over an otherwise idle link."""
    return NBYTES / link.bandwidth


def ideal_rate(workers: int) -> float:
    """Return the samples per second of workers that never wait."""
    return workers * BATCH / STEP_SECONDS


def star_limit(nbytes: float, link: NetworkLink, server_seconds: float) -> float:
    """Return the maximum pushes per second of one server."""
    return 1.0 / max(nbytes / link.bandwidth, server_seconds)


def workers_fed(nbytes: float, step_seconds: float, link: NetworkLink, server_seconds: float) -> float:
    """Return the number of workers beyond which the server is the bottleneck."""
    alone = step_seconds + 2 * (nbytes / link.bandwidth + link.latency) + server_seconds
    return alone * star_limit(nbytes, link, server_seconds)


def round_seconds(cell: Cell) -> float:
    """Return the seconds of one round of equal workers, by formula.

    In a star all workers push at once and share the link, so all pushes arrive together; the server handles one after
    another, then all workers pull at once. A ring takes the steps plus 2 (n - 1) messages of 1/n of the bytes.
    """
    steps = cell.steps_a_push * STEP_SECONDS
    if cell.on_ring:
        return steps + ring_seconds(cell.workers, NBYTES, cell.link)
    return steps + 2 * (cell.workers * exchange_seconds(cell.link) + LATENCY) + cell.workers * SERVER_SECONDS


def never_ends(cell: Cell) -> bool:
    """Return whether workers crash before a busy link can deliver the weights and their push."""
    busy = 2 * cell.workers * exchange_seconds(cell.link)
    return cell.condition == "crashes" and not cell.on_ring and busy > CRASH_EVERY


def step_times(cell: Cell) -> StepTimes:
    """Return every worker's step times; stragglers are spread evenly."""
    if cell.condition != "stragglers":
        return StepTimes([StepTimeDistribution("constant", STEP_SECONDS)] * cell.workers, SEED)
    usual = StepTimeDistribution("lognormal", STEP_SECONDS, SPREAD)
    slow = StepTimeDistribution("lognormal", SLOW_FACTOR * STEP_SECONDS, SPREAD)
    every = cell.workers // num_slow(cell.workers)
    return StepTimes([slow if worker % every == 0 else usual for worker in range(cell.workers)], SEED)


def crashes(cell: Cell, horizon: float) -> tuple[Fault, ...]:
    """Return crashes, one per worker and hour on average: a random worker in each interval of an hour / workers."""
    if cell.condition != "crashes":
        return ()
    generator, span = rng(SEED, "crashes", cell.workers), CRASH_EVERY / cell.workers
    number = int(horizon / span)
    max_workers, whom = generator.random(number).tolist(), generator.integers(cell.workers, size=number).tolist()
    return tuple(
        Fault("crash", (count + place) * span, worker, restart_after=RESTART_AFTER, noticed_after=NOTICED_AFTER)
        for count, (place, worker) in enumerate(zip(max_workers, whom, strict=True))
    )


class Side(BareDriver):
    """A server that calls back after a given number of samples."""

    def __init__(self, server: Server, send: Callable[[Reply], None], samples: int, look: Callable[[], Look]) -> None:
        super().__init__(server, send)
        self.begin: Look | None = None
        self._samples, self._look = samples, look

    def handle(self, message: Input) -> None:
        replies = self.server.handle(message).replies
        if self.begin is None and self.server.samples >= self._samples:
            self.begin = self._look()
        self.answer(replies)


@dataclass(frozen=True)
class Look:
    """Counts of a simulation at one moment."""

    now: float = 0.0
    samples: int = 0
    computing: float = 0.0
    staleness: Counter[int] | None = None
    dropped: int = 0
    pushes: int = 0


def simulate(cell: Cell) -> Found | None:
    """Simulate a cell; return None if it would never apply an update."""
    if never_ends(cell):
        return None
    agenda, model = EventQueue(), TimingModel(PARAMETERS, BATCH)
    samples = cell.pushes * BATCH * cell.steps_a_push
    horizon = max(LEAST_HORIZON, PATIENCE * round_seconds(cell) * cell.pushes / cell.workers)

    def look(whole: bool = True) -> Look:
        server = simulation.side.server
        begun = (agenda.now - w.step_began for w in simulation.workers if w.step_began is not None and whole)
        computing = sum(worker.computing for worker in simulation.workers) + sum(begun)
        return Look(agenda.now, server.samples, computing, Counter(server.staleness), server.dropped, server.pushes)

    sides: list[Side] = []

    def start_server(send: Callable[[Reply], None]) -> Side:
        config, budget = RunConfig(strategy=cell.text, workers=cell.workers), Budget(samples, samples)
        policy, training = make_policy(config), replace(make_training(config, budget), schedule=Schedule(0.0))
        server = Server(model.initial(), Plain(Sgd()), policy, training, Roster(cell.workers), Exchange(nbytes=NBYTES))
        sides.append(Side(server, send, round(LEFT_OUT * samples), look))
        return sides[-1]

    def stop(_: None) -> None:
        agenda.stopped = True

    cluster = Cluster(
        step_times(cell),
        NBYTES,
        link=cell.link,
        ring=cell.on_ring,
        steps_per_push=cell.steps_a_push,
        server_seconds=0.0 if cell.on_ring else SERVER_SECONDS,
        faults=crashes(cell, horizon),
    )
    simulation = Simulation(
        agenda, cluster, cell.workers, lambda worker, life: LocalWorker(model, model, Join(worker, life)), start_server
    )
    if cell.condition == "crashes":
        agenda.at(horizon, stop, None)
    simulation.run()
    side, end = sides[0], look(whole=False)
    begin = side.begin if side.begin is not None and side.begin.samples < end.samples else Look()
    return _between(begin, end, cell.workers)


def _between(begin: Look, end: Look, workers: int) -> Found:
    """Return the figures of the time between two moments."""
    seconds = end.now - begin.now
    ages = (end.staleness or Counter()) - (begin.staleness or Counter())
    return Found(
        (end.samples - begin.samples) / seconds,
        (end.computing - begin.computing) / (seconds * workers),
        sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        (end.dropped - begin.dropped) / max(1, end.pushes - begin.pushes),
    )
