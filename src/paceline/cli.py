"""The command line: a table of verbs. Every error is one line on standard error and an exit code; no traceback."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config import SIMULATED_ONLY, to_dict
from paceline.errors import PacelineError, UserError, unknown_name
from paceline.flags import Parser, add_settings, config_from, number
from paceline.reports.console import Console, closing_lines

SCRIPT_DECIDES = (
    *SIMULATED_ONLY,
    "workers",
    "dataset",
    "model",
    "task",
    "data_dir",
    "batch_size",
    "device",
    "validation",
    "eval_every",
    "target_accuracy",
)
EXIT_CODES = {"finished": 0, "diverged": 3, "stopped": 130}
DESCRIPTION = """Train PyTorch models on many workers; one word chooses how they keep pace.

  paceline train --strategy async --workers 2     real processes on this machine
  paceline train run.toml --lr 0.01               a file of settings, then flags
  paceline run -n 4 script.py                     your own training loop, four times
  paceline compare runs/*                         several runs in one table
  paceline doctor                                 what this machine has and lacks"""

TRAIN_DESCRIPTION = """Train a model; everything about the run is kept in its folder.

  paceline train --strategy sync --workers 4 --split labels
  paceline train --strategy bounded:3 --delay 30ms@1 --model cnn --epochs 1
  paceline train --task my_task.py:build --lr 0.05 --schedule cosine"""

SIMULATE_DESCRIPTION = """The same training under a virtual clock, on a cluster that does not exist.

  paceline simulate --workers 4 --speeds 1,1,1,4 --link 1gbit,0.2ms
  paceline simulate --workers 8 --speeds lognormal:30ms,.3 --faults faults.toml
  paceline simulate --timing-only --parameters 25.6M --workers 1000 --steps 100000 --strategy bounded:3"""

PLAN_DESCRIPTION = """Which strategy fits, and how many workers: every one simulated, in one table.

  paceline plan                                        after a short probe of this machine
  paceline plan --like runs/NAME --workers 8           from the times of a run
  paceline plan --speeds lognormal:120ms,.3 --link 10gbit,0.1ms --parameters 25.6M --workers 64"""

SOAK_DESCRIPTION = """Random clusters, strategies and faults under the simulator; every promise is checked.

  paceline soak --seeds 2000
  paceline soak --seeds 1 --first 4711                      one seed again
  paceline soak --seeds 1 --first 4711 --faults faults.toml   with another table of faults"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _dispatch(arguments)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM before training has handlers of its own ends like Ctrl-C."""
    raise KeyboardInterrupt


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from paceline.runs.environment import package_version

        print(f"paceline {package_version('paceline')}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise unknown_name("verb", verb, VERBS)
    return VERBS[verb][0](rest)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
    return f"usage: paceline VERB ...\n\n{DESCRIPTION}\n\nverbs ('paceline VERB --help' tells more):\n{verbs}"


def _parser(verb: str, description: str, usage: str | None = None) -> Parser:
    return Parser(f"paceline {verb}", description, usage)


def _show(folder: Any, result: dict[str, Any], as_json: bool) -> int:
    """The closing lines (on standard error when JSON goes to standard output), then the exit code."""
    from paceline.data.datasets import DATASETS

    info = DATASETS.get(result["dataset"]) if result["task"] is None else None
    lines = closing_lines(result, info.classes if info is not None else None, str(folder.path))
    print("\n".join(lines), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(result, indent=2))
    if result["status"] == "diverged":
        print(f"paceline: {result['reason']}", file=sys.stderr)
    if result["status"] == "stopped":
        print(f"paceline: stopped early; {folder.way_on(folder.config())}", file=sys.stderr)
    return EXIT_CODES[result["status"]]


def _train(arguments: list[str]) -> int:
    parser = _parser("train", TRAIN_DESCRIPTION, "paceline train [RUN.toml] [flags]")
    parser.add_argument("file", nargs="?", metavar="RUN.toml", help="a file of settings; flags win over it")
    add_settings(parser, left_out=SIMULATED_ONLY)
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parsed = parser.parse_strictly(arguments)
    config = config_from(parsed, parsed.file)
    from paceline.launch import train

    with Console() as console:
        folder, result = train(config, console)
    return _show(folder, result, parsed.json)


def _simulate(arguments: list[str]) -> int:
    parser = _parser("simulate", SIMULATE_DESCRIPTION, "paceline simulate [RUN.toml] [flags]")
    parser.add_argument("file", nargs="?", metavar="RUN.toml", help="a file of settings; flags win over it")
    add_settings(parser, left_out=("device",))
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parsed = parser.parse_strictly(arguments)
    config = config_from(parsed, parsed.file, _settings_of(parsed.like))
    from paceline.simulate import simulate

    with Console() as console:
        folder, result = simulate(config, console)
    return _show(folder, result, parsed.json)


def _plan(arguments: list[str]) -> int:
    parser = _parser("plan", PLAN_DESCRIPTION, "paceline plan [flags]")
    left_out = ("device", "strategy", "timing_only", "faults", "name", "runs", "target_accuracy", "eval_every")
    add_settings(parser, left_out=left_out)
    parser.add_argument("--json", action="store_true", help="print every forecast as JSON")
    parsed = parser.parse_strictly(arguments)
    config = config_from(parsed, None, _settings_of(parsed.like))
    from paceline.plan import make_plan, plan_lines

    if parsed.like is not None and parsed.workers is None:
        config = dataclasses.replace(config, workers=None)
    with Console() as console:
        plan = make_plan(config, console)
    print(json.dumps(dataclasses.asdict(plan), indent=2) if parsed.json else "\n".join(plan_lines(plan)))
    return 0


def _settings_of(run: str | None) -> dict[str, Any]:
    """What a new run takes over from an old one: what was trained, not where it lies and what went wrong."""
    if run is None:
        return {}
    from paceline.runs.folder import RunFolder

    config = RunFolder.open(Path(run)).config()
    return {name: value for name, value in to_dict(config).items() if name not in ("name", "runs", "faults", "delay")}


def _soak(arguments: list[str]) -> int:
    parser = _parser("soak", SOAK_DESCRIPTION, "paceline soak [--seeds N] [--first S] [--faults FILE] [--json]")
    parser.add_argument("--seeds", type=number(int), default=2000, metavar="N", help="how many to try [2000]")
    parser.add_argument("--first", type=number(int), default=0, metavar="S", help="the first seed [0]")
    parser.add_argument("--faults", metavar="FILE", help="this table of faults instead of the seeds' own")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    parsed = parser.parse_strictly(arguments)
    if parsed.seeds < 1:
        raise UserError(f"--seeds {parsed.seeds}: give at least one seed to try, as in --seeds 2000")
    if parsed.first < 0:
        raise UserError(f"--first {parsed.first}: seeds are counted from 0")
    from paceline.soak import soak

    faults = Path(parsed.faults) if parsed.faults is not None else None
    with Console() as console:
        summary = soak(parsed.seeds, parsed.first, console.note, faults)
    print("\n".join(summary.lines()), file=sys.stderr if parsed.json else sys.stdout)
    if parsed.json:
        print(json.dumps(summary.row(), indent=2))
    if summary.interrupted:
        raise KeyboardInterrupt
    return 0 if summary.failure is None else 1


def _resume(arguments: list[str]) -> int:
    parser = _parser("resume", "Go on with a run that was stopped or killed; no acknowledged push is lost.")
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/NAME")
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parsed = parser.parse_strictly(arguments)
    from paceline.launch import resume

    with Console() as console:
        folder, result = resume(Path(parsed.run), console)
    return _show(folder, result, parsed.json)


def _replay(arguments: list[str]) -> int:
    parser = _parser("replay", "Execute a run again from its log, and compare the weights and every loss bit for bit.")
    parser.add_argument("run", metavar="RUN", help="a run folder, as in runs/NAME")
    parser.add_argument("--until", type=number(int), metavar="N", help="stop after update N and save its weights")
    parser.add_argument("--output", metavar="FILE", help="where to save them [RUN/replay-N.safetensors]")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parsed = parser.parse_strictly(arguments)
    from paceline.rerun import describe, replay

    with Console() as console:
        output = Path(parsed.output) if parsed.output is not None else None
        outcome = replay(Path(parsed.run), console, parsed.until, output)
    print(json.dumps(outcome, indent=2) if parsed.json else "\n".join(describe(outcome)))
    return 0 if outcome["identical"] is not False else 1


def _compare(arguments: list[str]) -> int:
    parser = _parser("compare", "Several runs in one table.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, as in runs/*")
    parsed = parser.parse_strictly(arguments)
    from paceline.reports.tables import compare

    print(compare([Path(run) for run in parsed.runs]))
    return 0


def _data(arguments: list[str]) -> int:
    parser = _parser(
        "data", "List the data sets and where they lie, or fetch one (the only verb that uses the network)."
    )
    parser.add_argument("action", choices=("list", "get"))
    parser.add_argument("name", nargs="?", help="the data set to get")
    parser.add_argument("--data-dir", metavar="DIR", help="look here first, or fetch to here")
    parser.add_argument("--mirror", metavar="URL", help="fetch from here instead of upstream")
    parsed = parser.parse_strictly(arguments)
    place = Path(parsed.data_dir) if parsed.data_dir is not None else None
    if parsed.action == "list":
        from paceline.data.download import status
        from paceline.reports.tables import data_table

        print(data_table(status(place)))
        return 0
    if parsed.name is None:
        raise UserError("which one? 'paceline data list' shows them, as in 'paceline data get fashion-mnist'")
    from paceline.data.download import get

    print(get(parsed.name, place, parsed.mirror))
    return 0


def _doctor(arguments: list[str]) -> int:
    _parser("doctor", "What this machine has, what will be slow, what to do about it.").parse_strictly(arguments)
    from paceline.reports.doctor import examine

    findings = examine()
    print("\n".join(findings.lines))
    return 0 if findings.usable else 1


def _run(arguments: list[str]) -> int:
    from paceline.scripts import run_script

    description = "Start a script that calls paceline.join() on several workers."
    parser = _parser("run", description, "paceline run [-n N] [flags] SCRIPT.py [arguments of the script]")
    parser.add_argument("-n", "--workers", type=number(int), default=None, help="number of workers [2]")
    add_settings(parser, left_out=SCRIPT_DECIDES)
    parser.add_argument("--json", action="store_true", help="print result.json on standard output, last")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT.py ...", help="the script and its arguments"
    )
    parsed = parser.parse_strictly(arguments)
    with Console() as console:
        folder, result = run_script(config_from(parsed, None), parsed.script, console)
    return _show(folder, result, parsed.json)


Verb = Callable[[list[str]], int]
VERBS: dict[str, tuple[Verb, str]] = {
    "train": (_train, "train a model on this machine"),
    "simulate": (_simulate, "train or time on a cluster that does not exist"),
    "plan": (_plan, "which strategy and how many workers fit a cluster"),
    "soak": (_soak, "try random clusters and faults, and check every promise"),
    "run": (_run, "run your own training loop on several workers"),
    "resume": (_resume, "go on with a run that was stopped or killed"),
    "replay": (_replay, "execute a run again from its log and compare"),
    "compare": (_compare, "several runs in one table"),
    "data": (_data, "list data sets, or fetch one"),
    "doctor": (_doctor, "what this machine has and lacks"),
}
