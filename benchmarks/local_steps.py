"""Accuracy that local steps cost and exchanges that they save: LeNet5 on Fashion-MNIST, 5 workers, versus `sync`.

    python benchmarks/local_steps.py --data-dir DIR [--steps H] [--epochs E] [--seeds N] [--only NAME ...] [--quick]

Every cell is a `paceline simulate` per seed, so that other programs do not disturb the figures: steps of 5 ms with
20 % jitter, on a link of 100 Mbit/s and 1 ms. The weights are those of real processes. All rows average their weights
(`--average on`), so that like is compared with like.
With --quick it trains one epoch on the built-in sample, only to test the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from paceline.reports.tables import table
from paceline.system.strict_json import to_json

WORKERS = 5
SPLITS = ("iid", "labels")
CLUSTER = ["--speeds", "lognormal:5ms,.2", "--link", "100mbit,1ms", "--threads", "1"]
ROWS = {
    "sync": ["--strategy", "sync"],
    "sync, lr x 5": ["--strategy", "sync", "--scale-lr", "auto"],
    "async": ["--strategy", "async"],
    "local": ["--strategy", "local:{steps}"],
    "diloco": ["--strategy", "diloco:{steps}"],
    "async-local": ["--strategy", "async-local:{steps}"],
}


def trained(words: list[str]) -> dict[str, Any]:
    """Return the result of one simulated run."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "paceline", "simulate", *CLUSTER, *words, "--runs", runs, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"paceline ended with exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


def line(name: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a row of the table: accuracy by split, then the cost of the exchanges."""
    accuracies = []
    for results in found.values():
        values = [result["test_accuracy"] for result in results]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        accuracies.append(f"{statistics.mean(values):.2f}{spread}")
    some = next(iter(found.values()))[0]
    moved = (some["bytes_pushed"] + some["bytes_pulled"]) / 1e6
    share = statistics.mean(worker["computing"] for worker in some["utilisation"])
    return [name, *accuracies, str(some["updates"]), f"{moved:,.0f}", f"{some['virtual_seconds']:.0f}", f"{share:.0%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds Fashion-MNIST [where paceline looks]")
    parser.add_argument("--steps", type=int, default=20, help="local steps for one push [20]")
    parser.add_argument("--epochs", type=float, help="[6; with --quick 1]")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell, seeds 0, 1, ... [1]")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows by name", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one epoch of the built-in sample: to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parsed = parser.parse_args()
    epochs = parsed.epochs or (1.0 if parsed.quick else 6.0)
    data = ["--dataset", "fashion-mnist-sample" if parsed.quick else "fashion-mnist", "--model", "lenet5"]
    data += ["--data-dir", parsed.data_dir] if parsed.data_dir is not None and not parsed.quick else []
    common = [*data, "--workers", str(WORKERS), "--epochs", str(epochs), "--average", "on"]
    lines, rows = [], []
    for name in parsed.only:
        words = [word.format(steps=parsed.steps) for word in ROWS[name]]
        found = {
            split: [trained([*common, *words, "--split", split, "--seed", str(seed)]) for seed in range(parsed.seeds)]
            for split in SPLITS
        }
        lines.append(line(words[1] if words[-1] == words[1] else name, found))
        rows += [{"row": name, **result} for results in found.values() for result in results]
        print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    head = ["test accuracy, % (averaged weights)", *SPLITS, "updates", "MB moved", "virtual s", "computing"]
    print(table(head, lines))
    print(f"{WORKERS} workers, {epochs:g} epochs, {parsed.seeds} seed(s)")
    if parsed.json:
        print(to_json({"benchmark": "local_steps", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
