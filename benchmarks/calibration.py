"""Compare predicted with real throughput: `simulate --like` a 2-worker async run, for other settings than its own.

    python benchmarks/calibration.py [--pairs N] [--quick] [--json] [--strict] [--model NAME]

Each round first trains the run to fit, then every other setting, and compares with the prediction of that fit.
slow: the last worker sleeps 10 ms before each push.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pairs

from paceline.cli.main import main as paceline

TOLERANCE = 0.15
SAMPLES = {"lenet5": 48_000, "cnn": 7_000}


@dataclass(frozen=True)
class Setting:
    """One local configuration."""

    name: str
    flags: tuple[str, ...]


FITTED = Setting("async-2 fitted", ("--strategy", "async", "--workers", "2"))
PREDICTED = (
    Setting("sync-2", ("--strategy", "sync", "--workers", "2")),
    Setting("async-4", ("--strategy", "async", "--workers", "4")),
    Setting("sync-4", ("--strategy", "sync", "--workers", "4")),
    Setting("async-2-slow", ("--strategy", "async", "--workers", "2", "--delay", "10ms@1")),
    Setting("sync-2-slow", ("--strategy", "sync", "--workers", "2", "--delay", "10ms@1")),
    Setting("bounded-3-slow", ("--strategy", "bounded:2", "--workers", "3", "--delay", "10ms@2")),
)


def result_of(verb: str, folder: Path, name: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run a verb quietly and return its result."""
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        code = paceline([verb, "--runs", str(folder), "--name", name, *flags])
    if code:
        raise RuntimeError(f"paceline {verb} {' '.join(flags)} ended with {code}: {silence.getvalue()}")
    result: dict[str, Any] = json.loads((folder / name / "result.json").read_text())
    return result


def one_round(model: str, settings: tuple[Setting, ...]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (predicted, real) for each setting."""
    epochs = str(SAMPLES.get(model, 20_000) / 12_000)
    common = ("--dataset", "fashion-mnist-sample", "--model", model, "--threads", "1", "--epochs", epochs)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result_of("train", folder, "fitted", (*common, *FITTED.flags))
        for number, setting in enumerate(settings):
            real = result_of("train", folder, f"real-{number}", (*common, *setting.flags))
            like = ("--like", str(folder / "fitted"), "--timing-only", "--epochs", epochs)
            found.append((result_of("simulate", folder, f"predicted-{number}", (*like, *setting.flags)), real))
    return found


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--model", default="lenet5", help="lenet5 or cnn")
    parsed = parser.parse_args()
    say = pairs.teller(parsed, "round")
    rounds = []
    with pairs.Disturbance() as by:
        for number in range(pairs.num_pairs(parsed)):
            rounds.append(one_round(parsed.model, (FITTED, *PREDICTED)))
            if say is not None:
                say(f"{number + 1}")
    rows = []
    print(f"{'mean staleness':<15}{'predicted':>10}{'real':>8}")
    for number, setting in enumerate((FITTED, *PREDICTED)):
        predicted, real = zip(*(one[number] for one in rounds), strict=True)
        ages = [statistics.median(r["staleness"]["mean"] for r in side) for side in (predicted, real)]
        print(f"{setting.name:<15}{ages[0]:>10.2f}{ages[1]:>8.2f}")
        rates = [[float(r["samples_per_second"]) for r in side] for side in (predicted, real)]
        if setting is FITTED:
            rows.append(pairs.make_row(setting.name, *rates, by))
        else:
            bars = {"at_least": 1.0 - TOLERANCE, "at_most": 1.0 + TOLERANCE}
            rows.append(pairs.make_row(setting.name, *rates, by, **bars))
    print(pairs.table(rows, "samples/s", sides=("predicted", "real")))
    return pairs.close(parsed, "calibration", rows, model=parsed.model)


if __name__ == "__main__":
    sys.exit(main())
