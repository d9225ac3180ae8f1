"""Bytes that codecs save and accuracy that they cost: simulated runs of 5 workers, with and without a codec.

    python benchmarks/codec_accuracy.py [--data-dir DIR] [--dataset NAME] [--models lenet5,cnn]
                                        [--codecs int8,lowrank:4] [--both] [--strategy async]
                                        [--epochs 6] [--seeds N] [--quick] [--json]

Bytes are those sent. With --both, replies are encoded too. With --quick it trains a tenth of an epoch on the built-in
sample, only to test the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from paceline.config import RunConfig
from paceline.data.datasets import SAMPLE
from paceline.errors import PacelineError
from paceline.reports.console import Console
from paceline.reports.tables import table
from paceline.simulation.run import simulate
from paceline.system.strict_json import to_json

WORKERS, MOST_LOST = 5, 0.5
"""Number of workers, and the points of test accuracy that `int8` and `lowrank:4` may lose."""


@dataclass(frozen=True)
class Row:
    """One model with one codec: accuracies by seed, bytes of one run."""

    model: str
    codec: str
    pull_codec: str
    accuracies: tuple[float, ...]
    bytes_pushed: int
    bytes_pulled: int

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)


def trained(config: RunConfig, seeds: int) -> Row:
    """Train the same config with several seeds."""
    found: list[dict[str, Any]] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as runs:
            _, result = simulate(dataclasses.replace(config, seed=seed, runs=runs), Console(quiet=True))
        found.append(result)
    accuracies = tuple(result["test_accuracy"] for result in found)
    names = found[0]["codec"], found[0]["pull_codec"]
    return Row(config.model, *names, accuracies, found[0]["bytes_pushed"], found[0]["bytes_pulled"])


def cells(row: Row, plain: Row) -> list[str]:
    """Return a line of the table, relative to the run without a codec."""
    lost = [one - other for one, other in zip(plain.accuracies, row.accuracies, strict=True)]
    both = row.bytes_pushed + row.bytes_pulled
    spread = f"{min(lost):+.2f}..{max(lost):+.2f}" if len(lost) > 1 else ""
    return [
        row.model,
        row.codec,
        row.pull_codec,
        f"{row.accuracy:.2f}",
        f"{plain.accuracy - row.accuracy:+.2f}" if row is not plain else "-",
        spread if row is not plain else "",
        f"{row.bytes_pushed / 1e6:,.1f}",
        f"{row.bytes_pulled / 1e6:,.1f}",
        f"{both / 1e6:,.1f}",
        f"{plain.bytes_pushed / row.bytes_pushed:.1f}",
        f"{(plain.bytes_pushed + plain.bytes_pulled) / both:.1f}",
    ]


def tell(row: Row) -> None:
    """Print the accuracy of a finished row."""
    print(f"{row.model}, codec {row.codec}, pull codec {row.pull_codec}: {row.accuracy:.2f} %", file=sys.stderr)


HEADER = ["model", "codec", "pull", "accuracy % avg", "lost", "by seed", "MB pushed", "pulled", "both"]
HEADER += ["times fewer pushed", "both ways"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="folder that holds Fashion-MNIST [where paceline looks]")
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--models", default="lenet5,cnn", help="models, with commas [lenet5,cnn]")
    parser.add_argument("--codecs", default="int8,lowrank:4", help="codecs, with commas [int8,lowrank:4]")
    parser.add_argument("--both", action="store_true", help="encode replies by the same codec too")
    parser.add_argument("--strategy", default="async")
    parser.add_argument("--epochs", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, seeds 0, 1, ... [1]")
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch of the sample, LeNet5 alone")
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    asked = parser.parse_args()
    base = RunConfig(
        dataset=SAMPLE if asked.quick else asked.dataset,
        data_dir=None if asked.quick else asked.data_dir,
        strategy=asked.strategy,
        workers=WORKERS,
        epochs=0.1 if asked.quick else asked.epochs,
        threads=1,
        average="on",
        speeds="lognormal:1s,.3",
        checkpoint_every=1e9,
    )
    rows: list[Row] = []
    try:
        for model in ["lenet5"] if asked.quick else asked.models.split(","):
            plain = trained(dataclasses.replace(base, model=model), asked.seeds)
            rows.append(plain)
            tell(plain)
            for codec in asked.codecs.split(","):
                for pull in ("none", codec) if asked.both else ("none",):
                    row = trained(dataclasses.replace(base, model=model, codec=codec, pull_codec=pull), asked.seeds)
                    rows.append(row)
                    tell(row)
    except PacelineError as error:
        print(f"codec_accuracy: {error}", file=sys.stderr)
        return error.exit_code
    plain_of = {row.model: row for row in rows if row.codec == row.pull_codec == "none"}
    print(table(HEADER, [cells(row, plain_of[row.model]) for row in rows]))
    print(f"{base.dataset}, {WORKERS} workers, {asked.strategy}, epochs {base.epochs:g}, seeds {asked.seeds}")
    print(f"at most {MOST_LOST} points may be lost")
    if asked.json:
        print(to_json([dataclasses.asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
