"""Ablations of constants of the rules, in the lab on a validation split: mean and spread over seeds.

    python benchmarks/rule_constants.py --part finished    the exponent of the averaging while finished workers are missing
    python benchmarks/rule_constants.py --part cap         the cap on a single push's weight in `foresight-fair`

LeNet5 on the built-in sample (10,800 images to train on, 1,200 to validate), batch 32, lr .005, momentum .9, averaged
weights, step times with 20 % jitter. With `--data-dir DIR`, on all of Fashion-MNIST.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cells import Cells, Wanted

from paceline.config import RunConfig
from paceline.core.rules import averaged, foresight

JITTER = "lognormal:1s,.2"
Settings = dict[str, Any]


def one_slow(workers: int, factor: int) -> Settings:
    """The last worker is `factor` times slower than the others."""
    return {"workers": workers, "speeds": f"{JITTER}*{'1,' * (workers - 1)}{factor}"}


FINISHED: dict[str, Settings] = {
    "5 iid": {"workers": 5, "split": "iid"},
    "5 iid, one 3 times slower": {**one_slow(5, 3), "split": "iid"},
    "5 labels": {"workers": 5, "split": "labels"},
    "5 labels, one 3 times slower": {**one_slow(5, 3), "split": "labels"},
    "5 dirichlet:0.1": {"workers": 5, "split": "dirichlet:0.1"},
    "10 dirichlet:0.1": {"workers": 10, "split": "dirichlet:0.1"},
}
"""Every worker makes its own passes over its shard."""


def config(seed: int, settings: Settings) -> RunConfig:
    usual: Settings = {"lr": 0.005, "momentum": 0.9, "strategy": "async", "speeds": JITTER, "validation": 0.1}
    return RunConfig(model="lenet5", seed=seed, epochs=6.0, batch_size=32, threads=1, **(usual | settings))


def ablate(cells: Cells, parsed: argparse.Namespace, entry: str, settings: dict[str, Settings]) -> list[Wanted]:
    """Run every cell and seed with the constants of now, as one line of the table."""
    wanted = [
        Wanted(entry, cell, config(seed, each)) for cell, each in settings.items() for seed in range(parsed.seeds)
    ]
    cells.run(wanted, parsed.data_dir, parsed.device, "validation", parsed.dataset)
    return wanted


def finished(cells: Cells, parsed: argparse.Namespace) -> list[Wanted]:
    """The exponent of live / (live + finished) in the share of an update; 0: finished workers change nothing."""
    own = {cell: {**each, "epoch_mode": "own"} for cell, each in FINISHED.items()}
    wanted = ablate(cells, parsed, "live weights", {cell: {**each, "average": "none"} for cell, each in own.items()})
    for power in (0, 1, 2, 4):
        averaged.POWER = power
        wanted += ablate(cells, parsed, f"exponent {power}", own)
    return wanted


PARTS = {"finished": finished}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=tuple(PARTS))
    parser.add_argument("--data-dir", help="folder of all of Fashion-MNIST [the built-in sample]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="append every result here as it comes")
    parsed = parser.parse_args()
    parsed.dataset = "fashion-mnist" if parsed.data_dir else "fashion-mnist-sample"
    cells = Cells(parsed.csv)
    cells.show(PARTS[parsed.part](cells, parsed))


if __name__ == "__main__":
    main()
