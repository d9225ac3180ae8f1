"""Replay real async runs of 3 workers, one of them repeatedly stopped and resumed, and compare the weight hashes.

    python benchmarks/replay.py [--pairs RUNS] [--quick] [--json] [--strict]

A worker stopped by SIGSTOP pushes very stale gradients after SIGCONT, at times that no seed determines. The replay
computes every push again in one process, in the order of arrivals.log.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import ours
import pairs
from memory import family

from paceline.system.strict_json import to_json

WORKERS = 3
STEPS, QUICK_STEPS = 1200, 300
RUNS, QUICK_RUNS = 5, 2
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Replayed:
    """One run and its replay."""

    run: int
    pushes: int
    stops: int
    max_staleness: int
    sha256: str
    replay_sha256: str

    @property
    def identical(self) -> bool:
        return self.sha256 == self.replay_sha256


def harassed(run: ours.Run, rng: random.Random) -> int:
    """Stop and resume the first worker at random times until the run ends; return how often."""
    run.wait_for_pushes(1)
    _, _, _, victim, *_ = sorted(family(run.process.pid))  # the command, the fork server, the server, the workers
    for stops in itertools.count():
        if run.process.poll() is not None:
            return stops
        try:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(rng.uniform(0.02, 0.2))
            os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            run.process.wait(PATIENCE_SECONDS)
            return stops
        time.sleep(rng.uniform(0.02, 0.3))
    raise AssertionError("a count has no end")


def replayed(number: int, steps: int) -> Replayed:
    """Train one run and replay it."""
    settings = ["--steps", str(steps), "--seed", str(number)]
    with ours.running("async", "lenet5", WORKERS, 1, settings) as run:
        stops = harassed(run, random.Random(number))
        if run.process.returncode:
            run.check_alive()
        result = json.loads((run.folder / "result.json").read_text())
        command = [sys.executable, "-m", "paceline", "replay", str(run.folder), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
        pushes = sum(len(counted) for counted in run.steps().values())
    if not done.stdout:
        raise RuntimeError(f"the replay ended with exit code {done.returncode}: {done.stderr[-500:]}")
    again = json.loads(done.stdout)
    staleness = result["staleness"]["max"]
    return Replayed(number, pushes, stops, staleness, result["weights_sha256"], again["weights_sha256"])


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    runs = parsed.pairs or (QUICK_RUNS if parsed.quick else RUNS)
    print(f"{'run':>3} {'pushes':>7} {'stops':>6} {'max staleness':>14} {'weights of the run':>19} {'identical':>10}")
    rows = []
    for number in range(runs):
        row = replayed(number, QUICK_STEPS if parsed.quick else STEPS)
        rows.append(row)
        figures = f"{row.run:>3} {row.pushes:>7} {row.stops:>6} {row.max_staleness:>14}"
        print(f"{figures} {row.sha256[:16]:>19} {'yes' if row.identical else 'NO':>10}", flush=True)
    same = sum(row.identical for row in rows)
    print(f"{same} of {runs}")
    if parsed.json:
        print(to_json({"benchmark": "replay", "rows": [asdict(row) for row in rows], "identical": same}))
    return int(parsed.strict and same < runs)


if __name__ == "__main__":
    sys.exit(main())
