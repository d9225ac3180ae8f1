"""The step limit of `auto` against steps shortened by a count, in the lab: the goals, an lr sweep, uneven speeds.

    python benchmarks/step_limit.py --data-dir DIR --device cuda                    on a validation split
    python benchmarks/step_limit.py --data-dir DIR --device cuda --test --seeds 5   the test set, read once

6 epochs of Fashion-MNIST, momentum .9, averaged weights, step times with 20 % jitter. `alone` is one worker, `sync`
has 8 and 16 times its lr, with a warm-up. With --csv, runs that the file has are not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cells import Cells, Wanted
from rules import JITTER, config

SLOW_HALF, ONE_SLOW = f"{JITTER}*1,1,1,1,1,3,3,3,3,3", f"{JITTER}*1,1,1,10"
SHARED: dict[str, object] = {"epoch_mode": "shared"}
SWEEP = (0.00125, 0.0025, 0.01, 0.02)
CELLS: dict[str, tuple[int, str, dict[str, object]]] = {
    "8, batch 64, .02": (8, "iid", {"batch_size": 64, "lr": 0.02}),
    **{f"{workers} {split}": (workers, split, {}) for workers in (7, 16, 32, 64) for split in ("iid", "labels")},
    **{f"{workers}, lr {lr:g}": (workers, "iid", {"lr": lr}) for workers in (4, 8, 16) for lr in SWEEP},
    **{f"10 uneven {split}": (10, split, SHARED | {"speeds": SLOW_HALF}) for split in ("iid", "labels")},
    **{f"4, one slow, {split}": (4, split, SHARED | {"speeds": ONE_SLOW}) for split in ("iid", "labels")},
}
ENTRIES: dict[str, dict[str, object]] = {
    "auto": {},
    "auto, no warm-up": {"warmup": 0.0001},
    "auto-counted": {"rule": "auto-counted"},
}
SYNC: dict[str, object] = {"strategy": "sync", "average": "on", "warmup": 0.1}
SYNC_LR, MANY = (8, 16), 16  # times the lr of one worker, from so many workers on


def wanted(model: str, seeds: int, is_test: bool) -> list[Wanted]:
    """Return the runs of a model, `alone` at the lr of every cell included."""
    more: dict[str, object] = {} if is_test else {"validation": 0.1}
    found = []
    for cell, (workers, split, settings) in CELLS.items():
        for seed in range(seeds):
            for entry, rule in ENTRIES.items():
                found.append(
                    Wanted(f"{model} {entry}", cell, config(model, workers, split, seed, settings | rule | more))
                )
            for times in SYNC_LR if workers >= MANY and not settings and split == "iid" else ():
                one = config(model, workers, split, seed, SYNC | {"lr": 0.005 * times} | more)
                found.append(Wanted(f"{model} sync, lr x {times}", cell, one))
            own = {name: value for name, value in settings.items() if name in ("lr", "batch_size")}
            alone = config(model, 1, "iid", seed, own | more | {"average": "on"})
            found.append(Wanted(f"{model} alone", cell, alone))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", default="lenet5,cnn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="cells whose name begins with this [all]")
    parser.add_argument("--test", action="store_true", help="train on all data, and read the test set")
    parser.add_argument("--csv", type=Path, help="append every result here as it comes")
    parsed = parser.parse_args()
    for model in parsed.models.split(","):
        runs = [one for one in wanted(model, parsed.seeds, parsed.test) if one.cell.startswith(parsed.only or "")]
        cells = Cells(parsed.csv)
        cells.run(runs, parsed.data_dir, parsed.device, "test" if parsed.test else "validation")
        print(f"\n{model}")
        cells.show(runs)
        cells.compare(runs, f"{model} alone")


if __name__ == "__main__":
    main()
