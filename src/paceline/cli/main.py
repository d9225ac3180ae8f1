"""The command line: a table of verbs. An error is one line on standard error and an exit code, no traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from paceline.cli.cluster import drain_verb, server_verb, shard_verb, worker_verb
from paceline.cli.machine import data_verb, doctor_verb
from paceline.cli.report import export_verb, landscape_verb, report_verb, trace_verb
from paceline.cli.runs import compare_verb, list_verb, status_verb
from paceline.cli.simulate import plan_verb, simulate_verb, soak_verb
from paceline.cli.studies import bench_verb, reproduce_verb, sweep_verb
from paceline.cli.train import replay_verb, resume_verb, run_verb, train_verb
from paceline.cli.watch import watch_verb
from paceline.errors import PacelineError, unknown_name
from paceline.system.signals import INTERRUPT_SIGNALS, InterruptHandler
from paceline.system.terminal import fold_for, fold_help, printable, terminal_width

MAX_LETTERS = 10_000
DESCRIPTION = """Train PyTorch models on many workers; --strategy chooses how the workers synchronise.

  paceline train --strategy async --workers 2     real processes on this machine
  paceline train run.toml --lr 0.01               settings from a file, then flags
  paceline run -n 4 script.py                     your own training loop on four workers
  paceline compare runs                           several runs in one table
  paceline doctor                                 check this machine"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with raise_on_signals():
            return _dispatch(arguments)
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
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from paceline.system.environment import package_version

        print(f"paceline {package_version('paceline')}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise unknown_name("verb", verb, VERBS)
    return VERBS[verb][0](rest)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
    text = f"usage: paceline VERB ...\n\n{DESCRIPTION}\n\nverbs ('paceline VERB --help' says more):\n{verbs}"
    return fold_help(text, terminal_width())


Verb = Callable[[list[str]], int]
VERBS: dict[str, tuple[Verb, str]] = {
    "train": (train_verb, "train a model on this machine"),
    "simulate": (simulate_verb, "train on a simulated cluster, or compute only its times"),
    "plan": (plan_verb, "forecast the best strategy and number of workers for a cluster"),
    "soak": (soak_verb, "simulate random clusters and faults, and check invariants"),
    "sweep": (sweep_verb, "run a grid of settings, and compare the runs in one table"),
    "reproduce": (reproduce_verb, "repeat the runs of a published table, and compare"),
    "bench": (bench_verb, "measure the same run on 1, 2, 4, ... workers"),
    "run": (run_verb, "run your own training loop on several workers"),
    "drain": (drain_verb, "remove workers from a running run"),
    "server": (server_verb, "serve a run to workers on other machines"),
    "worker": (worker_verb, "connect a worker to a server"),
    "shard": (shard_verb, "hold a range of the weights for a server with --servers"),
    "resume": (resume_verb, "continue a run that was stopped or killed"),
    "replay": (replay_verb, "compute a run again from its log, and compare"),
    "status": (status_verb, "show the state of a run, and which worker is slow and why"),
    "watch": (watch_verb, "follow runs in the browser or the terminal"),
    "list": (list_verb, "list the runs of a folder, newest first"),
    "compare": (compare_verb, "compare several runs in one table"),
    "export": (export_verb, "send a run to TensorBoard, MLflow or your own tracker"),
    "trace": (trace_verb, "write a timeline of all workers, for Perfetto"),
    "report": (report_verb, "write an HTML page about one or more runs"),
    "landscape": (landscape_verb, "draw the path of training on the loss landscape"),
    "data": (data_verb, "list data sets, or download one"),
    "doctor": (doctor_verb, "check the software, cores, memory and data of this machine"),
}
