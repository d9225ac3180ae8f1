"""`paceline soak`: random clusters, policies, rules and faults under the simulator; every promise is checked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paceline.core.schedules import Budget
from paceline.randomness import rng
from paceline.settings.fault_table import Fault, faults_toml, random_faults, read_faults
from paceline.settings.rules import RULES
from paceline.simulation.network import Link
from paceline.simulation.simulator import Cluster
from paceline.simulation.soak.broken import Broken
from paceline.simulation.soak.oracle import EPS
from paceline.simulation.soak.trial import Story, Trial, perform
from paceline.simulation.step_times import Distribution, StepTimes

MOST_WORKERS = 6
MOST_FAULTS = 8
TWICE = 4
PROGRESS_SECONDS = 5.0
ON_GRADIENTS = tuple(name for name, traits in RULES.items() if not traits.for_drifts)
STRATEGIES = ("async", "sync", "backup", "bounded", "allreduce")
Say = Callable[[str], None]
T = TypeVar("T")


def draw(seed: int) -> Trial:
    """The trial of a seed."""
    chance = rng(seed, "soak")
    workers = int(chance.integers(1, MOST_WORKERS + 1))
    strategy = _strategy(chance, workers)
    in_rounds = strategy.startswith(("sync", "backup", "allreduce"))
    pushes = int(chance.integers(20, 121)) // (1 if workers > 2 else 2)
    even = bool(chance.integers(2))
    budget, quotas = _budget(chance, pushes, workers, in_rounds)
    optimizer = _pick(chance, ("sgd", "momentum", "nesterov", "adam"))
    momentum = 0.25 if optimizer in ("momentum", "nesterov") else 0.0
    step = 0.5 if in_rounds else 0.5 / workers  # stale pushes add up
    lr = step * (EPS if optimizer == "adam" else 1.0 - momentum)
    cluster, horizon = _cluster(chance, strategy, workers, pushes)
    if chance.random() < 7 / 8:
        faults = random_faults(chance, workers, horizon * _pick(chance, (0.1, 0.4, 1.0)), MOST_FAULTS)
        if chance.integers(4) == 0:
            faults = tuple(replace(fault, restart_after=None) for fault in faults)
        cluster = replace(cluster, faults=_on_the_beat(faults) if chance.integers(2) else faults)
    cuts = _pick(chance, (0.0, 0.05, 0.3))
    poison = (int(chance.integers(workers)), int(chance.integers(10))) if chance.integers(16) == 0 else None
    rule = _rule(rng(seed, "soak rule"), strategy)
    trial = Trial(seed, strategy, optimizer, lr, momentum, budget, quotas, even, cuts, cluster, poison, rule)
    return _with_comings_and_goings(rng(seed, "soak members"), trial, horizon)


def _with_comings_and_goings(chance: np.random.Generator, trial: Trial, horizon: float) -> Trial:
    """Half of all trials over a star have workers who join or are drained; where the budget is shared, data moves."""
    if trial.strategy == "allreduce" or chance.integers(2):
        return trial
    elastic = not trial.budget.own and bool(chance.integers(4))
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
    """All times as multiples of half a second, so that much happens at once."""

    def beat(seconds: float | None) -> float | None:
        return None if seconds is None else max(0.5, round(2.0 * seconds) / 2.0)

    return tuple(
        replace(
            fault,
            at=round(2.0 * fault.at) / 2.0,
            lasts=(beat(fault.lasts) or 0.0) if fault.lasts else 0.0,
            restart_after=beat(fault.restart_after),
            noticed_after=beat(fault.noticed_after),
        )
        for fault in faults
    )


def _pick(chance: np.random.Generator, choices: tuple[T, ...]) -> T:
    return choices[int(chance.integers(len(choices)))]


def _strategy(chance: np.random.Generator, workers: int) -> str:
    name = _pick(chance, STRATEGIES)
    if name == "backup":
        return f"backup:{chance.integers(1, workers)}" if workers > 1 else "sync"
    return f"bounded:{chance.integers(4)}" if name == "bounded" else name


def _rule(chance: np.random.Generator, strategy: str) -> str:
    """Half of all trials have the plain rule, and those in rounds no rule that has to know whose push it is."""
    name = _pick(chance, ON_GRADIENTS) if chance.integers(2) else "plain"
    traits = RULES[name]
    text = f"{name}:{chance.integers(1, 5)}" if traits.letter else name
    in_rounds = strategy.startswith(("sync", "backup", "allreduce"))
    fits = strategy == "async" if traits.drops else not (in_rounds and traits.knows_workers)
    return text if fits else "plain"


def _budget(
    chance: np.random.Generator, pushes: int, workers: int, in_rounds: bool
) -> tuple[Budget, tuple[int | None, ...]]:
    """Samples or versions for all, or a quota for each; about so many pushes in the end."""
    kind = _pick(chance, ("shared", "steps", "own"))
    if kind == "own":
        most = max(2, 2 * pushes // workers)
        return Budget(2 * pushes, 40, own=True), tuple(int(chance.integers(1, most)) for _ in range(workers))
    steps = (max(1, pushes // workers) if in_rounds else pushes) if kind == "steps" else None
    return Budget(2 * pushes, 40, steps=steps), (None,) * workers


def _cluster(chance: np.random.Generator, strategy: str, workers: int, pushes: int) -> tuple[Cluster, float]:
    """The cluster, and about how long so many pushes take on it."""
    kind = _pick(chance, ("constant", "lognormal", "exponential", "normal"))
    means = [_pick(chance, (1.0, 1.0, 1.5, 4.0)) for _ in range(workers)]
    times = StepTimes([Distribution(kind, mean, 0.3) for mean in means], int(chance.integers(2**32)))
    link = Link(_pick(chance, (100.0, 1e6)), _pick(chance, (0.0, 0.05, 0.5))) if chance.integers(2) else None
    server_seconds = _pick(chance, (0.0, 0.0, 0.05, 0.3))
    cores = int(chance.integers(1, workers + 1)) if chance.integers(4) == 0 else None
    ring = strategy == "allreduce"
    steps = _pick(chance, (1, 1, 1, 3))
    delay = _some_delay if chance.integers(8) == 0 else None
    cluster = Cluster(
        times,
        16,
        link=link,
        ring=ring,
        steps_a_push=steps,
        server_seconds=server_seconds,
        cores=cores,
        delay=delay,
    )
    return cluster, pushes * times.mean * steps / min(workers, cores or workers)


def _some_delay(worker: int, push: int) -> float:
    return 0.5 * ((worker + push) % 3)


@dataclass(frozen=True)
class Failure:
    """A seed that broke a promise, and the shortest table of faults with which it still does."""

    seed: int
    promise: str
    text: str
    faults: tuple[Fault, ...]

    def lines(self) -> list[str]:
        """For a person: what broke, the table, and how to see it again."""
        table = faults_toml(self.faults) if self.faults else "# no fault is needed\n"
        return [
            f"seed {self.seed} breaks a promise: {self.promise}: {self.text}",
            f"the shortest table of faults that still does ({len(self.faults)} left):",
            "",
            table,
            f"again: paceline soak --seeds 1 --first {self.seed}    (add --faults FILE to try a table of your own)",
        ]


def attempt(trial: Trial) -> tuple[Story | None, Broken | None]:
    """What a trial came to, or the promise that it broke; one seed in four is told twice."""
    try:
        first = perform(trial)
        second = perform(trial) if trial.seed % TWICE == 0 else first
    except Broken as broken:
        return None, broken
    if first != second:
        return None, Broken("same", f"two runs of one seed differ: {_difference(first, second)}")
    return first, None


def _difference(one: Story, other: Story) -> str:
    for number, (first, second) in enumerate(zip(one.records, other.records, strict=False)):
        if first != second:
            return f"input {number} is {first}, then {second}"
    return f"weights {one.weights}, then {other.weights}; {len(one.records)} inputs, then {len(other.records)}"


def shortest(trial: Trial, broken: Broken) -> Failure:
    """Leave out faults, one at a time, as long as the same promise breaks: then none of the rest can be left out."""
    faults, place = list(trial.cluster.faults), 0
    while place < len(faults):
        fewer = faults[:place] + faults[place + 1 :]
        _, again = attempt(with_faults(trial, tuple(fewer)))
        if again is not None and again.promise == broken.promise:
            faults, broken, place = fewer, again, 0
        else:
            place += 1
    return Failure(trial.seed, broken.promise, broken.text, tuple(faults))


def with_faults(trial: Trial, faults: tuple[Fault, ...]) -> Trial:
    """The same trial, with other things going wrong."""
    return replace(trial, cluster=replace(trial.cluster, faults=faults))


@dataclass
class Summary:
    """What a soak has been through so far."""

    first: int
    asked: int
    began: float = field(default_factory=time.monotonic)
    seeds: int = 0
    pushes: int = 0
    updates: int = 0
    restarts: int = 0
    unfinished: int = 0
    diverged: int = 0
    elastic: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)
    optimizers: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None
    interrupted: bool = False

    def add(self, trial: Trial, story: Story) -> None:
        self.pushes += story.pushes
        self.updates += story.updates
        self.restarts += story.restarts
        self.unfinished += not story.over
        self.diverged += story.diverged
        self.elastic += trial.room is not None
        self.faults.update(fault.kind for fault in trial.cluster.faults if fault.at <= story.seconds)
        self.strategies[trial.strategy.partition(":")[0]] += 1
        self.optimizers[trial.optimizer] += 1
        self.rules[trial.rule.partition(":")[0]] += 1

    def progress(self) -> str:
        seconds = time.monotonic() - self.began
        rate = self.seeds / seconds
        left = (self.asked - self.seeds) / rate
        return f"{self.seeds} of {self.asked} seeds, {rate:.0f} a second, {left:.0f} s left"

    def lines(self) -> list[str]:
        """For a person."""
        seconds = time.monotonic() - self.began
        return [
            f"{self.seeds} seeds from {self.first} on in {seconds:.1f} s: "
            + ("every promise was kept" if self.failure is None else "a promise was broken"),
            f"{self.pushes} pushes, {self.updates} updates, {self.restarts} restarts of the server; "
            f"{self.unfinished} runs lost all their workers, {self.diverged} were ended by a NaN, "
            f"in {self.elastic} the data went to whoever was there",
            f"faults: {_counts(self.faults)}",
            f"strategies: {_counts(self.strategies)}",
            f"optimizers: {_counts(self.optimizers)}",
            f"rules: {_counts(self.rules)}",
            *([] if self.failure is None else ["", *self.failure.lines()]),
        ]

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        row = {name: value for name, value in vars(self).items() if name not in ("began", "failure")}
        row["seconds"] = round(time.monotonic() - self.began, 3)
        failure = self.failure
        row["failure"] = failure and {
            "seed": failure.seed,
            "promise": failure.promise,
            "text": failure.text,
            "faults": faults_toml(failure.faults),
        }
        return row


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {counter[name]}" for name in sorted(counter)) or "none"


def soak(seeds: int, first: int, say: Say, table: Path | None = None) -> Summary:
    """Try seed after seed until one breaks a promise; its table of faults is then made as short as it gets.

    Ctrl-C ends it early, with what was found so far.
    """
    summary = Summary(first, seeds)
    try:
        _try_seeds(summary, say, table)
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary


def _try_seeds(summary: Summary, say: Say, table: Path | None) -> None:
    next_line = summary.began + PROGRESS_SECONDS
    for seed in range(summary.first, summary.first + summary.asked):
        trial = draw(seed)
        if table is not None:
            trial = with_faults(trial, read_faults(table, trial.places))
        story, broken = attempt(trial)
        summary.seeds += 1
        if broken is not None:
            say(f"seed {seed} breaks a promise: {broken}; looking for the shortest table of faults")
            summary.failure = shortest(trial, broken)
            return
        assert story is not None
        summary.add(trial, story)
        if time.monotonic() >= next_line:
            say(summary.progress())
            next_line = time.monotonic() + PROGRESS_SECONDS
