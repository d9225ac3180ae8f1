"""Verbs that simulate, plan and soak."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from paceline.cli.arguments import Parser, add_settings, add_trust, config_from, require_trust
from paceline.cli.output import show
from paceline.config import to_dict
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.settings.resolve import check_names
from paceline.system.strict_json import to_json
from paceline.system.terminal import table_width

SIMULATE_DESCRIPTION = """Train on a simulated cluster, under a virtual clock.

  paceline simulate --workers 4 --speeds 1,1,1,4 --link 1gbit,0.2ms
  paceline simulate --workers 8 --speeds lognormal:30ms,.3 --faults faults.toml
  paceline simulate --timing-only --parameters 25.6M --workers 1000 --steps 100000 --strategy bounded:3"""
PLAN_DESCRIPTION = """Simulate each strategy and number of workers on a cluster, and compare the forecasts in one table.

  paceline plan                                measure step times here first
  paceline plan --like runs/NAME --workers 8   use the step times of a run
  paceline plan --speeds lognormal:120ms,.3 --link 10gbit,0.1ms --parameters 25.6M --workers 64"""
SOAK_DESCRIPTION = """Simulate random clusters, strategies and faults, and check the invariants of training.

  paceline soak --seeds 2000
  paceline soak --seeds 1 --first 4711                        repeat one seed
  paceline soak --seeds 1 --first 4711 --faults faults.toml   with the faults of a file"""
NOT_INHERITED = (
    "name",
    "runs",
    "faults",
    "delay",
    "snapshots",
    "restart",
    "restart_workers",
    "keep_going",
    "stall",
    "durable",
    "mirror",
    "best",
    "device",
)
"""Settings of a run's processes and files, which a simulated run has not, and faults, which it may not repeat."""
NOT_TIMED = ("eval_every", "target", "target_accuracy")
"""Settings of evaluations: `--timing-only` computes no weights."""
GIVEN_WEIGHTS = ("weights", "weights_partial", "weights_sha256")


def simulate_verb(arguments: list[str]) -> int:
    parser = Parser("simulate", SIMULATE_DESCRIPTION, "paceline simulate [RUN.toml] [flags]")
    add_trust(parser)
    parser.add("file", "file of settings; flags override it", nargs="?", metavar="RUN.toml")
    add_settings(parser, left_out=("device", "restart", "restart_workers", "keep_going", "stall", "durable"))
    parser.add("--json", "print result.json on standard output at the end", action="store_true")
    parsed = parser.parse_strictly(arguments)
    config = config_from(parsed, parsed.file, _settings_of(parsed))
    from paceline.simulation.run import simulate

    with Console() as console:
        folder, result = simulate(config, console)
    return show(folder, result, parsed.json)


def plan_verb(arguments: list[str]) -> int:
    parser = Parser("plan", PLAN_DESCRIPTION, "paceline plan [flags]")
    left_out = (
        *("device", "strategy", "timing_only", "faults", "name", "runs", "max_seconds", "target_accuracy", "target"),
        *("best", "eval_every", "snapshots", *GIVEN_WEIGHTS),
    )
    add_settings(parser, left_out)
    add_trust(parser)
    parser.add("--json", "print every forecast as JSON", action="store_true")
    parsed = parser.parse_strictly(arguments)
    config = config_from(parsed, None, _settings_of(parsed))
    from paceline.studies.plan import make_plan, plan_lines

    check_names(config)  # before a probe trains for seconds
    if parsed.like is not None and parsed.workers is None:
        config = dataclasses.replace(config, workers=None)
    with Console() as console:
        plan = make_plan(config, console)
    print(to_json(dataclasses.asdict(plan), indent=2) if parsed.json else "\n".join(plan_lines(plan, table_width())))
    return 0


def _settings_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a new run inherits from the run folder of `--like`."""
    if parsed.like is None:
        return {}
    require_trust(parsed, parsed.like, trackers=getattr(parsed, "track", None) is None)
    from paceline.runs.folder import RunFolder

    folder = RunFolder.open(Path(parsed.like))
    settings = to_dict(folder.config())
    only_times = getattr(parsed, "timing_only", True)  # `plan` has no such flag: it always forecasts times
    if only_times:
        settings |= dict.fromkeys(GIVEN_WEIGHTS)  # a forecast of times has none
    elif settings["weights"] is not None:
        settings["weights"] = str(folder.initial_file)  # the user's own file may have changed
    left_out = (*NOT_INHERITED, *NOT_TIMED) if only_times else NOT_INHERITED
    return {name: value for name, value in settings.items() if name not in left_out}


def soak_verb(arguments: list[str]) -> int:
    parser = Parser("soak", SOAK_DESCRIPTION, "paceline soak [--seeds N] [--first S] [--faults FILE] [--json]")
    parser.add("--seeds", "number of runs, each with its own seed [2000]", type=int, default=2000, metavar="N")
    parser.add("--first", "seed of the first run [0]", type=int, default=0, metavar="S")
    parser.add("--faults", "TOML file of faults to inject instead of random ones", metavar="FILE")
    parser.add("--json", "print the summary as JSON on standard output", action="store_true")
    parsed = parser.parse_strictly(arguments)
    if parsed.seeds < 1:
        raise UserError(f"--seeds {parsed.seeds}: give at least one seed to try, as in --seeds 2000")
    if parsed.first < 0:
        raise UserError(f"--first {parsed.first}: seeds are counted from 0")
    from paceline.simulation.soak.soak import soak

    faults = Path(parsed.faults) if parsed.faults is not None else None
    with Console() as console:
        summary = soak(parsed.seeds, parsed.first, console.note, faults)
    print("\n".join(summary.lines()), file=sys.stderr if parsed.json else sys.stdout)
    if parsed.json:
        print(to_json(summary.row(), indent=2))
    if summary.interrupted:
        raise KeyboardInterrupt
    return 0 if summary.failure is None else 1
