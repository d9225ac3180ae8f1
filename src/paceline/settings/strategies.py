"""The strategies: what each one is on four axes, and what it can be combined with. Importing this imports no torch.

This is the only module that knows a strategy by its name. Other code reads the axes and the table of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from paceline.config import RunConfig, is_script
from paceline.errors import UserError
from paceline.settings.features import (
    ALONE,
    IN_OWN_LOOP,
    IN_ROUNDS,
    NEEDS_SERVER,
    NO_DRIFTS,
    ON_RING,
    ON_SERVER,
    ONE_AT_A_TIME,
    OWN_LOOP_OF_ALL,
    OWN_LOOP_STEPS,
    RING_OR_STAR,
    STEPS_INSIDE,
    Feature,
    Refusals,
)
from paceline.settings.notation import name_and_argument, whole_number


class Waiting(Enum):
    """Axis 1: which workers wait for which."""

    NONE = auto()  # there is one worker
    BARRIER = auto()  # A round closes when all workers but the backup ones have pushed
    ASYNC = auto()  # no worker waits
    BOUNDED = auto()  # stale-synchronous: a worker waits while it is more than `max_lead` steps ahead of the slowest


class PushContent(Enum):
    """Axis 2: what an update is made of. A barrier applies the mean of a round, the others one push at a time."""

    GRADIENT = auto()
    DRIFT = auto()  # how far the weights of a worker have moved in its local steps


class Topology(Enum):
    """Axis 4: which way pushes travel."""

    NONE = auto()
    STAR = auto()
    RING = auto()


class Axes(NamedTuple):
    """Three of the four axes; the fourth, local steps, is the number behind the colon."""

    waiting: Waiting
    pushed: PushContent = PushContent.GRADIENT
    topologies: tuple[Topology, ...] = (Topology.STAR,)  # those that a strategy can run on, its default first


@dataclass(frozen=True)
class StrategyKind:
    """One row of the table: the axes of a strategy and the features that it refuses."""

    text: str
    axes: Axes
    default_rule: str
    """What `--rule auto` means; `auto` itself if there is a rule to choose, because gradients are stale."""
    refuses: Refusals
    on_ring: Refusals = field(default_factory=dict)  # what it refuses beside that on a ring
    in_own_loop: Refusals = field(default_factory=dict)  # what it refuses beside that in a user's own loop
    letter: str = ""  # stands for the number behind the colon
    least: int = 1
    outer: Callable[[int], tuple[float, float]] | None = None
    """The default outer learning rate and momentum for a number of workers."""


OUTER_WARMUP = 10
"""Rounds in which the settings of an outer optimizer grow from those of a plain mean."""


def _outer_in_rounds(workers: int) -> tuple[float, float]:
    """The outer lr and momentum of `diloco`: lr / (1 - momentum) is the number of workers; from 5 on the published 7.

    A mean of n drifts goes 1/n of the way that one worker would go on the same batches; the momentum makes up for it.
    The published .7 and .9 (arXiv 2311.08105) are for 8 workers.

    >>> [_outer_in_rounds(workers) for workers in (1, 2, 4, 5, 50)]
    [(0.7, 0.3), (0.7, 0.65), (0.7, 0.825), (0.7, 0.9), (0.7, 0.9)]
    """
    return 0.7, round(1.0 - 0.7 / (workers if workers < 5 else 7), 3)


def _outer_on_arrival(workers: int) -> tuple[float, float]:
    """The outer lr and momentum of `async-local`: twice as far as a drift, in smaller steps the more workers there are.

    Every drift is one round stale, so they are lower than those of `diloco`: 10 workers diverge from about .6 on.

    >>> [_outer_on_arrival(workers) for workers in (1, 2, 4, 5, 50)]
    [(0.8, 0.2), (0.7, 0.65), (0.5, 0.75), (0.4, 0.8), (0.4, 0.8)]
    """
    lr = max(0.4, round(0.9 - 0.1 * workers, 3))
    return lr, round(1.0 - lr / min(workers, 2), 3)


STRATEGIES = {
    "classic": StrategyKind(
        "one worker, no process",
        Axes(Waiting.NONE, topologies=(Topology.NONE,)),
        "plain",
        {
            **ON_SERVER,
            **ALONE,
            Feature.SEVERAL_WORKERS: "is one worker; choose sync or async for more",
            Feature.CODEC: f"has no network whose bytes could be saved; {ONE_AT_A_TIME}",
            Feature.PULL_CODEC: f"has no network whose bytes could be saved; {ONE_AT_A_TIME}",
            Feature.ELASTIC: "is one worker; use sync, async or bounded, or leave it out",
            Feature.DRAIN: "is one worker: stop the run, or let it finish",
            Feature.SERVER: "has no server: choose sync, async, bounded:S or backup:B",
            Feature.LAUNCHER: "is one worker: leave the launcher out, or choose --strategy allreduce or async",
            Feature.FAULTS: "has no worker processes: leave out one of the two, or try it in 'paceline simulate'",
            Feature.RESTART: "trains in the process of this command, which nothing starts again: leave it out, "
            "'paceline resume' goes on after a kill",
            Feature.RESTART_WORKERS: "has no worker processes: leave it out, 'paceline resume' goes on after a kill",
            Feature.RING_PATH: "is one worker, with nobody to exchange with; use allreduce, local:H or diloco:H",
            Feature.DROPPING_RULE: "has no stale pushes: use --strategy async",
        },
    ),
    "sync": StrategyKind("replies when all have pushed", Axes(Waiting.BARRIER), "plain", {**ON_SERVER, **IN_ROUNDS}),
    "async": StrategyKind("replies at once", Axes(Waiting.ASYNC), "auto", {**ON_SERVER, **ALONE}),
    "backup": StrategyKind(
        "replies when all but B have pushed: backup:B",
        Axes(Waiting.BARRIER),
        "plain",
        {**ON_SERVER, **IN_ROUNDS},
        letter="B",
    ),
    "bounded": StrategyKind(
        "replies while within S steps of the slowest: bounded:S",
        Axes(Waiting.BOUNDED),
        "auto",
        {
            **ON_SERVER,
            **ALONE,
            Feature.DROPPING_RULE: "counts every push, and the rule drops the stale ones: use --strategy async",
        },
        letter="S",
        least=0,
    ),
    "allreduce": StrategyKind(
        "all exchange with all, in step",
        Axes(Waiting.BARRIER, topologies=(Topology.RING,)),
        "plain",
        {
            **NO_DRIFTS,
            **IN_ROUNDS,
            Feature.STAR_PATH: "is an exchange around a ring; over a star it is --strategy sync",
        },
        ON_RING,
        OWN_LOOP_OF_ALL,
    ),
    "local": StrategyKind(
        "H steps each, then the mean of their drifts: local:H",
        Axes(Waiting.BARRIER, PushContent.DRIFT, (Topology.RING, Topology.STAR)),
        "plain",
        {
            **STEPS_INSIDE,
            Feature.OUTER_OPTIMIZER: "takes the mean of drifts as it is; use diloco:H",
            Feature.GRADIENT_RULE: "takes the mean of drifts as it is: leave it out",
            Feature.DRIFT_RULE: "takes the mean of drifts as it is: leave it out",
        },
        RING_OR_STAR,
        OWN_LOOP_STEPS,
        letter="H",
    ),
    "diloco": StrategyKind(
        "H steps each, then Nesterov's momentum on the mean drift: diloco:H",
        Axes(Waiting.BARRIER, PushContent.DRIFT, (Topology.RING, Topology.STAR)),
        "plain",
        {
            **STEPS_INSIDE,
            Feature.GRADIENT_RULE: "has its outer momentum: leave it out",
            Feature.DRIFT_RULE: "has its outer momentum: leave it out",
        },
        RING_OR_STAR,
        OWN_LOOP_STEPS,
        letter="H",
        outer=_outer_in_rounds,
    ),
    "async-local": StrategyKind(
        "H steps each, each drift applied at once, momentum once a round: async-local:H",
        Axes(Waiting.ASYNC, PushContent.DRIFT),
        "delayed",
        {
            **STEPS_INSIDE,
            **ALONE,
            **NEEDS_SERVER,
            Feature.GRADIENT_RULE: "pushes drifts, and the rule is for gradients: use --rule delayed, its default",
        },
        in_own_loop=OWN_LOOP_STEPS,
        letter="H",
        outer=_outer_on_arrival,
    ),
}
CLASSIC, SYNC, ASYNC = "classic", "sync", "async"
ON_GRADIENTS = (ASYNC, SYNC, "backup", "bounded", "allreduce")
"""Strategies of several workers that push gradients. A soak seed draws from them by their place: append only."""
ON_DRIFTS = ("local", "diloco", "async-local")
"""Strategies of several workers that push the drift of local steps, likewise."""


@dataclass(frozen=True)
class Strategy:
    """How workers keep pace, as a value: a point on four axes, and the row of the table that it came from."""

    text: str  # as the user writes it: `bounded:3`
    kind: StrategyKind = field(repr=False)
    num_backup: int = 0  # how many workers a barrier does not wait for
    max_lead: int = 0  # how many steps a worker may be ahead of the slowest
    local_steps: int = 1  # axis 3: the steps that a worker makes for one push

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    @property
    def waiting(self) -> Waiting:
        return self.kind.axes.waiting

    @property
    def in_rounds(self) -> bool:
        """Whether an update is the mean of several pushes."""
        return self.waiting is Waiting.BARRIER

    @property
    def is_local(self) -> bool:
        """Whether a worker pushes the drift of its local steps."""
        return self.kind.axes.pushed is PushContent.DRIFT

    @property
    def needs_all(self) -> bool:
        """Whether training cannot go on without one of the workers."""
        return self.kind.axes.topologies == (Topology.RING,)

    @property
    def needs_no_server(self) -> bool:
        """Whether workers of built-in training exchange with each other by default; own loops have a server."""
        return self.kind.axes.topologies[0] is Topology.RING

    @property
    def is_stale(self) -> bool:
        """Whether pushes are applied one by one, to weights that may have changed since."""
        return self.waiting in (Waiting.ASYNC, Waiting.BOUNDED)

    def pushes_per_update(self, workers: int) -> int:
        """How many pushes make one update."""
        return workers - self.num_backup if self.in_rounds else 1

    def pushes_per_step(self, workers: int) -> int:
        """Over how many pushes a step is averaged: a drift that is applied at once counts for its share of a round."""
        return workers if self.is_local and not self.in_rounds else self.pushes_per_update(workers)


_NUMBERS = {"B": "num_backup", "S": "max_lead", "H": "local_steps"}
"""The field of Strategy that the number behind the colon fills, by its letter."""


@cache
def _parse(text: str) -> Strategy:
    kind = STRATEGIES.get(text)
    if kind is not None and not kind.letter:
        return Strategy(text, kind)
    name, argument = name_and_argument("strategy", text, {name: kind.letter for name, kind in STRATEGIES.items()})
    kind = STRATEGIES[name]
    number = whole_number("strategy", text, argument, kind.least)
    return Strategy(text, kind, **{_NUMBERS[kind.letter]: number})


def strategy_of(source: RunConfig | str) -> Strategy:
    """The strategy of a config or of its text, parsed once; an error with the nearest name for anything else.

    >>> strategy_of("bounded:3").max_lead
    3
    """
    return _parse(source if isinstance(source, str) else source.strategy)


def topology_of(config: RunConfig) -> Topology:
    """Which way the run's pushes travel: as `--path` says, or as the strategy does by default.

    Those of a user's own loop have no ring: they go to a server.
    """
    topologies = strategy_of(config).kind.axes.topologies
    goes_to_server = is_script(config) or (config.path == "star" and Topology.STAR in topologies)
    return Topology.STAR if goes_to_server and topologies[0] is Topology.RING else topologies[0]


def on_ring(config: RunConfig) -> bool:
    """Whether workers exchange with each other instead of with a server."""
    return topology_of(config) is Topology.RING


def on_star(config: RunConfig) -> bool:
    """Whether workers exchange with a server, so that codecs can save bytes."""
    return topology_of(config) is Topology.STAR


def moves_bytes(config: RunConfig) -> bool:
    """Whether weights and gradients travel at all: `classic` is its own server."""
    return topology_of(config) is not Topology.NONE


def in_this_process(config: RunConfig) -> bool:
    """Whether the workers need no processes of their own."""
    return not moves_bytes(config) or config.device == "cuda"


def keeps_own(config: RunConfig) -> bool:
    """Whether a worker's next push depends on its earlier ones: an optimizer with state inside local steps."""
    return strategy_of(config).is_local and (config.optimizer != "sgd" or config.momentum > 0)


def why_not(config: RunConfig, feature: Feature) -> str | None:
    """Why the run's strategy refuses a feature, and what to do; None if it allows it."""
    kind = strategy_of(config).kind
    found = {**kind.refuses, **(kind.on_ring if on_ring(config) else {})}.get(feature)
    return kind.in_own_loop.get(feature, found) if is_script(config) else found


def why_not_in_own_loop(feature: Feature) -> str | None:
    """Why a user's own loop refuses a feature under every strategy, and what to do; None if it does not."""
    return IN_OWN_LOOP.get(feature)


def require_feature(config: RunConfig, feature: Feature, asked: str = "") -> None:
    """Refuse what was asked for if the run's strategy has no such feature, with the reason from the table."""
    if is_script(config) and (why := why_not_in_own_loop(feature)) is not None:
        raise UserError(f"{asked or f'--strategy {config.strategy}'}: your own loop {why}")
    why = why_not(config, feature)
    if why is not None:
        subject = f"{asked}: strategy" if asked else "--strategy"
        raise UserError(f"{subject} {config.strategy} {why}")


def worth_comparing(workers: int, local_steps: int) -> list[str]:
    """The strategies that a plan compares on so many workers; `local:H` takes as long as `diloco:H`."""
    if workers == 1:
        return [CLASSIC]
    on_gradients = [SYNC, f"backup:{max(1, workers // 10)}", ASYNC, "bounded:3", "allreduce"]
    return [*on_gradients, f"diloco:{local_steps}", f"async-local:{local_steps}"]
