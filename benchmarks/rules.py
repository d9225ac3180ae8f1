"""Every rule on even and skewed data, in the lab: test accuracy, mean and spread over seeds.

    python benchmarks/rules.py --data-dir DIR --device cuda                  the table, on the test set
    python benchmarks/rules.py --data-dir DIR --device cuda --part choose    step sizes, on a validation split
    python benchmarks/rules.py --data-dir DIR --device cuda --part large     30 and 64 workers, on a validation split
    python benchmarks/rules.py --from FILE.csv --figure docs/figures/rules   draw earlier results

6 epochs, batch 32, lr .005, momentum .9, `--epoch-mode own`, step times with 20 % jitter. Weights are averaged, except
in entries marked live. The factors on lr were chosen on the validation split.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cells import Cells, Wanted

from paceline.config import RunConfig

JITTER = "lognormal:1s,.2"
CELLS = [(workers, split) for workers in (5, 10) for split in ("iid", "labels", "dirichlet:0.1")]
TABLE = [
    ("plain, live", {"rule": "plain"}),
    ("plain", {"rule": "plain", "average": "on"}),
    ("damped, lr x 4", {"rule": "damped", "lr": 0.02}),
    ("gap, lr x 4", {"rule": "gap", "lr": 0.02}),
    ("compensated", {"rule": "compensated"}),
    ("dana", {"rule": "dana"}),
    ("dana-slim", {"rule": "dana-slim"}),
    ("cached, lr x 4, no momentum", {"rule": "cached", "lr": 0.02, "momentum": 0.0}),
    ("ringleader", {"rule": "ringleader"}),
    ("buffered:5", {"rule": "buffered:5"}),
    ("ringmaster:10, lr x 0.3", {"rule": "ringmaster:10", "lr": 0.0015}),
    ("foresight-cached", {"rule": "foresight-cached"}),
    ("foresight-cached, lr x 0.7", {"rule": "foresight-cached", "lr": 0.0035}),
    ("foresight", {"rule": "foresight"}),
    ("auto", {}),
    ("sync, live", {"strategy": "sync"}),
    ("sync", {"strategy": "sync", "average": "on"}),
]
FEW = ("plain, live", "dana", "foresight-cached", "foresight", "auto", "sync, live", "sync")
"""Entries of the CNN, fewer to save time."""
SCALES = {"dana": (1.0, 0.7, 0.5), "foresight-cached": (1.0, 0.7, 0.5), "foresight": (1.0, 0.7, 0.5), "gap": (4.0, 2.0)}


def config(model: str, workers: int, split: str, seed: int, settings: dict[str, object]) -> RunConfig:
    usual = {"lr": 0.005, "momentum": 0.9, "strategy": "async", "speeds": JITTER, "epoch_mode": "own", "batch_size": 32}
    return RunConfig(
        model=model,
        workers=workers,
        split=split,
        seed=seed,
        epochs=6.0,
        threads=1,
        **(usual | settings),  # type: ignore[arg-type]
    )


def table(model: str, seeds: int) -> list[Wanted]:
    entries = [one for one in TABLE if model == "lenet5" or one[0] in FEW]
    return [
        Wanted(f"{model} {name}", f"{workers} {split}", config(model, workers, split, seed, settings))
        for name, settings in entries
        for workers, split in CELLS
        for seed in range(seeds)
    ]


def choose(model: str, seeds: int) -> list[Wanted]:
    return [
        Wanted(
            f"{model} {rule} x {scale:g}",
            f"{workers} {split}",
            config(model, workers, split, seed, {"rule": rule, "lr": 0.005 * scale, "validation": 0.1}),
        )
        for rule, scales in SCALES.items()
        for scale in scales
        for workers, split in CELLS
        for seed in range(seeds)
    ]


LARGE = [
    ("auto", {}),
    ("auto, lr x 2", {"lr": 0.01}),
    ("auto, lr x 0.5", {"lr": 0.0025}),
    ("auto, warm-up", {"warmup": 0.1}),
    ("auto, lr x 2, warm-up", {"lr": 0.01, "warmup": 0.1}),
    ("foresight, lr x 0.25", {"rule": "foresight", "lr": 0.00125}),
    ("foresight-cached, lr x 0.25", {"rule": "foresight-cached", "lr": 0.00125}),
    ("dana, lr x 0.25", {"rule": "dana", "lr": 0.00125}),
    ("sync, lr x workers", {"strategy": "sync", "scale_lr": "auto", "average": "on"}),
]


def large(model: str, seeds: int) -> list[Wanted]:
    """Return runs with many workers, and with 10 workers of which half are three times slower, on a shared budget."""
    uneven = {"speeds": f"{JITTER}*1,1,1,1,1,3,3,3,3,3"}
    found = []
    for name, settings in LARGE:
        settings = settings | {"validation": 0.1}
        for seed in range(seeds):
            for split in ("iid", "labels"):
                for workers in (30, 64):
                    one = config(model, workers, split, seed, settings)
                    found.append(Wanted(f"{model} {name}", f"{workers} {split}", one))
                one = replace(config(model, 10, split, seed, settings | uneven), epoch_mode="shared")
                found.append(Wanted(f"{model} {name}", f"10 uneven {split}", one))
    return found


PARTS = {"table": (table, "test"), "choose": (choose, "validation"), "large": (large, "validation")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--part", default="table", choices=tuple(PARTS))
    parser.add_argument("--models", default="lenet5,cnn")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="entries whose name begins with this [all]")
    parser.add_argument("--csv", type=Path, help="append every result here as it comes")
    parser.add_argument("--from", type=Path, dest="source", help="read results from here instead of running")
    parser.add_argument("--figure", help="draw FIGURE_MODEL.png")
    parsed = parser.parse_args()
    if parsed.source is None and parsed.data_dir is None:
        parser.error("give --data-dir to run, or --from to read what was run")
    make, part = PARTS[parsed.part]
    for model in parsed.models.split(","):
        wanted, cells = make(model, parsed.seeds), Cells(parsed.csv)
        if parsed.only:
            wanted = [one for one in wanted if one.entry.startswith(f"{model} {parsed.only}")]
        if parsed.source is not None:
            cells.read(parsed.source, part)
        else:
            cells.run(wanted, parsed.data_dir, parsed.device, part)
        cells.show(wanted)
        if parsed.figure is not None:
            why_not = cells.draw(
                wanted, Path(f"{parsed.figure}_{model}.png"), f"{model}: rules on even and skewed data"
            )
            print(why_not or f"{parsed.figure}_{model}.png")


if __name__ == "__main__":
    main()
