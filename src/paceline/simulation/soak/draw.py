"""Draw a random trial from a seed: strategy, rule, codecs, averaging, budget, cluster and faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from paceline.assembly.core import make_policy
from paceline.config import RunConfig
from paceline.core.compression import Codecs, WorkerCompression
from paceline.core.messages import DataAssignment, Join
from paceline.core.optimizers import Adam, GradientTransform, Optimizer, Sgd
from paceline.core.schedules import Budget, InnerLoop, Schedule, Training
from paceline.core.worker import LocalWorker
from paceline.interfaces import Policy, Rule, State, Task
from paceline.randomness import mix64, rng
from paceline.settings.codecs import build_codec
from paceline.settings.fault_table import Fault, random_faults
from paceline.settings.features import Feature
from paceline.settings.rules import RULES, build_rule
from paceline.settings.strategies import ON_DRIFTS, ON_GRADIENTS, STRATEGIES, SYNC, on_ring, strategy_of, why_not
from paceline.simulation.network import NetworkLink
from paceline.simulation.simulator import Cluster
from paceline.simulation.soak.oracle import BETAS, EPS
from paceline.simulation.step_times import StepTimeDistribution, StepTimes
from paceline.tasks.local_sgd import LocalSteps
from paceline.tasks.synthetic import Quadratic, shard_of

MAX_WORKERS = 6
MAX_FAULTS = 8
CODECS = ("fp16", "bf16", "int8", "sign", "topk:0.25", "lowrank:1")
OUTER_LR, OUTER_MOMENTUM = 0.5, 0.25  # of strategies with an outer optimizer
RULE_NAMES = tuple(name for name, traits in RULES.items() if not traits.for_drifts)
T = TypeVar("T")
Quotas = tuple[int | None, ...]


@dataclass(frozen=True)
class Trial:
    """Everything that a seed decides."""

    seed: int
    strategy: str
    optimizer: str
    lr: float
    momentum: float
    budget: Budget
    quotas: Quotas
    even: bool
    checkpoint_chance: float  # after each input
    cluster: Cluster
    poison: tuple[int, int] | None = None  # worker and batch whose gradient holds a NaN
    rule: str = "plain"
    room: int | None = None  # maximum number of workers at once, if workers may join and leave
    path: str | None = None  # star: local steps around a server
    average: str = "none"
    codec: str | None = None
    pull_codec: str | None = None
    weighted: bool = False  # whether pushes have weights other than their samples

    @property
    def workers(self) -> int:
        return len(self.quotas)

    @property
    def max_workers(self) -> int:
        return self.room or self.workers

    def quota(self, worker: int) -> int | None:
        """Return the quota of an initial worker; a worker that joins later has none."""
        return self.quotas[worker] if worker < self.workers else None

    def make_optimizer(self) -> Optimizer:
        if self.optimizer == "adam":
            return Adam(BETAS, eps=EPS)
        return Sgd(self.momentum, nesterov=self.optimizer == "nesterov")

    @property
    def config(self) -> RunConfig:
        """The settings that rule, policy and topology depend on."""
        config = RunConfig(strategy=self.strategy, rule=self.rule, momentum=self.momentum, average=self.average)
        config = replace(config, workers=self.workers, max_workers=self.room)
        return replace(config, path=self.path, outer_momentum=self.outer_momentum)

    @property
    def outer_lr(self) -> float:
        """The learning rate of an update that is made of drifts."""
        return OUTER_LR if strategy_of(self.strategy).kind.outer is not None else 1.0

    @property
    def outer_momentum(self) -> float:
        return OUTER_MOMENTUM if strategy_of(self.strategy).kind.outer is not None else 0.0

    def make_training(self) -> Training:
        strategy = strategy_of(self.strategy)
        if not strategy.is_local:
            return Training(self.budget, Schedule(self.lr))
        return Training(self.budget, Schedule(self.outer_lr), InnerLoop(strategy.local_steps, Schedule(self.lr)))

    def make_rule(self) -> Rule:
        return build_rule(self.config, self.max_workers, self.make_optimizer, GradientTransform)

    def make_policy(self) -> Policy:
        return make_policy(self.config)

    def make_codecs(self) -> Codecs:
        built = [build_codec(name, Quadratic.layout) if name else None for name in (self.codec, self.pull_codec)]
        return Codecs(built[0], built[1], key=lambda worker: mix64(self.seed, worker))

    def make_worker(self, join: Join) -> LocalWorker:
        worker, batch = self.poison or (None, None)
        loader = Quadratic(join.worker, self.even, batch if worker == join.worker else None, self.weighted)

        def reassign(assignment: DataAssignment) -> Quadratic:
            return Quadratic(shard_of(join.worker, assignment), self.even, weighted=self.weighted)

        return LocalWorker(self._task(loader), loader, join, codecs=self.make_codecs(), reassign=reassign)

    def make_local_state(self) -> State:
        """Return the state that a worker starts with."""
        return WorkerCompression(self.make_codecs(), 0, self._task(Quadratic(0, self.even))).local_state

    def _task(self, quadratic: Quadratic) -> Task:
        return LocalSteps(quadratic, self.make_optimizer()) if strategy_of(self.strategy).is_local else quadratic


def draw(seed: int) -> Trial:
    """Draw the trial of a seed."""
    chance = rng(seed, "soak")
    workers = int(chance.integers(1, MAX_WORKERS + 1))
    strategy, path = _strategy(chance, workers), None
    local = rng(seed, "soak local steps")
    if local.integers(5) == 0:
        strategy, path = f"{_pick(local, ON_DRIFTS)}:{local.integers(1, 5)}", _pick(local, ("star", None))
    steps_per_push = strategy_of(strategy).local_steps
    in_rounds = strategy_of(strategy).in_rounds
    pushes = int(chance.integers(20, 121)) // (1 if workers > 2 else 2)
    even = bool(chance.integers(2))
    budget, quotas = _budget(chance, pushes, workers, in_rounds)
    budget = replace(budget, samples=budget.samples * steps_per_push)
    quotas = tuple(quota and quota * steps_per_push - int(local.integers(steps_per_push)) for quota in quotas)
    optimizer = _pick(chance, ("sgd", "momentum", "nesterov", "adam"))
    momentum = 0.25 if optimizer in ("momentum", "nesterov") else 0.0
    step = 0.5 if in_rounds else 0.5 / workers  # stale pushes add up
    lr = step * (EPS if optimizer == "adam" else 1.0 - momentum)
    settings = RunConfig(strategy=strategy, path=path)
    cluster, horizon = _cluster(chance, settings, workers, pushes)
    if strategy_of(strategy).is_local:
        by_speed = not why_not(settings, Feature.STEPS_BY_SPEED) and bool(local.integers(2))
        horizon *= steps_per_push / cluster.steps_per_push
        cluster = replace(cluster, steps_per_push=steps_per_push, by_speed=by_speed)
    if chance.random() < 7 / 8:
        faults = random_faults(chance, workers, horizon * _pick(chance, (0.1, 0.4, 1.0)), MAX_FAULTS)
        if chance.integers(4) == 0:
            faults = tuple(replace(fault, restart_after=None) for fault in faults)
        cluster = replace(cluster, faults=_on_the_beat(faults) if chance.integers(2) else faults)
    checkpoints = _pick(chance, (0.0, 0.05, 0.3))
    poison = (int(chance.integers(workers)), int(chance.integers(10))) if chance.integers(16) == 0 else None
    rule = _rule(rng(seed, "soak rule"), strategy)
    if rule == "compensated":
        lr /= 4  # its correction grows with the square of the gradient
    trial = Trial(seed, strategy, optimizer, lr, momentum, budget, quotas, even, checkpoints, cluster, poison, rule)
    trial = _with_codecs(rng(seed, "soak codecs"), replace(trial, path=path))
    trial = replace(trial, average=_pick(rng(seed, "soak average"), ("none", "auto", "on", "10")))
    trial = replace(trial, weighted=rng(seed, "soak weights").integers(4) == 0)
    trial = _with_membership_changes(rng(seed, "soak members"), trial, horizon)
    return _with_departures(rng(seed, "soak departures"), trial, horizon)


def _with_codecs(chance: np.random.Generator, trial: Trial) -> Trial:
    """Encode the pushes, the replies or both in a third of the trials around a server, at a lower learning rate."""
    codec, pull_codec = (_pick(chance, (None, *CODECS)) for _ in range(2))
    refused = why_not(trial.config, Feature.CODEC) or why_not(trial.config, Feature.PULL_CODEC)
    if refused or chance.integers(3):
        return trial
    return replace(trial, codec=codec, pull_codec=pull_codec, lr=trial.lr / 4)


def _with_departures(chance: np.random.Generator, trial: Trial, horizon: float) -> Trial:
    """Let most workers leave for good at about one time in an eighth of the trials: drained or killed."""
    if chance.integers(8) or trial.workers == 1:
        return trial
    kinds = ("crash",) if why_not(trial.config, Feature.DRAIN) else ("crash", "drain")
    at, stays = float(f"{chance.uniform(0.0, 0.6 * horizon):.4g}"), int(chance.integers(trial.workers))
    leaving = [worker for worker in range(trial.workers) if worker != stays and chance.integers(4)]
    events = [Fault(_pick(chance, kinds), at + int(chance.integers(2)), worker) for worker in leaving]
    return with_faults(trial, tuple(sorted((*trial.cluster.faults, *events), key=lambda fault: fault.at)))


def _with_membership_changes(chance: np.random.Generator, trial: Trial, horizon: float) -> Trial:
    """Let workers join and leave in half of all trials over a star; if the budget is shared, data is divided again."""
    if on_ring(trial.config) or chance.integers(2):
        return trial
    elastic = not trial.budget.per_worker and bool(chance.integers(4))
    room = trial.workers + int(chance.integers(4)) if elastic else None
    events = []
    for _ in range(int(chance.integers(1, 5))):
        kind = _pick(chance, ("join", "drain"))
        fresh = elastic and kind == "join" and room != trial.workers and bool(chance.integers(4))
        worker = int(chance.integers(trial.workers if fresh else 0, room or trial.workers))
        events.append(Fault(kind, float(f"{chance.uniform(0.0, 0.8 * horizon):.4g}"), worker))
    events = list(_on_the_beat(tuple(events))) if chance.integers(2) else events
    faults = sorted((*trial.cluster.faults, *events), key=lambda fault: fault.at)
    lr = trial.lr * trial.workers / (room or trial.workers)  # stale pushes add up
    return replace(with_faults(trial, tuple(faults)), room=room, lr=lr)


def _on_the_beat(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Round all times to half seconds, so that many events coincide."""

    def beat(seconds: float | None) -> float | None:
        return None if seconds is None else max(0.5, round(2.0 * seconds) / 2.0)

    def rounded(fault: Fault) -> Fault:
        at, lasts = round(2.0 * fault.at) / 2.0, beat(fault.lasts or None) or 0.0
        restart_after, noticed_after = beat(fault.restart_after), beat(fault.noticed_after)
        return replace(fault, at=at, lasts=lasts, restart_after=restart_after, noticed_after=noticed_after)

    return tuple(map(rounded, faults))


def _pick(chance: np.random.Generator, choices: tuple[T, ...]) -> T:
    return choices[int(chance.integers(len(choices)))]


def _strategy(chance: np.random.Generator, workers: int) -> str:
    name = _pick(chance, ON_GRADIENTS)
    match STRATEGIES[name].letter:
        case "B":
            return f"{name}:{chance.integers(1, workers)}" if workers > 1 else SYNC
        case "S":
            return f"{name}:{chance.integers(4)}"
    return name


def _rule(chance: np.random.Generator, strategy: str) -> str:
    """Draw a rule; half of all trials, and those whose strategy does not support it, have the plain rule."""
    if strategy_of(strategy).is_local:
        return strategy_of(strategy).kind.default_rule
    name = _pick(chance, RULE_NAMES) if chance.integers(2) else "plain"
    traits, config = RULES[name], RunConfig(strategy=strategy)
    text = f"{name}:{chance.integers(1, 5)}" if traits.letter else name
    refused = (traits.drops and why_not(config, Feature.DROPPING_RULE)) or (
        traits.knows_workers and why_not(config, Feature.WORKER_RULE)
    )
    return "plain" if refused else text


def _budget(chance: np.random.Generator, pushes: int, workers: int, in_rounds: bool) -> tuple[Budget, Quotas]:
    """Draw a shared budget of samples or steps, or a quota for each worker, of about `pushes` pushes."""
    kind = _pick(chance, ("shared", "steps", "own"))
    if kind == "own":
        quotas = tuple(int(chance.integers(1, max(2, 2 * pushes // workers))) for _ in range(workers))
        return Budget(2 * pushes, 40, per_worker=True), quotas
    steps = (max(1, pushes // workers) if in_rounds else pushes) if kind == "steps" else None
    return Budget(2 * pushes, 40, steps=steps), (None,) * workers


def _cluster(chance: np.random.Generator, config: RunConfig, workers: int, pushes: int) -> tuple[Cluster, float]:
    """Draw a cluster; also return about how many seconds `pushes` pushes take on it."""
    kind = _pick(chance, ("constant", "lognormal", "exponential", "normal"))
    means = [_pick(chance, (1.0, 1.0, 1.5, 4.0)) for _ in range(workers)]
    times = StepTimes([StepTimeDistribution(kind, mean, 0.3) for mean in means], int(chance.integers(2**32)))
    link = NetworkLink(_pick(chance, (100.0, 1e6)), _pick(chance, (0.0, 0.05, 0.5))) if chance.integers(2) else None
    server_seconds = _pick(chance, (0.0, 0.0, 0.05, 0.3))
    cores = int(chance.integers(1, workers + 1)) if chance.integers(4) == 0 else None
    ring, steps = on_ring(config), _pick(chance, (1, 1, 1, 3))
    delay = _some_delay if chance.integers(8) == 0 else None
    cluster = Cluster(
        times, 16, link=link, ring=ring, steps_per_push=steps, server_seconds=server_seconds, cores=cores, delay=delay
    )
    return cluster, pushes * times.mean * steps / min(workers, cores or workers)


def _some_delay(worker: int, push: int) -> float:
    return 0.5 * ((worker + push) % 3)


def with_faults(trial: Trial, faults: tuple[Fault, ...]) -> Trial:
    """Return the same trial with other faults."""
    return replace(trial, cluster=replace(trial.cluster, faults=faults))
