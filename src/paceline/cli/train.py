"""Verbs that train, resume and replay runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import (
    Parser,
    add_settings,
    add_take_over,
    add_trust,
    config_from,
    require_trust,
    run_to_read,
    run_to_resume,
    script_of,
)
from paceline.cli.cluster import add_encryption, chosen_tls
from paceline.cli.output import EXIT_CODES, show
from paceline.config import FIELDS, SIMULATED_ONLY, UPKEEP, RunConfig, is_url
from paceline.errors import PacelineError, RunFailed, UserError, unknown_name
from paceline.reports.console import Console
from paceline.settings.features import SCRIPT_DECIDES
from paceline.settings.ranks import LAUNCHER_VARIABLES, Rank, rank_here
from paceline.system.strict_json import to_json
from paceline.system.terminal import fold_for

if TYPE_CHECKING:
    from paceline.runs.folder import RunFolder

ENGINES = ("ray",)
TRAIN_DESCRIPTION = """Train a model; all results are written to the run folder.

  paceline train --strategy sync --workers 4 --split labels
  paceline train --strategy bounded:3 --delay 30ms@1 --model cnn --epochs 1
  paceline train --task my_task.py:build --lr 0.05 --schedule cosine"""


def train_verb(arguments: list[str]) -> int:
    parser = Parser("train", TRAIN_DESCRIPTION, "paceline train [RUN.toml] [flags]")
    parser.add("file", "file of settings; flags override it", nargs="?", metavar="RUN.toml")
    add_settings(parser, left_out=SIMULATED_ONLY)
    _add_engines(parser)
    parser.add("--json", "print result.json on standard output at the end", action="store_true")
    parsed = parser.parse_strictly(arguments)
    return _train(config_from(parsed, parsed.file), parsed)


def _add_engines(parser: Parser) -> None:
    _add_places(parser, basic=False)
    skip = "with --hosts: skip hosts that fail a check"
    parser.add("--skip-failed", skip, "several machines", basic=False, action="store_true")
    parser.add("--engine", "ray: run server and workers as actors of a Ray cluster", "several machines", metavar="NAME")
    gpus = "with --engine ray: each worker computes on this part of a GPU, as in 1 or 0.5 [no GPU]"
    parser.add("--gpus-per-worker", gpus, "several machines", basic=False, type=float, metavar="N")


def _train(config: RunConfig, parsed: argparse.Namespace, command: list[str] | None = None) -> int:
    """Train, and show the result. `command` is the user's script and its arguments, if it trains."""
    rank = rank_here() if any(name in os.environ for name in LAUNCHER_VARIABLES) else None
    follows = rank is not None and not rank.leads
    with Console(quiet=follows, keeps_stdout=parsed.json) as console:
        try:
            folder, result = _train_somewhere(config, parsed, console, rank, command)
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:
            if config.task is None:
                raise
            raise _failed_task(error, console) from None
    return EXIT_CODES[result["status"]] if follows else show(folder, result, parsed.json)


def _failed_task(error: BaseException, console: Console) -> RunFailed:
    """Show the traceback of a user's task that failed in this process; return the error that says so in one line."""
    from paceline.runtimes.local.failures import describe_exception

    text, traceback = describe_exception(error)
    console.report({"kind": "output", "stream": "stderr", "text": traceback.rstrip()})
    return RunFailed(text)


def _add_places(parser: Parser, basic: bool) -> None:
    hosts = "start workers over ssh on the hosts in this file, one per line; the server runs here"
    parser.add("--hosts", hosts, "several machines", metavar="FILE")
    listen = "with --hosts: address of this machine that workers connect to [any interface, a free port]"
    parser.add("--listen", listen, "several machines", basic, metavar="HOST:PORT")
    tls = "with --hosts, Ray, torchrun or srun: encrypt the connections of workers [if they are on other machines]"
    add_encryption(parser, tls, "several machines", basic)


def _check_places(parsed: argparse.Namespace, rank: Rank | None) -> None:
    """Refuse two ways to place workers, and flags of a way that was not chosen."""
    engine = getattr(parsed, "engine", None)
    if engine is not None and parsed.hosts is not None:
        raise UserError(f"--engine {engine} and --hosts {parsed.hosts} both place workers: leave one out")
    placed = f"--engine {engine}" if engine is not None else f"--hosts {parsed.hosts}" if parsed.hosts else None
    if placed is not None and rank is not None:
        raise UserError(f"{placed} starts its own workers: leave the launcher (torchrun, srun) out")
    if engine is None and getattr(parsed, "gpus_per_worker", None) is not None:
        what = f"--gpus-per-worker {parsed.gpus_per_worker:g} is what Ray gives to each worker"
        raise UserError(f"{what}: add --engine ray; without Ray, --device cuda computes on a GPU")
    for flag in ("skip_failed", "listen", "tls", "plain"):
        launched = flag in ("tls", "plain") and (engine is not None or rank is not None)
        if getattr(parsed, flag, None) and parsed.hosts is None and not launched:
            raise UserError(f"--{flag.replace('_', '-')} is about workers on other machines: add --hosts FILE")


def _train_somewhere(
    config: RunConfig, parsed: argparse.Namespace, console: Console, rank: Rank | None, command: list[str] | None
) -> tuple[RunFolder, dict[str, Any]]:
    """Train on this machine, or on the machines that the flags name."""
    if parsed.engine not in (None, *ENGINES):
        raise unknown_name("engine", parsed.engine, ENGINES)
    _check_places(parsed, rank)
    if parsed.hosts is not None:
        from paceline.runtimes.cluster.ssh_launch import HostOptions, train_on_hosts

        options = HostOptions(parsed.hosts, parsed.listen, parsed.skip_failed, chosen_tls(parsed))
        return train_on_hosts(config, options, console, command)
    if parsed.engine is not None:
        from paceline.runtimes.cluster.ray import train_on_ray

        return train_on_ray(config, console, chosen_tls(parsed), parsed.gpus_per_worker, command)
    from paceline.launch import train

    return train(config, console, rank, chosen_tls(parsed), command)


RUN_DESCRIPTION = """Run a training script on several workers. The script calls paceline.join().

  paceline run -n 4 --strategy async train.py --epochs 3    on this machine
  paceline run --hosts hosts.txt --strategy sync train.py   over ssh
  torchrun -m paceline run train.py                         or under srun
  paceline run -n 4 --engine ray train.py                   on a Ray cluster"""


class _OneName(argparse.Action):
    """A flag with two names, which may not be given two values; under one name, the later value wins."""

    given: str | None = None

    def __call__(self, parser: object, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        if self.given not in (None, option) and earlier != value:
            raise UserError(f"{self.given} {earlier} and {option} {value} are one setting: leave one out")
        self.given = option
        setattr(namespace, self.dest, value)


def run_verb(arguments: list[str]) -> int:
    parser = Parser("run", RUN_DESCRIPTION, "paceline run [-n N] [flags] SCRIPT.py [arguments of the script]")
    parser.add("-n/--workers", "number of workers [2]", type=int, action=_OneName)
    add_settings(parser, left_out=SCRIPT_DECIDES)
    _add_engines(parser)
    parser.add("--json", "print result.json on standard output at the end", action="store_true")
    parser.add("script", "the script and its arguments", nargs=argparse.REMAINDER, metavar="SCRIPT.py ...")
    parsed = parser.parse_strictly(arguments)
    return _train(config_from(parsed, None), parsed, script_of(parsed.script, parser))


def resume_verb(arguments: list[str]) -> int:
    what = "Continue a run that was stopped or killed. No acknowledged push is lost (of a script only with --durable)."
    parser = Parser("resume", what, "paceline resume RUN [flags]")
    parser.add("run", "a run folder, as in runs/NAME, or the URL of a copy, as in s3://BUCKET/runs/NAME", metavar="RUN")
    _add_places(parser, basic=True)
    add_settings(parser, left_out=tuple(name for name in FIELDS if name not in UPKEEP))
    parser.add("--runs", "with a URL: folder that the run is downloaded to [runs]", "run folder", metavar="DIR")
    add_take_over(parser)
    add_trust(parser)
    parser.add("--json", "print result.json on standard output at the end", action="store_true")
    parsed = parser.parse_strictly(arguments)
    if parsed.runs is not None and not is_url(parsed.run):
        raise UserError(f"--runs {parsed.runs} is for a run in a store, and {parsed.run} has its folder: leave it out")
    with Console() as console, run_to_resume(parsed, parsed.run, console) as parsed.run:
        require_trust(parsed, parsed.run, trackers=parsed.track is None, mirror=parsed.mirror is None)
        folder, result = _resume(parsed, console)
    return show(folder, result, parsed.json)


def _resume(parsed: argparse.Namespace, console: Console) -> tuple[RunFolder, dict[str, Any]]:
    upkeep = {name: getattr(parsed, name) for name in UPKEEP if getattr(parsed, name) is not None}
    rank = rank_here()
    _check_places(parsed, rank)
    if parsed.hosts is not None:
        from paceline.runtimes.cluster.ssh_launch import HostOptions, resume_on_hosts

        options = HostOptions(parsed.hosts, parsed.listen, tls=chosen_tls(parsed))
        return resume_on_hosts(Path(parsed.run), options, console, upkeep)
    from paceline.launch import resume

    return resume(Path(parsed.run), console, upkeep, rank)


REPLAY_DESCRIPTION = """Compute a run again from its log, and compare weights and losses bit by bit.

A script of 'paceline run' runs again: it overwrites the files that it writes and repeats its uploads. With
--in DIR it runs in another folder, so that its relative paths lead there.

  paceline replay runs/NAME
  paceline replay runs/NAME --in DIR"""


def replay_verb(arguments: list[str]) -> int:
    parser = Parser("replay", REPLAY_DESCRIPTION, "paceline replay RUN [flags]")
    parser.add("run", "a run folder, as in runs/NAME, or the URL of a copy in a store", metavar="RUN")
    parser.add("--until", "stop after update N and save its weights", type=int, metavar="N")
    parser.add("--output", "file for the weights of --until [RUN/replay-N.safetensors]", metavar="FILE")
    elsewhere = "run the script in this folder [the one in which the run was started]"
    parser.add("--in", elsewhere, dest="inside", metavar="DIR")
    add_trust(parser)
    parser.add("--json", "print the comparison as JSON", action="store_true")
    parsed = parser.parse_strictly(arguments)
    if is_url(parsed.run) and parsed.until is not None and parsed.output is None:
        raise UserError(f"--until {parsed.until}: {parsed.run} has no folder here for the weights: add --output FILE")
    from paceline.studies.replay import describe, replay

    with Console() as console, run_to_read(parsed.run, console) as parsed.run:
        require_trust(parsed, parsed.run)
        output = Path(parsed.output) if parsed.output is not None else None
        inside = Path(parsed.inside) if parsed.inside is not None else None
        outcome = replay(Path(parsed.run), console, parsed.until, output, inside)
    print(to_json(outcome, indent=2) if parsed.json else fold_for(sys.stdout, describe(outcome)))
    return 0 if outcome["identical"] is not False and not outcome["damaged"] else 1
