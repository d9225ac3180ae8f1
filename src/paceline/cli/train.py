"""Verbs that train on real processes, and that look at what a run left."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import add_settings, config_from, number
from paceline.cli.output import EXIT_CODES, parser_for, show
from paceline.config import FIELDS, SIMULATED_ONLY, UPKEEP, RunConfig
from paceline.errors import UserError, unknown_name
from paceline.reports.console import Console
from paceline.settings.ranks import rank_here
from paceline.system.terminal import fold_for

if TYPE_CHECKING:
    from paceline.runs.folder import RunFolder

ENGINES = ("ray",)
SCRIPT_DECIDES = (
    *SIMULATED_ONLY,
    "workers",
    "dataset",
    "model",
    "task",
    "data_dir",
    "batch_size",
    "device",
    "precision",
    "compile",
    "capture",
    "channels_last",
    "accumulate",
    "validation",
    "fold",
    "eval_every",
    "eval_train",
    "score",
    "target_accuracy",
    "best",
    "restart",
    "recovery",
)
TRAIN_DESCRIPTION = """Train a model; everything about the run is kept in its folder.

  paceline train --strategy sync --workers 4 --split labels
  paceline train --strategy bounded:3 --delay 30ms@1 --model cnn --epochs 1
  paceline train --task my_task.py:build --lr 0.05 --schedule cosine"""


def train_verb(arguments: list[str]) -> int:
    parser = parser_for("train", TRAIN_DESCRIPTION, "paceline train [RUN.toml] [flags]")
    parser.add_argument("file", nargs="?", metavar="RUN.toml", help="a file of settings; flags win over it")
    add_settings(parser, left_out=SIMULATED_ONLY)
    _add_places(parser)
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parsed = parser.parse_strictly(arguments)
    config = config_from(parsed, parsed.file)
    rank = rank_here()
    follows = rank is not None and not rank.leads
    with Console(quiet=follows) as console:
        folder, result = _train(config, parsed, console)
    return EXIT_CODES[result["status"]] if follows else show(folder, result, parsed.json)


def _add_places(parser: argparse.ArgumentParser) -> None:
    places = _add_hosts(parser)
    places.add_argument(
        "--skip-failed", action="store_true", help="of --hosts: go on without those that fail the check"
    )
    places.add_argument("--engine", metavar="NAME", help="ray: server and workers as actors of a Ray cluster")


def _add_hosts(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    places = parser.add_argument_group("places")
    places.add_argument("--hosts", metavar="FILE", help="start workers over ssh on these hosts, one a line; serve here")
    places.add_argument("--listen", metavar="HOST:PORT", help="of --hosts: where workers find this machine [any, free]")
    places.add_argument(
        "--tls", action="store_true", help="of --hosts, Ray, torchrun and srun: encrypt what workers send"
    )
    return places


def _refuse_without_hosts(parsed: argparse.Namespace) -> None:
    placed = getattr(parsed, "engine", None) is not None or rank_here() is not None
    for flag in ("skip_failed", "listen", "tls"):
        if getattr(parsed, flag, None) and not (flag == "tls" and placed):
            raise UserError(f"--{flag.replace('_', '-')} is about workers on other machines: add --hosts FILE")


def _train(config: RunConfig, parsed: argparse.Namespace, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    """On this machine, or where the flags say."""
    if parsed.engine not in (None, *ENGINES):
        raise unknown_name("engine", parsed.engine, ENGINES)
    if parsed.engine is not None and parsed.hosts is not None:
        raise UserError(f"--engine {parsed.engine} and --hosts {parsed.hosts} both place workers: leave one out")
    if parsed.hosts is not None:
        from paceline.runtimes.cluster.ssh_launch import Hosts, train_on_hosts

        return train_on_hosts(config, Hosts(parsed.hosts, parsed.listen, parsed.skip_failed, parsed.tls), console)
    _refuse_without_hosts(parsed)
    if parsed.engine is not None:
        from paceline.runtimes.cluster.ray import train_on_ray

        return train_on_ray(config, console, parsed.tls)
    from paceline.launch import train

    return train(config, console, parsed.tls)


def run_verb(arguments: list[str]) -> int:
    from paceline.runtimes.scripts.launch import run_script

    description = "Start a script that calls paceline.join() on several workers."
    parser = parser_for("run", description, "paceline run [-n N] [flags] SCRIPT.py [arguments of the script]")
    parser.add_argument("-n", "--workers", type=number(int), default=None, help="number of workers [2]")
    add_settings(parser, left_out=SCRIPT_DECIDES)
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py ...", help="the script and its arguments"
    )
    parsed = parser.parse_strictly(arguments)
    with Console() as console:
        folder, result = run_script(config_from(parsed, None), parsed.script, console)
    return show(folder, result, parsed.json)


def resume_verb(arguments: list[str]) -> int:
    parser = parser_for("resume", "Go on with a run that was stopped or killed; no acknowledged push is lost.")
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/NAME")
    _add_hosts(parser)
    add_settings(parser, left_out=tuple(name for name in FIELDS if name not in UPKEEP))
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parsed = parser.parse_strictly(arguments)
    with Console() as console:
        folder, result = _resume(parsed, console)
    return show(folder, result, parsed.json)


def _resume(parsed: argparse.Namespace, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    upkeep = {name: getattr(parsed, name) for name in UPKEEP if getattr(parsed, name) is not None}
    if parsed.hosts is not None:
        from paceline.runtimes.cluster.ssh_launch import Hosts, resume_on_hosts

        return resume_on_hosts(Path(parsed.run), Hosts(parsed.hosts, parsed.listen, tls=parsed.tls), console, upkeep)
    _refuse_without_hosts(parsed)
    from paceline.launch import resume

    return resume(Path(parsed.run), console, upkeep)


def replay_verb(arguments: list[str]) -> int:
    parser = parser_for("replay", "Execute a run again from its log, and compare weights and losses bit for bit.")
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/NAME")
    parser.add_argument("--until", type=number(int), metavar="N", help="stop after update N and save its weights")
    parser.add_argument("--output", metavar="FILE", help="where to save them [RUN/replay-N.safetensors]")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parsed = parser.parse_strictly(arguments)
    from paceline.studies.replay import describe, replay

    with Console() as console:
        output = Path(parsed.output) if parsed.output is not None else None
        outcome = replay(Path(parsed.run), console, parsed.until, output)
    print(json.dumps(outcome, indent=2) if parsed.json else fold_for(sys.stdout, describe(outcome)))
    return 0 if outcome["identical"] is not False else 1
