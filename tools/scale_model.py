"""Cells of `docs/scale.md`: one strategy on one cluster, simulated, beside what can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from paceline.assembly.core import make_inside, make_policy
from paceline.config import RunConfig
from paceline.core.driver import Unlogged
from paceline.core.messages import Input, Join, Reply
from paceline.core.optimizers import Sgd
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.randomness import rng
from paceline.settings.fault_table import Fault
from paceline.settings.strategies import parse_strategy
from paceline.simulation.event_queue import Agenda
from paceline.simulation.network import Link, ring_seconds
from paceline.simulation.simulator import Cluster, Simulation
from paceline.simulation.step_times import Distribution, StepTimes
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
"""The share of a cell's samples before the clock is read: everybody starts at once, which soon blurs."""
PATIENCE, LEAST_HORIZON = 3.0, 900.0
"""A cell with crashes is ended after so many times what it takes without, but not before so many seconds."""

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
        """As `--strategy` takes it."""
        numbers = {"backup": num_slow(self.workers), "bounded": BOUND, "local": LOCAL_STEPS}
        return f"{self.strategy}:{numbers[self.strategy]}" if self.strategy in numbers else self.strategy

    @property
    def link(self) -> Link:
        return Link(self.gbits * 1e9 / 8, LATENCY)

    @property
    def on_ring(self) -> bool:
        return self.strategy in ("allreduce", "local")

    @property
    def steps_a_push(self) -> int:
        return parse_strategy(self.text).local_steps

    @property
    def pushes(self) -> int:
        """How many the simulation makes: enough rounds, and where there are crashes, enough of them."""
        pushes = max(LEAST_PUSHES, LEAST_ROUNDS * self.workers)
        if self.condition != "crashes":
            return pushes
        rate = self.workers / round_seconds(self)
        return max(pushes, round(rate * LEAST_CRASHES * CRASH_EVERY / self.workers))


@dataclass(frozen=True)
class Found:
    """What a cell came to, over the second half of its samples."""

    rate: float
    """Samples applied a second."""
    computing: float
    """Share of all workers' time that went into steps, those of dropped pushes included."""
    staleness: float
    dropped: float
    """Share of pushes."""


def num_slow(workers: int) -> int:
    """Workers that are four times slower among so many; `backup` is given as many to spare."""
    return max(1, round(SLOW_SHARE * workers))


def exchange_seconds(link: Link) -> float:
    """All weights once over a link that nobody else uses."""
    return NBYTES / link.bandwidth


def ideal_rate(workers: int) -> float:
    """Samples a second of workers that never wait."""
    return workers * BATCH / STEP_SECONDS


def star_limit(nbytes: float, link: Link, server_seconds: float) -> float:
    """Pushes a second that one server can take, however many workers there are."""
    return 1.0 / max(nbytes / link.bandwidth, server_seconds)


def workers_fed(nbytes: float, step_seconds: float, link: Link, server_seconds: float) -> float:
    """Workers beyond which a star's server is the bottleneck."""
    alone = step_seconds + 2 * (nbytes / link.bandwidth + link.latency) + server_seconds
    return alone * star_limit(nbytes, link, server_seconds)


def round_seconds(cell: Cell) -> float:
    """One round of workers that are all alike, worked out by hand.

    In a star all push at once and share the link, so all arrive together; the server takes one after another, then
    all pull at once. Around a ring it is the steps and 2 (n - 1) messages of an n-th of the bytes.
    """
    steps = cell.steps_a_push * STEP_SECONDS
    if cell.on_ring:
        return steps + ring_seconds(cell.workers, NBYTES, cell.link)
    return steps + 2 * (cell.workers * exchange_seconds(cell.link) + LATENCY) + cell.workers * SERVER_SECONDS


def never_ends(cell: Cell) -> bool:
    """Whether workers crash sooner than a busy link brings them the weights and takes their push."""
    busy = 2 * cell.workers * exchange_seconds(cell.link)
    return cell.condition == "crashes" and not cell.on_ring and busy > CRASH_EVERY


def step_times(cell: Cell) -> StepTimes:
    """Every worker's distribution; of stragglers, every so many-th is slow."""
    if cell.condition != "stragglers":
        return StepTimes([Distribution("constant", STEP_SECONDS)] * cell.workers, SEED)
    usual = Distribution("lognormal", STEP_SECONDS, SPREAD)
    slow = Distribution("lognormal", SLOW_FACTOR * STEP_SECONDS, SPREAD)
    every = cell.workers // num_slow(cell.workers)
    return StepTimes([slow if worker % every == 0 else usual for worker in range(cell.workers)], SEED)


def crashes(cell: Cell, horizon: float) -> tuple[Fault, ...]:
    """Each worker crashes every hour on average: one of them, somewhere, in each span of an hour / workers."""
    if cell.condition != "crashes":
        return ()
    generator, span = rng(SEED, "crashes", cell.workers), CRASH_EVERY / cell.workers
    number = int(horizon / span)
    places, whom = generator.random(number).tolist(), generator.integers(cell.workers, size=number).tolist()
    return tuple(
        Fault("crash", (count + place) * span, worker, restart_after=RESTART_AFTER, noticed_after=NOTICED_AFTER)
        for count, (place, worker) in enumerate(zip(places, whom, strict=True))
    )


class Side(Unlogged):
    """Looks around once so many samples are applied."""

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
    """Where a simulation stands."""

    now: float = 0.0
    samples: int = 0
    computing: float = 0.0
    staleness: Counter[int] | None = None
    dropped: int = 0
    pushes: int = 0


def simulate(cell: Cell) -> Found | None:
    """Run a cell; None where nothing would ever be applied."""
    if never_ends(cell):
        return None
    agenda, model = Agenda(), TimingModel(PARAMETERS, BATCH)
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
        policy, inside = make_policy(config), make_inside(config)
        server = Server(
            model.initial(), Plain(Sgd()), policy, budget, Schedule(0.0), cell.workers, nbytes=NBYTES, inside=inside
        )
        sides.append(Side(server, send, round(LEFT_OUT * samples), look))
        return sides[-1]

    def stop(_: None) -> None:
        agenda.stopped = True

    cluster = Cluster(
        step_times(cell),
        NBYTES,
        link=cell.link,
        ring=cell.on_ring,
        steps_a_push=cell.steps_a_push,
        server_seconds=0.0 if cell.on_ring else SERVER_SECONDS,
        faults=crashes(cell, horizon),
    )
    simulation = Simulation(
        agenda, cluster, cell.workers, lambda worker, life: Seat(model, model, Join(worker, life)), start_server
    )
    if cell.condition == "crashes":
        agenda.at(horizon, stop, None)
    simulation.run()
    side, end = sides[0], look(whole=False)
    begin = side.begin if side.begin is not None and side.begin.samples < end.samples else Look()
    return _between(begin, end, cell.workers)


def _between(begin: Look, end: Look, workers: int) -> Found:
    """From one look to the other."""
    seconds = end.now - begin.now
    ages = (end.staleness or Counter()) - (begin.staleness or Counter())
    return Found(
        (end.samples - begin.samples) / seconds,
        (end.computing - begin.computing) / (seconds * workers),
        sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        (end.dropped - begin.dropped) / max(1, end.pushes - begin.pushes),
    )
