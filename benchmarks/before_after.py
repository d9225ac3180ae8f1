"""Samples per second of this checkout beside another one, in interleaved pairs: what a refactoring must not slow down.

python benchmarks/before_after.py OTHER/src [--pairs N] [--only NAME]
python benchmarks/before_after.py OTHER/src --flags "--strategy async --workers 15 --steps 9000"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = {
    "async-2": "--strategy async --workers 2 --model lenet5 --steps 900",
    "sync-2": "--strategy sync --workers 2 --model lenet5 --steps 450",
    "async-2-cnn": "--strategy async --workers 2 --model cnn --steps 90",
}
COMMON = "--dataset fashion-mnist-sample --lr 0.005 --seed 1 --score none --json"


def rate(source: Path, flags: str) -> float:
    """Samples per second of one run of a checkout."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "paceline", "train", *COMMON.split(), *flags.split(), "--runs", runs]
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["samples_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the src folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", choices=ROWS, metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--flags", help="measure one run with these flags of 'paceline train' instead")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1] / "src"
    print("| row | before, samples/s | after, samples/s | after / before |\n|---|---|---|---|")
    rows = {options.flags: options.flags} if options.flags else ROWS
    for name in [options.only] if options.only else rows:
        found = []
        for number in range(options.pairs):
            order = (options.before, here) if number % 2 == 0 else (here, options.before)
            rates = {source: rate(source, rows[name]) for source in order}
            found.append((rates[options.before], rates[here]))
        before, after = (statistics.median(side) for side in zip(*found, strict=True))
        ratios = sorted(now / then for then, now in found)
        span = f"{statistics.median(ratios):.3f} ({ratios[0]:.2f}..{ratios[-1]:.2f}, {len(ratios)} pairs)"
        print(f"| {name} | {before:,.0f} | {after:,.0f} | {span} |", flush=True)


if __name__ == "__main__":
    main()
