"""Time from the command to the first push of `paceline train` with 2 and 10 workers, compared with `import torch`.

    python benchmarks/startup.py [--pairs N] [--quick] [--json] [--strict]

The three take turns. arrivals.log is polled every 2 ms for the first push; then the run is stopped.
"""

from __future__ import annotations

import subprocess
import sys
import time

import ours
import pairs

FEW, MANY = 2, 10
RATIO_BAR, EXTRA_SECONDS_BAR = 2.5, 2.0
PATIENCE_SECONDS = 120.0


def import_torch() -> float:
    """Return the wall time of a process that only imports torch."""
    begun = time.monotonic()
    command = [sys.executable, "-c", "import torch"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_SECONDS)
    return time.monotonic() - begun


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    number = pairs.num_pairs(parsed)
    sides = {
        "import torch": import_torch,
        f"{FEW} workers": lambda: ours.seconds_to_first_push(FEW),
        f"{MANY} workers": lambda: ours.seconds_to_first_push(MANY),
    }
    with pairs.Disturbance() as by:
        measured = pairs.interleave(sides, number, warm=True, say=pairs.teller(parsed, "seconds"))
    imported, few, many = measured.values()
    ratio = pairs.make_row(f"{FEW} w / import", few, imported, by, at_most=RATIO_BAR)
    extra = pairs.make_row(f"{MANY} w - {FEW} w", many, few, by, at_most=EXTRA_SECONDS_BAR, combine=lambda a, b: a - b)
    print(pairs.table([ratio, extra], "seconds", "figure"))
    return pairs.close(parsed, "startup", [ratio, extra])


if __name__ == "__main__":
    sys.exit(main())
