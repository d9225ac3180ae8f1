"""The command line: a table of verbs. An error is one line on standard error and an exit code, no traceback.

A verb is imported when it is called: the overview needs neither the settings nor numpy nor torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator

from paceline.errors import PacelineError, unknown_name
from paceline.system.cpu import let_threads_sleep
from paceline.system.signals import INTERRUPT_SIGNALS, InterruptHandler
from paceline.system.terminal import fold_for, fold_help, printable, terminal_width

MAX_LETTERS = 10_000
DESCRIPTION = """Train PyTorch models on many workers; --strategy chooses how they synchronise.

  paceline train --strategy async --workers 2   processes on this machine
  paceline train run.toml --lr 0.01             settings of a file, then flags
  paceline run -n 4 script.py                   your own loop on four workers
  paceline compare runs                         several runs in one table"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    is_command = arguments is None
    if is_command:
        let_threads_sleep()
    try:
        with raise_on_signals():
            return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except PacelineError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(str(error))
        return 1
    finally:
        if is_command:
            gc.freeze()  # else Python's exit looks through all objects of torch for garbage, for 0.15 s


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM raise KeyboardInterrupt inside this context."""
    interrupt = InterruptHandler()
    before = {number: signal.signal(number, interrupt) for number in INTERRUPT_SIGNALS}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, previous in before.items():
            signal.signal(number, previous)


def _complain(text: str) -> None:
    """Print one line, folded to the width of the terminal."""
    if sys.stderr is not None:
        lines = [printable(line, MAX_LETTERS) for line in f"paceline: {text}".splitlines()]
        print(fold_for(sys.stderr, lines), file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from paceline.system.environment import package_version

        print(f"paceline {package_version('paceline')}")
        return 0
    verb, *rest = arguments
    if verb == "help":
        return _help_verb(rest)
    if verb not in VERBS:
        raise unknown_name("verb", verb, [*VERBS, "help"])
    module, _, function = VERBS[verb][0].partition(":")
    code: int = getattr(importlib.import_module(f"paceline.cli.{module}"), function)(rest)
    return code


def _help_verb(words: list[str]) -> int:
    """Print the overview, or the help of the verb that is named; flags like --help-all are handed on."""
    names = [word for word in words if not word.startswith("-")]
    flags = [word for word in words if word.startswith("-") and word not in ("-h", "--help")]
    if names and names[0] not in VERBS and names[0] != "help":
        raise unknown_name("verb", names[0], VERBS)
    return _dispatch([*(name for name in names if name != "help"), *(flags or ["--help"])])


def _overview() -> str:
    width = max(map(len, VERBS))
    groups = [
        f"{group}:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in verbs.items())
        for group, verbs in GROUPS.items()
    ]
    text = "\n\n".join(
        ["usage: paceline VERB ...", DESCRIPTION, *groups, "'paceline help VERB' says more about one of them."]
    )
    return fold_help(text, terminal_width())


GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "start here": {
        "train": ("train:train_verb", "train a model on this machine"),
        "run": ("train:run_verb", "run your own training loop on several workers"),
        "watch": ("watch:watch_verb", "follow runs in the browser or the terminal"),
        "list": ("runs:list_verb", "list the runs of a folder, newest first"),
        "compare": ("runs:compare_verb", "compare several runs in one table"),
        "report": ("report:report_verb", "write an HTML page about one or more runs"),
        "resume": ("train:resume_verb", "continue a run that was stopped or killed"),
        "doctor": ("machine:doctor_verb", "check the software, cores, memory and data of this machine"),
    },
    "clusters": {
        "server": ("cluster:server_verb", "serve a run to workers on other machines"),
        "worker": ("cluster:worker_verb", "connect a worker to a server"),
        "shard": ("cluster:shard_verb", "hold a range of the weights for a server with --servers"),
        "drain": ("cluster:drain_verb", "remove workers from a running run"),
        "status": ("runs:status_verb", "show the state of a run, and which worker is slow and why"),
    },
    "studies": {
        "simulate": ("simulate:simulate_verb", "train on a simulated cluster, or compute only its times"),
        "plan": ("simulate:plan_verb", "forecast the best strategy and number of workers for a cluster"),
        "sweep": ("studies:sweep_verb", "run a grid of settings, and compare the runs in one table"),
        "bench": ("studies:bench_verb", "measure the same run on 1, 2, 4, ... workers"),
        "landscape": ("report:landscape_verb", "draw the path of training on the loss landscape"),
        "reproduce": ("studies:reproduce_verb", "repeat the runs of a published table, and compare"),
    },
    "maintenance": {
        "data": ("machine:data_verb", "list data sets, or download one"),
        "replay": ("train:replay_verb", "compute a run again from its log, and compare"),
        "export": ("report:export_verb", "send a run to TensorBoard, MLflow or your own tracker"),
        "trace": ("report:trace_verb", "write a timeline of all workers, for Perfetto"),
        "soak": ("simulate:soak_verb", "simulate random clusters and faults, and check invariants"),
    },
}
"""The verbs in groups: the function in `paceline.cli` that runs a verb, and one line of help."""
VERBS = {name: row for verbs in GROUPS.values() for name, row in verbs.items()}
