"""How far a strategy gets with its samples, as a share of those that one worker needs to get as far.

    python benchmarks/useful_samples.py --csv FILE [--seeds 0,1] [--only NAME]     simulate, append every run to FILE
    python benchmarks/useful_samples.py --from docs/figures/useful_samples.csv      shares, fits and their errors

LeNet5 on the built-in sample (10,800 images to train on, 1,200 to validate), batch 32, momentum .9, step times with
20 % jitter, averaged weights. `alone` is one worker with fewer or more samples, whose accuracies are the scale.
`paceline plan` uses the fit.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rule_constants import config_of, trained

from paceline.assembly.efficiency import statistical_efficiency
from paceline.config import RunConfig
from paceline.data.datasets import load, locate

ALONE_EPOCHS = (0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 12.0)
SAMPLES, BATCH_SIZE = 10_800, 32
LEARNED = 30.0  # below this accuracy a run has not left its start, or was lost
EPOCHS, WORKERS, RATES = (1.5, 6.0), (2, 4, 8, 16, 32), (0.005, 0.01)
STRATEGIES: dict[str, dict[str, object]] = {
    "async": {"strategy": "async"},
    "sync": {"strategy": "sync"},
    "sync, lr x n": {"strategy": "sync", "scale_lr": "auto"},
    "sync, lr x 8": {"strategy": "sync", "scale_lr": "8"},
    "local:16": {"strategy": "local:16"},
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
                        if name.endswith("x 8") and workers <= 8:
                            continue
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


def shares(runs: list[Run]) -> Iterator[tuple[Run, float]]:
    """Yield each kind of run that learned something, with the share of its samples that count: means over seeds."""
    means: dict[tuple[str, int, float, float], float] = {}
    for run in runs:
        cell = [other.accuracy for other in runs if other[:4] == run[:4]]
        means[run[:4]] = sum(cell) / len(cell)
    for (name, workers, lr, epochs), accuracy in means.items():
        alone = sorted((run[3], mean) for run, mean in means.items() if run[0] == "alone" and run[2] == lr)
        if name != "alone" and accuracy >= LEARNED:
            reached = np.maximum.accumulate([mean for _, mean in alone])
            needed = math.exp(np.interp(accuracy, reached, np.log([length for length, _ in alone])))
            yield Run(name, workers, lr, epochs, 0, accuracy), needed / epochs


def report(runs: list[Run]) -> None:
    """Print each share beside that of `statistical_efficiency`, and for each strategy by which factor it is off."""
    errors: dict[str, list[float]] = {}
    print(f"{'':20}{'workers':>8}{'lr':>7}{'epochs':>8}{'accuracy':>10}{'count':>7}{'fit':>7}")
    for run, share in shares(runs):
        settings: dict[str, Any] = {**STRATEGIES[run.name], "workers": run.workers, "momentum": 0.9}
        fit = statistical_efficiency(RunConfig(**settings), run.epochs * SAMPLES / BATCH_SIZE)
        errors.setdefault(run.name, []).append(math.log(share / fit))
        figures = f"{run.lr:7.3f}{run.epochs:8.1f}{run.accuracy:10.1f}{share:7.2f}{fit:7.2f}"
        print(f"{run.name:20}{run.workers:8}{figures}")
    for name, found in errors.items():
        rms, worst = math.sqrt(sum(one * one for one in found) / len(found)), max(map(abs, found))
        print(
            f"{name}: {len(found)} cells, off by a factor of {math.exp(rms):.2f} (rms), {math.exp(worst):.2f} at most"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("useful_samples.csv"), help="[useful_samples.csv]")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", default="", help="strategies whose name begins with this [all]")
    parser.add_argument("--from", type=Path, dest="source", help="report the runs of this file, make none")
    parsed = parser.parse_args()
    if parsed.source is not None:
        report(read(parsed.source))
        return
    torch.set_num_threads(1)
    simulate(parsed.csv, [int(seed) for seed in parsed.seeds.split(",")], parsed.only)


if __name__ == "__main__":
    main()
