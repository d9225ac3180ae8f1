"""`paceline soak`: simulate random clusters, strategies, rules and faults, and check every invariant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.settings.codecs import codec_of
from paceline.settings.fault_table import Fault, faults_toml, read_faults
from paceline.settings.rules import average_horizon, rule_of
from paceline.settings.strategies import strategy_of
from paceline.simulation.soak.draw import Trial, draw, with_faults
from paceline.simulation.soak.trial import TrialRecord, perform
from paceline.simulation.soak.violation import InvariantViolation
from paceline.system.terminal import seconds_text

REPEATED = 4
PROGRESS_SECONDS = 5.0
COUNTED = ("faults", "strategies", "optimizers", "rules", "codecs")


@dataclass(frozen=True)
class FailedSeed:
    """A seed that broke a promise, and the shortest table of faults that still breaks it."""

    seed: int
    promise: str
    text: str
    faults: tuple[Fault, ...]

    def lines(self) -> list[str]:
        """Return the broken promise, the fault table, and the command that reproduces it."""
        return [
            f"seed {self.seed} breaks a promise: {self.promise}: {self.text}",
            f"the shortest table of faults that still does ({len(self.faults)} left):",
            "",
            faults_toml(self.faults) if self.faults else "# no fault is needed\n",
            f"again: paceline soak --seeds 1 --first {self.seed}    (add --faults FILE to try a table of your own)",
        ]


def attempt(trial: Trial) -> tuple[TrialRecord | None, InvariantViolation | None]:
    """Return the outcome of a trial, or the promise that it broke; one seed in four runs twice, to compare."""
    try:
        first = perform(trial)
        second = perform(trial) if trial.seed % REPEATED == 0 else first
    except InvariantViolation as broken:
        return None, broken
    if first != second:
        return None, InvariantViolation("same", f"two runs of one seed differ: {_difference(first, second)}")
    return first, None


def _difference(one: TrialRecord, other: TrialRecord) -> str:
    for number, (first, second) in enumerate(zip(one.records, other.records, strict=False)):
        if first != second:
            return f"input {number} is {first}, then {second}"
    return f"weights {one.weights}, then {other.weights}; {len(one.records)} inputs, then {len(other.records)}"


def shortest(trial: Trial, broken: InvariantViolation) -> FailedSeed:
    """Remove faults one at a time while the same promise breaks, until none can be removed."""
    faults, place = list(trial.cluster.faults), 0
    while place < len(faults):
        fewer = faults[:place] + faults[place + 1 :]
        _, again = attempt(with_faults(trial, tuple(fewer)))
        if again is not None and again.promise == broken.promise:
            faults, broken, place = fewer, again, 0
        else:
            place += 1
    return FailedSeed(trial.seed, broken.promise, broken.text, tuple(faults))


@dataclass
class SoakSummary:
    """Counts of a soak so far."""

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
    averaged: int = 0
    dropped: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)
    optimizers: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    codecs: Counter[str] = field(default_factory=Counter)
    failure: FailedSeed | None = None
    interrupted: bool = False

    def add(self, trial: Trial, record: TrialRecord) -> None:
        self.pushes += record.pushes
        self.updates += record.updates
        self.restarts += record.restarts
        self.unfinished += not record.finished
        self.diverged += record.diverged
        self.elastic += trial.room is not None
        self.faults.update(fault.kind for fault in trial.cluster.faults if fault.at <= record.seconds)
        self.strategies[strategy_of(trial.strategy).name] += 1
        self.optimizers[trial.optimizer] += 1
        self.rules[rule_of(trial.rule).name] += 1
        self.codecs.update(codec_of(codec).name for codec in (trial.codec, trial.pull_codec) if codec is not None)
        self.averaged += average_horizon(trial.config) is not None
        self.dropped += record.dropped

    def progress(self) -> str:
        rate = self.seeds / (time.monotonic() - self.began)
        left = (self.asked - self.seeds) / rate
        return f"{self.seeds} of {self.asked} seeds, {rate:.0f} a second, {seconds_text(left)} left"

    def lines(self) -> list[str]:
        """Return the summary as text."""
        seconds = time.monotonic() - self.began
        return [
            f"{self.seeds} seeds from {self.first} on in {seconds_text(seconds)}: "
            + ("every promise was kept" if self.failure is None else "a promise was broken"),
            f"{self.pushes} pushes, {self.updates} updates, {self.restarts} restarts of the server; "
            f"{self.unfinished} runs lost all their workers, {self.diverged} were ended by a NaN, "
            f"in {self.elastic} the data was divided again; {self.dropped} pushes were dropped, "
            f"{self.averaged} runs averaged their weights",
            *(f"{name}: {_counts(getattr(self, name))}" for name in COUNTED),
            *([] if self.failure is None else ["", *self.failure.lines()]),
        ]

    def row(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        row = {name: value for name, value in vars(self).items() if name not in ("began", "failure")}
        row["seconds"] = round(time.monotonic() - self.began, 3)
        row["failure"] = self.failure and {**vars(self.failure), "faults": faults_toml(self.failure.faults)}
        return row


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {counter[name]}" for name in sorted(counter)) or "none"


def soak(seeds: int, first: int, say: Callable[[str], None], table: Path | None = None) -> SoakSummary:
    """Try seeds until one breaks a promise, then shorten its fault table; Ctrl-C ends the soak early."""
    summary = SoakSummary(first, seeds)
    next_line = summary.began + PROGRESS_SECONDS
    try:
        for seed in range(first, first + seeds):
            trial = draw(seed)
            if table is not None:
                trial = with_faults(trial, read_faults(table, trial.max_workers))
            record, broken = attempt(trial)
            summary.seeds += 1
            if broken is not None:
                say(f"seed {seed} breaks a promise: {broken}; looking for the shortest table of faults")
                summary.failure = shortest(trial, broken)
                break
            assert record is not None
            summary.add(trial, record)
            if time.monotonic() >= next_line:
                say(summary.progress())
                next_line = time.monotonic() + PROGRESS_SECONDS
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary
