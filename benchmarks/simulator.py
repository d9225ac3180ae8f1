"""Speed of the simulator: events per second, 10,000 workers, and its overhead on real gradients.

    python benchmarks/simulator.py [--only events|many|real] [--pairs N] [--quick] [--json] [--strict]

An event is a received reply, a computed step or a handled message; pushes and heap actions are printed as well. Runs
without gradients are `paceline simulate --timing-only` with ResNet50-size weights. With gradients (LeNet5, 4 workers),
the peer computes only the same gradients on the same batches; both use one thread.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pairs
import torch
from processes import ended

from paceline.assembly.run import work_of
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import SAMPLE, load, locate_data
from paceline.reports.console import Console
from paceline.settings.resolve import resolve
from paceline.simulation.run import simulate

TIMING = ["--timing-only", "--parameters", "25.6M", "--speeds", "lognormal:120ms,.3", "--json"]
LINKS = {"no link": [], "link": ["--link", "10gbit,0.1ms"]}
WORKERS, PUSHES, QUICK_PUSHES = 100, 100_000, 20_000
MANY_WORKERS, PUSHES_EACH, QUICK_PUSHES_EACH = 10_000, 100, 10
STEPS, QUICK_STEPS, REAL_WORKERS = 600, 100, 4
PARTS = ("events", "many", "real")
BAR_EVENTS, BAR_SECONDS, BAR_GIB, BAR_RATIO = 100_000.0, 60.0, 1.0, 1.10


@dataclass(frozen=True)
class Measured:
    """One command: its result, wall time and peak memory."""

    result: dict[str, Any]
    seconds: float
    peak_gib: float

    def rate(self, what: str) -> float:
        """Return an entry of the result per second of simulation."""
        return float(self.result[what]) / float(self.result["wall_seconds"])


def command(strategy: str, workers: int, steps: int, flags: list[str]) -> Measured:
    """Run `paceline simulate` in a new process."""
    with tempfile.TemporaryDirectory() as runs:
        asked = ["--strategy", strategy, "--workers", str(workers), "--steps", str(steps), "--runs", runs]
        begun = time.perf_counter()
        with (Path(runs) / "error").open("wb") as error:
            words = [sys.executable, "-m", "paceline", "simulate", *TIMING, *asked, *flags]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=error)
            with ended([process]):
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begun
        if process.returncode:
            raise RuntimeError((Path(runs) / "error").read_text())
        (file,) = Path(runs).glob("*/result.json")
        return Measured(json.loads(file.read_text()), seconds, usage.ru_maxrss / 2**20)


def row(name: str, values: list[float], by: pairs.Disturbance, **bar: float) -> pairs.Row:
    """Return the row of a figure without a peer."""
    found = pairs.estimate(values)
    ((kind, value),) = bar.items()
    disposition, sign = pairs.judge(found, **bar), ">=" if kind == "at_least" else "<="
    taken = by.steal_percent, by.others_percent
    return pairs.Row(name, found.median, None, found, f"{sign}{value:g}", disposition, *taken, len(values))


def show(one: pairs.Row, unit: str, besides: str = "") -> None:
    """Print a row as a line."""
    low, high = one.found.low, one.found.high
    span = f"{low:,.0f} to {high:,.0f}" if low >= 1000 else f"{low:.3g} to {high:.3g}"
    median = f"{one.ours:,.0f}" if one.ours >= 1000 else f"{one.ours:.3g}"
    print(f"{one.name:<33} {median:>8} {unit} ({span}), bar {one.bar}: {one.disposition}{besides}", flush=True)


def events(number: int, pushes: int) -> list[pairs.Row]:
    """Measure events per second of 100 workers, with and without a link."""
    rows = []
    for name, flags in LINKS.items():
        with pairs.Disturbance() as by:
            runs = [command("async", WORKERS, pushes, flags) for _ in range(number)]
        others = {what: pairs.estimate([run.rate(what) for run in runs]).median for what in ("updates", "heap_actions")}
        besides = f"\n{'':<33} {others['updates']:,.0f} pushes/s, {others['heap_actions']:,.0f} heap actions/s"
        rows.append(row(f"{WORKERS} workers, {name}", [run.rate("events") for run in runs], by, at_least=BAR_EVENTS))
        show(rows[-1], "events/s", besides)
    return rows


def many(number: int, each: int) -> list[pairs.Row]:
    """Measure wall time and memory of a command with 10,000 workers."""
    rows = []
    for strategy in ("async", "sync"):
        steps = each * (MANY_WORKERS if strategy == "async" else 1)
        with pairs.Disturbance() as by:
            runs = [command(strategy, MANY_WORKERS, steps, []) for _ in range(number)]
        name = f"10,000 x {each} pushes, {strategy}"
        rows.append(row(name, [run.seconds for run in runs], by, at_most=BAR_SECONDS))
        show(rows[-1], "s")
        rows.append(row(f"{name} memory", [run.peak_gib for run in runs], by, at_most=BAR_GIB))
        show(rows[-1], "GiB")
    return rows


def simulated_seconds(config: RunConfig) -> float:
    """Return the seconds of a simulated run with real gradients, without loading and evaluation."""
    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stderr(io.StringIO()):
        _, result = simulate(RunConfig(**{**vars(config), "runs": runs}), Console(quiet=True))
    return float(result["wall_seconds"])


class BareLoop:
    """The same gradients on the same batches, for the workers in turn."""

    def __init__(self, config: RunConfig) -> None:
        config = resolve(config)
        location = locate_data(config)
        assert location is not None
        dataset = load(location)
        self._tasks = [make_task(config, dataset) for _ in range(REAL_WORKERS)]
        work = work_of(self._tasks[0], config)
        self._loaders = []
        for worker, task in enumerate(self._tasks):
            self._loaders.append(task.loader(work.batches(worker, config), config.seed, worker))
            task.bind(task.initial(), torch.zeros(task.layout.size), torch.zeros(task.state_size))
        self._steps = config.steps or 0

    def seconds(self) -> float:
        begun = time.perf_counter()
        for step in range(self._steps):
            number, worker = divmod(step, REAL_WORKERS)
            self._tasks[worker].gradient(self._loaders[worker].batch(number))
        return time.perf_counter() - begun


def real(number: int, steps: int, say: Callable[[str], None] | None) -> pairs.Row:
    """Compare a simulated run with its gradients alone."""
    config = RunConfig(dataset=SAMPLE, strategy="async", rule="plain", workers=REAL_WORKERS, steps=steps, threads=1)
    bare = BareLoop(config)
    simulated_seconds(config)
    row = pairs.compare(
        "LeNet5, 4", lambda: simulated_seconds(config), bare.seconds, number, at_most=BAR_RATIO, say=say
    )
    print(pairs.table([row], f"{steps} gradients, s"))
    return row


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parsed = parser.parse_args()
    number, quick = pairs.num_pairs(parsed), parsed.quick
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], list[pairs.Row]]] = {
        "events": lambda: events(number, QUICK_PUSHES if quick else PUSHES),
        "many": lambda: many(min(number, 3), QUICK_PUSHES_EACH if quick else PUSHES_EACH),
        "real": lambda: [real(number, QUICK_STEPS if quick else STEPS, pairs.teller(parsed, "real"))],
    }
    rows = [row for name in PARTS if parsed.only in (None, name) for row in parts[name]()]
    print(pairs.disturbed(rows))
    return pairs.close(parsed, "simulator", rows)


if __name__ == "__main__":
    sys.exit(main())
