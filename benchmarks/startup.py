"""Time from the first key: the help, the first update of `paceline train`, and the exit after its last.

    python benchmarks/startup.py [--pairs N] [--quick] [--json] [--strict]

All sides take turns. arrivals.log is polled every 2 ms for the first push; then the run is stopped. The exit counts
from result.json, which a run of 20 updates writes last, to the end of the command. Peers: `python -c pass` and
`import torch`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ours
import pairs

FEW, MANY = 2, 10
STRATEGIES = {"classic": 1, "sync": FEW, "async": FEW, "allreduce": FEW, "local:4": FEW}
HELP_BAR, FIRST_BAR, EXIT_BAR, EXTRA_SECONDS_BAR = 0.15, 0.5, 0.5, 2.0
PATIENCE_SECONDS = 120.0


def seconds_of(*words: str) -> float:
    """Return the wall time of a Python process with these arguments."""
    begun = time.monotonic()
    quiet = subprocess.DEVNULL
    subprocess.run([sys.executable, *words], check=True, stdin=quiet, stdout=quiet, timeout=PATIENCE_SECONDS)
    return time.monotonic() - begun


def seconds_to_first_push(strategy: str, workers: int) -> float:
    """Return the wall time from the command to the first push of a LeNet5 run."""
    with ours.running(strategy, "lenet5", workers, 1) as run:
        return run.wait_for_pushes(1)


def seconds_to_exit(strategy: str, workers: int) -> float:
    """Return the wall time from the result of a short run to the end of its command."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--strategy", strategy, "--workers", str(workers), "--steps", "20", "--runs", folder, "--name", "run"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([*ours.COMMAND, *ours.DATA, *flags], stdin=quiet, stdout=quiet, stderr=quiet)
        while not (Path(folder) / "run/result.json").exists() and process.poll() is None:
            time.sleep(ours.POLL_SECONDS)
        begun = time.monotonic()
        if process.wait(PATIENCE_SECONDS) != 0:
            raise RuntimeError(f"paceline train --strategy {strategy} ended with exit code {process.returncode}")
        return time.monotonic() - begun


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    sides: dict[str, Callable[[], float]] = {
        "python": lambda: seconds_of("-c", "pass"),
        "help": lambda: seconds_of("-m", "paceline", "--help"),
        "torch": lambda: seconds_of("-c", "import torch"),
        "many": lambda: seconds_to_first_push("async", MANY),
    }
    for name, workers in STRATEGIES.items():
        sides[f"first {name}"] = partial(seconds_to_first_push, name, workers)
        sides[f"exit {name}"] = partial(seconds_to_exit, name, workers)
    with pairs.Disturbance() as by:
        found = pairs.interleave(sides, pairs.num_pairs(parsed), warm=True, say=pairs.teller(parsed, "seconds"))
    few, torch, python = found["first async"], found["torch"], found["python"]
    helps = [pairs.make_row("--help", found["help"], python, by, at_most=HELP_BAR, combine=lambda a, b: a)]
    more = [
        pairs.make_row(
            f"first {name}", found[f"first {name}"], torch, by, at_most=FIRST_BAR, combine=lambda a, b: a - b
        )
        for name in STRATEGIES
    ]
    extra = EXTRA_SECONDS_BAR
    more.append(
        pairs.make_row(f"{MANY} w - {FEW} w", found["many"], few, by, at_most=extra, combine=lambda a, b: a - b)
    )
    exits = [
        pairs.make_row(f"exit {name}", found[f"exit {name}"], python, by, at_most=EXIT_BAR, combine=lambda a, b: a)
        for name in STRATEGIES
    ]
    print(pairs.table(helps, "help", "ours", ("ours", "python")), end="\n\n")
    print(pairs.table(more, "first update", "minus", ("ours", "torch")), end="\n\n")
    print(pairs.table(exits, "result to exit", "ours", ("ours", "python")))
    return pairs.close(parsed, "startup", [*helps, *more, *exits])


if __name__ == "__main__":
    sys.exit(main())
