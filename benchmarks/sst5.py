"""Test accuracy of the transformer on SST-5, trained from scratch, compared with the most frequent class.

    python benchmarks/sst5.py --data-dir DIR [--seeds N] [--strategy sync --workers 2] [--quick] [--json] [--strict]

The learning rate and its schedule were chosen on dev.txt, which no run uses. With --quick it makes 20 updates, only to
test the script.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ours
import pairs
from processes import ended

from paceline.data.datasets import load, locate
from paceline.errors import PacelineError

BAR = 38.0
PATIENCE_SECONDS = 7200.0
SETTINGS = "--dataset sst5 --model transformer --optimizer adam --lr .0003 --epochs 2 --schedule cosine"


def trained(words: list[str], seed: int) -> dict[str, Any]:
    """Train once and return the result."""
    with tempfile.TemporaryDirectory() as runs:
        command = [*ours.COMMAND, *SETTINGS.split(), *words, "--seed", str(seed), "--runs", runs, "--json"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with ended([process]):
            out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        if process.returncode:
            raise RuntimeError(f"paceline ended with exit code {process.returncode}: run it by hand to see why")
        result: dict[str, Any] = json.loads(out)
        return result


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds SST-5 [where paceline looks]")
    parser.add_argument("--seeds", type=int, help="runs, seeds 0, 1, ... (also --pairs) [2]")
    parser.add_argument("--strategy", default="classic")
    parser.add_argument("--workers", default="1")
    parsed = parser.parse_args()
    try:
        whole = load(locate("sst5", Path(parsed.data_dir) if parsed.data_dir is not None else None))
    except PacelineError as error:
        print(f"sst5: {error}", file=sys.stderr)
        return 2
    majority = 100.0 * float((whole.test_labels == np.bincount(whole.train_labels).argmax()).mean())
    words = ["--strategy", parsed.strategy, "--workers", parsed.workers]
    words += ["--data-dir", parsed.data_dir] if parsed.data_dir is not None else []
    words += ["--steps", "20"] if parsed.quick else []
    print(f"paceline train {SETTINGS} {' '.join(words)}")
    print(f"always the most frequent class of the train set: {majority:.2f} %")
    found = []
    with pairs.Disturbance() as by:
        for seed in range(parsed.seeds or parsed.pairs or 2):
            result = trained(words, seed)
            found.append(result["test_accuracy"])
            text = f"test {result['test_accuracy']:.2f} %, train {result['train_accuracy']:.2f} %"
            print(f"seed {seed}: {text}, {result['train_seconds']:.0f} s of training", flush=True)
    seen = pairs.estimate(found)
    disposition = "not judged" if parsed.quick else pairs.judge(seen, at_least=BAR)
    print(f"median {statistics.median(found):.2f} %, at least {BAR:g} % wanted: {disposition}")
    taken = by.steal_percent, by.others_percent
    row = pairs.Row("test accuracy, %", seen.median, majority, seen, f">= {BAR:g}", disposition, *taken, len(found))
    return pairs.close(parsed, "sst5", [row])


if __name__ == "__main__":
    sys.exit(main())
