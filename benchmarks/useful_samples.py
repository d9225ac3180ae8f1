"""How far a strategy gets with its samples, as a share of those that one worker needs to get as far.

    python benchmarks/useful_samples.py --csv FILE [--seeds 0,1] [--only NAME]     simulate, append every run to FILE
    python benchmarks/useful_samples.py --from FILE                                 shares, fits and their errors

LeNet5 on the built-in sample (10,800 images to train on, 1,200 to validate), batch 32, momentum .9, step times with
20 % jitter, averaged weights. `alone` is one worker with fewer samples, whose accuracies are the scale.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rule_constants import config_of, trained

from paceline.data.datasets import load, locate

ALONE_EPOCHS = (0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 12.0)
EPOCHS, WORKERS, RATES = (1.5, 6.0), (2, 4, 8, 16, 32), (0.005, 0.01)
STRATEGIES: dict[str, dict[str, object]] = {
    "async": {"strategy": "async"},
    "sync": {"strategy": "sync"},
    "sync, lr x n": {"strategy": "sync", "scale_lr": "auto"},
    "local:16": {"strategy": "local:16"},
    "local:16, lr x n": {"strategy": "local:16", "scale_lr": "auto"},
    "diloco:16": {"strategy": "diloco:16"},
    "async-local:16": {"strategy": "async-local:16"},
}


class Run(NamedTuple):
    """One run: what was trained, and the validation accuracy of its averaged weights."""

    name: str
    workers: int
    lr: float
    epochs: float
    seed: int
    accuracy: float


def wanted(seeds: list[int]) -> Iterator[tuple[str, dict[str, object], float, float, int]]:
    """Yield name, settings, lr, epochs and seed of every run."""
    for seed in seeds:
        for lr in RATES:
            for epochs in ALONE_EPOCHS:
                yield "alone", {"strategy": "classic", "workers": 1}, lr, epochs, seed
            for epochs in EPOCHS:
                for workers in WORKERS:
                    for name, settings in STRATEGIES.items():
                        yield name, {**settings, "workers": workers}, lr, epochs, seed


def simulate(file: Path, seeds: list[int], only: str) -> None:
    """Run what the file does not hold yet, and append it."""
    dataset, known = load(locate("fashion-mnist-sample", None)), {run[:5] for run in read(file)}
    with file.open("a", newline="") as stream:
        for name, settings, lr, epochs, seed in wanted(seeds):
            workers = int(str(settings["workers"]))
            if (name, workers, lr, epochs, seed) in known or not name.startswith(only):
                continue
            config = config_of(seed, {**settings, "lr": lr, "average": "on", "epochs": epochs})
            server, accuracy = trained(config, dataset)
            finite = bool(torch.isfinite(server.evaluated).all())
            run = Run(name, workers, lr, epochs, seed, accuracy(server.evaluated) if finite else math.nan)
            csv.writer(stream).writerow(run)
            stream.flush()
            print(*run, flush=True)


def read(file: Path) -> list[Run]:
    """Read the runs of a file."""
    if not file.exists():
        return []
    with file.open(newline="") as stream:
        return [
            Run(name, int(workers), float(lr), float(epochs), int(seed), float(accuracy))
            for name, workers, lr, epochs, seed, accuracy in csv.reader(stream)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", default="", help="strategies whose name begins with this [all]")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    simulate(parsed.csv, [int(seed) for seed in parsed.seeds.split(",")], parsed.only)


if __name__ == "__main__":
    main()
