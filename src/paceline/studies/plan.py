"""`paceline plan`: probe this machine (or take a run, or stated speeds), simulate every strategy and size, choose."""

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
from paceline.simulation.forecast import Forecast, forecast
from paceline.system.cpu import cores
from paceline.system.terminal import UNLIMITED_WIDTH, fold

WORTH_IT = 1.2
PROBE_STEPS, PROBE_SECONDS = 120, 4.0
LOCAL_STEPS = 16
GOOD_ENOUGH = 0.9
"""A pace without staleness is preferred while it keeps this share of the fastest; so is a smaller crew."""


@dataclass(frozen=True)
class Plan:
    """Every forecast, the one to use, and why."""

    forecasts: list[Forecast]
    choice: Forecast
    reason: str


def probe(config: RunConfig, console: Console, folder: Path) -> Path:
    """Train for a few seconds on two processes, and return that run."""
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
    """Doubling, up to what was asked for; else to twice this machine's cores, or 32 machines on a link."""
    most = config.workers or (32 if config.link is not None else 2 * (config.cores or cores()))
    found = [1]
    while 2 * found[-1] < most:
        found.append(2 * found[-1])
    return sorted({*found, most})


def make_plan(config: RunConfig, console: Console) -> Plan:
    """Probe if nothing is known, simulate all, choose."""
    if config.speeds is not None and ("*" in config.speeds or ("," in config.speeds and ":" not in config.speeds)):
        raise UserError(
            f"--speeds '{config.speeds}': a plan tries several numbers of workers; give one speed for all, as in 30ms"
        )
    if config.speeds is not None or config.like is not None:
        return _simulate_all(config, console)
    with tempfile.TemporaryDirectory() as temporary:
        console.note("probing this machine with two workers for a few seconds")
        return _simulate_all(dataclasses.replace(config, like=str(probe(config, console, Path(temporary)))), console)


def _simulate_all(config: RunConfig, console: Console) -> Plan:
    if config.task is not None and config.parameters is None:
        raise UserError("a task of your own: give its size too, as in --parameters 25.6M")
    layout = timing_layout(config)
    cells = [(workers, strategy) for workers in sizes(config) for strategy in worth_comparing(workers, LOCAL_STEPS)]
    found = []
    for number, (workers, strategy) in enumerate(cells):
        cell = dataclasses.replace(config, workers=workers, strategy=strategy, shard_weights=None, path=None)
        cell = dataclasses.replace(cell, local_steps=None, outer_lr=None, outer_momentum=None)
        if not on_star(cell):
            cell = dataclasses.replace(cell, codec=None, pull_codec=None)
        found.append(forecast(resolve(cell), layout))
        console.report({"kind": "working", "text": f"simulated {number + 1} of {len(cells)}"})
    return choose(found)


def choose(found: list[Forecast]) -> Plan:
    """The smallest crew near the fastest; on it, if near the fastest, an exchange every step, then no staleness.

    Drifts that are stale as well cost most, so they must be worth a good deal more speed.
    """
    top = max(one.samples_per_second for one in found)
    prudent = [one for one in found if not (one.staleness and strategy_of(one.strategy).is_local)]
    crews = prudent if any(WORTH_IT * one.samples_per_second >= top for one in prudent) else found
    fastest = max(crews, key=lambda one: one.samples_per_second)
    enough = GOOD_ENOUGH * fastest.samples_per_second
    workers = min(one.workers for one in crews if one.samples_per_second >= enough)
    crew = [one for one in crews if one.workers == workers and one.samples_per_second >= enough]
    every_step = [one for one in crew if not strategy_of(one.strategy).is_local]
    even = [one for one in every_step or crew if not one.staleness]
    choice = max(even or every_step or crew, key=lambda one: one.samples_per_second)
    return Plan(found, choice, _reason(choice, fastest))


def _reason(choice: Forecast, fastest: Forecast) -> str:
    """In a sentence."""
    share = choice.samples_per_second / fastest.samples_per_second
    pace = f"{choice.strategy} on {choice.workers} worker{'s' if choice.workers > 1 else ''}"
    speed = f"{100 * share:.0f} % of the fastest ({fastest.strategy} on {fastest.workers})"
    stale = f"at a staleness of {choice.staleness:.1f}" if choice.staleness else "and nothing is stale"
    return f"{pace}: {'the fastest here' if choice is fastest else speed}, {stale}"


COLUMNS = (
    Column("workers", 0),
    Column("samples/s", 0),
    Column("times", 4),
    Column("stale", 5),
    Column("p95", 1),
    Column("computing", 3),
    Column("MB/s", 2),
    Column("", 0),
)


def plan_lines(plan: Plan, width: int = UNLIMITED_WIDTH) -> list[str]:
    """The table, with the choice marked, and the reason under it."""
    alone = next((one.samples_per_second for one in plan.forecasts if one.workers == 1), None)
    rows = []
    for one in plan.forecasts:
        rarely = "*" if strategy_of(one.strategy).is_local else ""
        times = f"{one.samples_per_second / alone:.2f}" if alone else "-"
        rows.append(
            [
                f"{one.workers} x {one.strategy}{rarely}",
                f"{one.samples_per_second:,.0f}",
                times,
                f"{one.staleness:.1f}",
                f"{one.staleness_p95:.0f}",
                f"{100 * one.computing:.0f} %",
                f"{one.bytes_per_second / 1e6:,.1f}",
                "<- use this" if one is plan.choice else "",
            ]
        )
    return [
        fit_table(COLUMNS, rows, width, keep_empty=True),
        fold("* several steps alone between exchanges: accuracy in docs/local-steps.md", width),
        "",
        fold(f"use {plan.reason}", width),
    ]
