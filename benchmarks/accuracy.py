"""Compare test accuracy on the full Fashion-MNIST with published figures: 6 epochs per worker over its own data.

    python benchmarks/accuracy.py --data-dir DIR [--seeds N] [--quick] [--json] [--strict]

LeNet5, batch 32, SGD with lr .005 and momentum .9. With --quick it trains one epoch, only to test the script.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ours
import pairs
from processes import ended

from paceline.data.datasets import locate
from paceline.errors import PacelineError

PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class Published:
    """A row of the published table and the range that our accuracy must reach."""

    strategy: str
    workers: int
    accuracy: float
    bar: float
    tolerance: float


TABLE = (
    Published("classic", 1, 89.20, 89.2, 0.7),
    Published("sync", 2, 87.54, 87.5, 1.0),
    Published("async", 2, 89.01, 89.0, 1.0),
)
SETTINGS = "--dataset fashion-mnist --model lenet5 --split iid --epoch-mode own --batch-size 32 --lr .005 --momentum .9"
PUBLISHED_RULE = ["--rule", "plain", "--average", "none"]


def trained(row: Published, data_dir: str | None, epochs: int, seed: int) -> float:
    """Train once and return the test accuracy of the live weights in percent, as the published ones."""
    with tempfile.TemporaryDirectory() as runs:
        words = ["--strategy", row.strategy, "--workers", str(row.workers), "--epochs", str(epochs)]
        place = ["--data-dir", data_dir] if data_dir is not None else []
        command = [
            *ours.COMMAND,
            *SETTINGS.split(),
            *PUBLISHED_RULE,
            *words,
            *place,
            "--seed",
            str(seed),
            "--runs",
            runs,
            "--json",
        ]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with ended([process]):
            out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        if process.returncode:
            raise RuntimeError(f"paceline ended with exit code {process.returncode}: run it by hand to see why")
        accuracy: float = json.loads(out)["test_accuracy"]
        return accuracy


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds Fashion-MNIST [where paceline looks]")
    parser.add_argument("--seeds", type=int, help="runs of each row, seeds 0, 1, ... (also --pairs) [1]")
    parsed = parser.parse_args()
    seeds, epochs = parsed.seeds or parsed.pairs or 1, 1 if parsed.quick else 6
    try:
        location = locate("fashion-mnist", Path(parsed.data_dir) if parsed.data_dir is not None else None)
    except PacelineError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    if location.sample:
        print(
            "accuracy: only the built-in sample of Fashion-MNIST was found, and the published figures are of all of "
            "it: 'paceline data get fashion-mnist' fetches it, or give --data-dir",
            file=sys.stderr,
        )
        return 2
    print(f"{'test %, live':<18} {'ours':>7} {'spread':>14} {'published':>10} {'bar':>12} verdict")
    rows = []
    for published in TABLE:
        with pairs.Disturbance() as by:
            found = [trained(published, parsed.data_dir, epochs, seed) for seed in range(seeds)]
        rows.append(judged(published, found, by, epochs))
        spread = f"{min(found):.2f}..{max(found):.2f}"
        band = f"{published.bar:.1f} +- {published.tolerance:.1f}"
        figures = f"{statistics.median(found):>7.2f} {spread:>14} {published.accuracy:>10.2f} {band:>12}"
        print(f"{rows[-1].name:<18} {figures} {rows[-1].disposition}", flush=True)
    print(f"epochs {epochs}, seeds {seeds}")
    return pairs.close(parsed, "accuracy", rows, epochs=epochs)


def judged(published: Published, found: list[float], by: pairs.Disturbance, epochs: int) -> pairs.Row:
    """Return one row; missed if every seed is outside the range on the same side. One epoch is not judged."""
    low, high = published.bar - published.tolerance, published.bar + published.tolerance
    seen = pairs.estimate(found)
    disposition = pairs.judge(seen, at_least=low, at_most=high) if epochs == 6 else "not judged"
    name = f"{published.strategy}, {published.workers} worker{'s' if published.workers > 1 else ''}"
    bar = f"{low:g}..{high:g}"
    taken = by.steal_percent, by.others_percent
    return pairs.Row(name, seen.median, published.accuracy, seen, bar, disposition, *taken, len(found))


if __name__ == "__main__":
    sys.exit(main())
