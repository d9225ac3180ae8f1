"""Sensitivity of the published asynchronous rows to unequal worker speeds, which prevents a close reproduction.

    python benchmarks/published_timing.py --data-dir DIR --device cuda

It runs the published rows with skewed labels, with the reply after and before the push is applied, and with workers
whose speeds differ by 0, 0.5, 1 and 3 percent between the fastest and the slowest. Each worker makes its own epochs, so
the slowest ends alone and pulls the final weights towards its labels.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cells import Cells, Wanted

from paceline.studies.published.optml import choose_rows

SPREADS = (0.0, 0.005, 0.01, 0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", default="22,28,34,36,40,23,29,49")
    parser.add_argument("--rules", default="plain,plain-early")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="append every result here as it comes")
    parsed = parser.parse_args()
    wanted = []
    for row in choose_rows(parsed.rows):
        for rule in parsed.rules.split(","):
            for spread in SPREADS:
                for seed in range(parsed.seeds):
                    base = row.config(seed, 6.0, None, "runs")
                    last = max(1, row.workers - 1)
                    factors = ",".join(f"{1.0 + spread * number / last:.5f}" for number in range(row.workers))
                    one = replace(base, rule=rule, speeds=f"{base.speeds}*{factors}")
                    wanted.append(Wanted(f"{row.name} ({row.test_accuracy})", f"{rule} {100 * spread:g} %", one))
    cells = Cells(parsed.csv)
    cells.run(wanted, parsed.data_dir, parsed.device, "test")
    cells.show(wanted)


if __name__ == "__main__":
    main()
