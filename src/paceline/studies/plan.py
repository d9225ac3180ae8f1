"""`paceline plan`: measure or read step times, simulate every strategy and worker count, recommend one.

What counts is the time to an accuracy: samples/s times the share of them that counts (`statistical_efficiency`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.assembly.efficiency import FIT_ERROR
from paceline.assembly.run import timing_layout
from paceline.config import FIELDS, SIMULATED_ONLY, RunConfig, given
from paceline.data.datasets import DATASETS, resolve_dataset
from paceline.errors import DataError, UserError
from paceline.launch import train
from paceline.reports.console import Console
from paceline.reports.tables import Column, fitted_table, left_out_lines
from paceline.settings.ranks import rank_here
from paceline.settings.resolve import resolve
from paceline.settings.strategies import ASYNC, moves_bytes, on_star, strategy_of, worth_comparing
from paceline.simulation.cluster import cluster_of
from paceline.simulation.forecast import Forecast, forecast
from paceline.system.cpu import busy_line, cores
from paceline.system.terminal import UNLIMITED_WIDTH, fold, fold_command

PROBE_STEPS, PROBE_SECONDS = 120, 4.0
LOCAL_STEPS = 16
MAX_SCALE = 8  # at larger factors of the lr, runs of one lr and more seeds than not end at chance
NEAR = 0.9  # prefer fewer workers, no local steps and the lr as it is, at or above this share of the best
COUNT = "the share of samples that bring as much as those of one worker, by a fit that is off by a factor of"
LEGEND = {
    "count": f"{COUNT} {FIT_ERROR:g} (docs/simulate.md)",
    "useful/s": "samples/s times the share that counts",
    "times": "useful/s, of one worker's",
    "computing": "share of the workers' time in steps; the rest is exchange, waiting and updates",
}
"""What columns mean."""
YOURS = "...: your model and data, as --task FILE:FUNCTION, or as --model and --dataset"
OF_THE_PLAN = ("strategy", "workers", "path", "local_steps", "outer_lr", "outer_momentum", "outer_warmup")
"""Settings that a plan chooses itself."""


@dataclass(frozen=True)
class Plan:
    """All forecasts, the recommended one, the reason, and the command that trains so."""

    forecasts: list[Forecast]
    choice: Forecast
    reason: str
    command: str


class ProbeConsole(Console):
    """The console of a probe, which forwards its rows; of a stop, which saves nothing here, it keeps the reason."""

    def __init__(self, console: Console) -> None:
        super().__init__(quiet=True)
        self._console = console

    def report(self, row: dict[str, Any]) -> None:
        if row["kind"] == "stopping":
            self.stopping = row["reason"]
        else:
            self._console.report(row)

    def note(self, text: str) -> None:
        self._console.note(text)


def probe(config: RunConfig, console: Console, folder: Path) -> Path:
    """Train for a few seconds on two processes and return the run's folder."""
    imagined: dict[str, Any] = {name: None for name in SIMULATED_ONLY if name != "timing_only"}
    trial = dataclasses.replace(config, **imagined, strategy=ASYNC, workers=2, threads=1, epoch_mode="shared")
    steps = PROBE_STEPS
    for name in ("short", "long"):
        shown = ProbeConsole(console if name == "short" else Console(quiet=True))  # both have the same notes
        run, result = train(dataclasses.replace(trial, steps=steps, name=name, runs=str(folder)), shown, rank_here())
        if shown.stopping is not None:
            raise KeyboardInterrupt
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
    asked = config
    with contextlib.suppress(DataError):  # a plan of stated speeds needs no data; only their number counts
        config, _ = resolve_dataset(config)
    if config.speeds is None and config.like is None:
        with tempfile.TemporaryDirectory() as temporary:
            if (busy := busy_line()) is not None:
                console.note(busy)
            console.note("probing this machine with two workers for a few seconds")
            measured = dataclasses.replace(config, like=str(probe(config, console, Path(temporary))))
            forecasts = _simulate_all(measured, console)
    else:
        forecasts = _simulate_all(config, console)
    choice, reason = choose(forecasts)
    is_own = asked.speeds is not None or asked.parameters is not None
    return Plan(forecasts, choice, reason, command(asked if is_own else config, choice))


def _simulate_all(config: RunConfig, console: Console) -> list[Forecast]:
    if config.task is not None and config.parameters is None:
        raise UserError("a plan for a custom task needs its size: add --parameters, as in --parameters 25.6M")
    layout = timing_layout(config)
    samples = config.epochs * DATASETS[config.dataset].train_size if config.task is None else None
    cells = [(workers, strategy) for workers in sizes(config) for strategy in worth_comparing(workers, LOCAL_STEPS)]
    found = []
    for number, (workers, strategy) in enumerate(cells):
        found.append(forecast(resolve(_cell(config, workers, strategy)), layout, samples))
        console.report({"kind": "working", "text": f"simulated {number + 1} of {len(cells)}"})
    return found


def _cell(config: RunConfig, workers: int, strategy: str) -> RunConfig:
    """The settings of a candidate; an update that averages several batches has a longer step, if lr may be scaled."""
    cell = dataclasses.replace(config, workers=workers, strategy=strategy, shard_weights=None, path=None)
    cell = dataclasses.replace(cell, local_steps=None, outer_lr=None, outer_momentum=None, outer_warmup=None)
    if not on_star(cell):
        cell = dataclasses.replace(cell, codec=None, pull_codec=None)
    if not moves_bytes(cell):
        cell = dataclasses.replace(cell, link=None)
    if config.scale_lr == "none" and config.optimizer == "sgd" and not strategy_of(cell).is_local:
        return dataclasses.replace(cell, scale_lr=_scale(strategy, workers))
    return cell


def _scale(strategy: str, workers: int) -> str:
    """The longest step that is worth trying, as `--scale-lr` takes it.

    >>> from paceline.settings.strategies import SYNC
    >>> [_scale(name, 12) for name in (SYNC, "backup:4", ASYNC)]
    ['8', 'auto', 'none']
    """
    pushes = strategy_of(strategy).pushes_per_step(workers)
    return "none" if pushes == 1 else "auto" if pushes <= MAX_SCALE else str(MAX_SCALE)


def choose(found: list[Forecast]) -> tuple[Forecast, str]:
    """Choose among the candidates that reach an accuracy about as soon as the best, and say why in two sentences.

    Fewer workers come first, then an exchange every step, then the lr as it is: a longer step may be too long.
    """
    best = max(found, key=lambda one: one.useful_per_second)
    near = [one for one in found if one.useful_per_second >= NEAR * best.useful_per_second]
    workers = min(one.workers for one in near)
    smallest = [one for one in near if one.workers == workers]
    every_step = [one for one in smallest if not strategy_of(one.strategy).is_local]
    same_lr = [one for one in every_step or smallest if one.lr_scale == 1.0]
    choice = max(same_lr or every_step or smallest, key=lambda one: one.useful_per_second)
    return choice, f"use {_why(choice, best, found)} {_most_samples(choice, found)}"


def _why(choice: Forecast, best: Forecast, found: list[Forecast]) -> str:
    """Return the first sentence: the time to an accuracy."""
    alone = next((one for one in found if one.workers == 1), best)
    if choice.workers == 1:
        others = [one for one in found if one.workers > 1]
        soonest = max(others, key=lambda one: one.useful_per_second, default=None)
        rest = f": {_name(soonest)} takes {_time(soonest, choice)} of its time to an accuracy" if soonest else ""
        return f"one worker{rest}."
    stale = f"{choice.staleness:.1f} updates stale" if choice.staleness else "never stale"
    is_sooner = _time(best, alone) != _time(choice, alone)
    other = f"; {_name(best)} takes {_time(best, alone)}" if is_sooner else ""
    counting = f"as {100 * choice.efficiency:.0f} % of its samples count (its pushes are {stale})"
    return f"{_name(choice)}: it takes {_time(choice, alone)} of one worker's time to an accuracy, {counting}{other}."


def _most_samples(choice: Forecast, found: list[Forecast]) -> str:
    """Return the second sentence: the highest speed."""
    fastest = max(found, key=lambda one: one.samples_per_second)
    if choice.samples_per_second >= fastest.samples_per_second:
        return "Nothing here has more samples/s."
    more = f"{fastest.samples_per_second / choice.samples_per_second:.2f} times as many"
    return f"{_name(fastest)} has the most samples/s, {more}, but {100 * fastest.efficiency:.0f} % of them count."


def _time(one: Forecast, other: Forecast) -> str:
    return f"{100 * other.useful_per_second / one.useful_per_second:.0f} %"


def _name(one: Forecast) -> str:
    workers = f"{one.workers} workers" if one.workers > 1 else "one worker"
    return f"{one.strategy} on {workers}{_longer(one)}"


def _longer(one: Forecast) -> str:
    return f", lr x {one.lr_scale:g}" if one.lr_scale != 1.0 else ""


def command(config: RunConfig, choice: Forecast) -> str:
    """Return the command that trains as chosen, with the settings that the plan was asked about.

    It ends in `...` for the model and the data if the plan was asked about times or a size without naming them.

    >>> from paceline.settings.strategies import SYNC
    >>> choice = Forecast(SYNC, 2.0, 2, 100.0, 0.9, 90.0, 0.0, 0.0, 1.0, 0.0)
    >>> command(RunConfig(model="cnn", speeds="30ms", lr=0.01), choice)
    'paceline train --strategy sync --workers 2 --scale-lr auto --model cnn --lr 0.01'
    """
    is_scaled = config.scale_lr == "none" and choice.lr_scale != 1.0
    words = ["paceline", "train", "--strategy", choice.strategy]
    words += ["--workers", str(choice.workers)] if choice.workers > 1 else []
    words += ["--scale-lr", _scale(choice.strategy, choice.workers)] if is_scaled else []
    words += ["--hosts", "HOSTS"] if config.link is not None and choice.workers > 1 else []
    for name in given(config, (name for name in FIELDS if name not in (*OF_THE_PLAN, *SIMULATED_ONLY, "runs"))):
        values = value if isinstance(value := getattr(config, name), list) else [value]
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [word for value in values for word in (flag, str(value))]
    is_own = config.speeds is not None or config.parameters is not None
    words += ["..."] if is_own and not given(config, ("model", "dataset", "task")) else []
    return shlex.join(words)


HEAD = {"workers": 0, "samples/s": 3, "count": 4, "useful/s": 0, "times": 0, "stale": 5, "p95": 1, "computing": 2}
HEAD |= {"MB/s": 2, "": 0}
"""Columns of the table, each with its order of removal from a narrow table (0: never)."""


def plan_lines(plan: Plan, width: int = UNLIMITED_WIDTH) -> list[str]:
    """Return the table with the choice marked; below it what its columns mean, the reason and the command."""
    alone = next((one.useful_per_second for one in plan.forecasts if one.workers == 1), None)
    rows = []
    for one in plan.forecasts:
        figures = [f"{one.samples_per_second:,.0f}", f"{100 * one.efficiency:.0f} %", f"{one.useful_per_second:,.0f}"]
        figures += [f"{one.useful_per_second / alone:.2f}" if alone else "-"]
        figures += [f"{one.staleness:.1f}", f"{one.staleness_p95:.0f}"]
        figures += [f"{100 * one.computing:.0f} %", f"{one.bytes_per_second / 1e6:,.1f}"]
        mark = "<- use this" if one is plan.choice else ""
        rows.append([f"{one.workers} x {one.strategy}{_longer(one)}", *figures, mark])
    text, left_out = fitted_table([Column(*column) for column in HEAD.items()], rows, width, keep_empty=True)
    meanings = [f"{head}: {meaning}" for head, meaning in LEGEND.items() if head not in left_out]
    lines = [text, *left_out_lines(left_out, width), fold("; ".join(meanings), width), "", fold(plan.reason, width), ""]
    lines.append(fold_command(plan.command, width))
    return [*lines, fold(YOURS, width)] if plan.command.endswith(" ...") else lines
