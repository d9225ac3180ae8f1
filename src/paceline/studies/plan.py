"""`paceline plan`: measure or read step times, simulate every strategy and worker count, recommend one."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.assembly.run import timing_layout
from paceline.config import SIMULATED_ONLY, RunConfig
from paceline.errors import UserError
from paceline.launch import train
from paceline.reports.console import Console
from paceline.reports.tables import Column, fit_table
from paceline.settings.ranks import rank_here
from paceline.settings.resolve import resolve
from paceline.settings.strategies import ASYNC, on_star, strategy_of, worth_comparing
from paceline.simulation.cluster import cluster_of
from paceline.simulation.forecast import Forecast, forecast
from paceline.system.cpu import cores
from paceline.system.terminal import UNLIMITED_WIDTH, fold

STALE_LOCAL_THRESHOLD = 1.2
"""A strategy with both local steps and staleness must be this many times faster than any other."""
PROBE_STEPS, PROBE_SECONDS = 120, 4.0
LOCAL_STEPS = 16
SPEED_THRESHOLD = 0.9  # prefer fewer workers, and no staleness, at or above this share of the highest speed


@dataclass(frozen=True)
class Plan:
    """All forecasts, the recommended one, and the reason."""

    forecasts: list[Forecast]
    choice: Forecast
    reason: str


def probe(config: RunConfig, console: Console, folder: Path) -> Path:
    """Train for a few seconds on two processes and return the run's folder."""
    imagined: dict[str, Any] = {name: None for name in SIMULATED_ONLY if name != "timing_only"}
    trial = dataclasses.replace(config, **imagined, strategy=ASYNC, workers=2, threads=1, epoch_mode="shared")
    steps = PROBE_STEPS
    for name in ("short", "long"):
        run, result = train(dataclasses.replace(trial, steps=steps, name=name, runs=str(folder)), console, rank_here())
        if result["train_seconds"] >= PROBE_SECONDS / 2:
            break
        steps = round(steps * PROBE_SECONDS / max(result["train_seconds"], 0.01))
    return run.path


def sizes(config: RunConfig) -> list[int]:
    """Return worker counts, doubling up to --workers; by default up to twice the cores, or 32 with --link."""
    most = config.workers or (32 if config.link is not None else 2 * (config.cores or cores()))
    found = [1]
    while 2 * found[-1] < most:
        found.append(2 * found[-1])
    return sorted({*found, most})


def make_plan(config: RunConfig, console: Console) -> Plan:
    """Probe this machine if no step times are given, simulate every candidate, and choose one."""
    if config.speeds is not None and ("*" in config.speeds or ("," in config.speeds and ":" not in config.speeds)):
        found = f"--speeds '{config.speeds}': a plan tries several numbers of workers"
        raise UserError(f"{found}; give one speed for all, as in 30ms")
    cluster_of(RunConfig(link=config.link, server_time=config.server_time), num_parameters=0)  # before the probe
    if config.speeds is not None or config.like is not None:
        return _simulate_all(config, console)
    with tempfile.TemporaryDirectory() as temporary:
        console.note("probing this machine with two workers for a few seconds")
        return _simulate_all(dataclasses.replace(config, like=str(probe(config, console, Path(temporary)))), console)


def _simulate_all(config: RunConfig, console: Console) -> Plan:
    if config.task is not None and config.parameters is None:
        raise UserError("a plan for a custom task needs its size: add --parameters, as in --parameters 25.6M")
    layout = timing_layout(config)
    cells = [(workers, strategy) for workers in sizes(config) for strategy in worth_comparing(workers, LOCAL_STEPS)]
    found = []
    for number, (workers, strategy) in enumerate(cells):
        cell = dataclasses.replace(config, workers=workers, strategy=strategy, shard_weights=None, path=None)
        cell = dataclasses.replace(cell, local_steps=None, outer_lr=None, outer_momentum=None, outer_warmup=None)
        if not on_star(cell):
            cell = dataclasses.replace(cell, codec=None, pull_codec=None)
        found.append(forecast(resolve(cell), layout))
        console.report({"kind": "working", "text": f"simulated {number + 1} of {len(cells)}"})
    return choose(found)


def choose(found: list[Forecast]) -> Plan:
    """Choose the fewest workers near the highest speed; then prefer an exchange every step, then no staleness.

    Stale drifts of local steps cost the most accuracy, so they must be clearly faster (`STALE_LOCAL_THRESHOLD`).
    """
    top = max(one.samples_per_second for one in found)
    prudent = [one for one in found if not (one.staleness and strategy_of(one.strategy).is_local)]
    candidates = prudent if any(STALE_LOCAL_THRESHOLD * one.samples_per_second >= top for one in prudent) else found
    fastest = max(candidates, key=lambda one: one.samples_per_second)
    enough = SPEED_THRESHOLD * fastest.samples_per_second
    workers = min(one.workers for one in candidates if one.samples_per_second >= enough)
    smallest = [one for one in candidates if one.workers == workers and one.samples_per_second >= enough]
    every_step = [one for one in smallest if not strategy_of(one.strategy).is_local]
    even = [one for one in every_step or smallest if not one.staleness]
    choice = max(even or every_step or smallest, key=lambda one: one.samples_per_second)
    return Plan(found, choice, _reason(choice, fastest))


def _reason(choice: Forecast, fastest: Forecast) -> str:
    share = choice.samples_per_second / fastest.samples_per_second
    pace = f"{choice.strategy} on {choice.workers} worker{'s' if choice.workers > 1 else ''}"
    speed = f"{100 * share:.0f} % of the fastest ({fastest.strategy} on {fastest.workers})"
    stale = f"at a staleness of {choice.staleness:.1f}" if choice.staleness else "and nothing is stale"
    return f"{pace}: {'the fastest here' if choice is fastest else speed}, {stale}"


HEAD = {"workers": 0, "samples/s": 0, "times": 4, "stale": 5, "p95": 1, "computing": 3, "MB/s": 2, "": 0}
"""Columns of the table, each with its order of removal from a narrow table (0: never)."""


def plan_lines(plan: Plan, width: int = UNLIMITED_WIDTH) -> list[str]:
    """Return the table with the choice marked, and the reason below it."""
    alone = next((one.samples_per_second for one in plan.forecasts if one.workers == 1), None)
    rows = []
    for one in plan.forecasts:
        rarely = "*" if strategy_of(one.strategy).is_local else ""
        times = f"{one.samples_per_second / alone:.2f}" if alone else "-"
        figures = [f"{one.samples_per_second:,.0f}", times, f"{one.staleness:.1f}", f"{one.staleness_p95:.0f}"]
        figures += [f"{100 * one.computing:.0f} %", f"{one.bytes_per_second / 1e6:,.1f}"]
        mark = "<- use this" if one is plan.choice else ""
        rows.append([f"{one.workers} x {one.strategy}{rarely}", *figures, mark])
    return [
        fit_table([Column(*column) for column in HEAD.items()], rows, width, keep_empty=True),
        fold("* several local steps between exchanges: accuracy in docs/local-steps.md", width),
        "",
        fold(f"use {plan.reason}", width),
    ]
