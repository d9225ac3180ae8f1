"""Cost of copying a run to an object store behind it: samples per second with and without, in turn.

    python benchmarks/object_store.py [--pairs N] [--quick] [--json] [--strict] [--verbose]

LeNet5, `async`, 2 workers, a checkpoint every 2 s on both sides. The store is a folder behind fsspec that answers at
once, takes half a second for each call, or fails at every write after the start. Also: how far the copy is behind.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import odd_store
import ours
import pairs
from processes import LEAST_STEPS, common_rate, end

SECONDS, QUICK_SECONDS = 8.0, 3.0
SLOW_SECONDS = 0.5
LEAST_RATIO = 0.95
STORES = {"prompt": (0.0, False), "slow": (SLOW_SECONDS, False), "failing": (0.0, True)}


def rate(seconds: float, place: Path | None = None, wait: float = 0.0, fails: bool = False) -> float:
    """Return the samples per second of a run; with `place`, copied to a store that waits or fails."""
    mirror = ["--mirror", f"odd://{tempfile.mkdtemp(dir=place)}"] if place is not None else []
    words = [*ours.ENDLESS, "--checkpoint-every", "2", *mirror]
    with ours.running("async", "lenet5", 2, 1, words) as run:
        run.wait_for_pushes(1)
        if place is not None:
            odd_store.control(place, wait, fails)
        time.sleep(seconds)
        run.wait_for_pushes(2 * LEAST_STEPS)
        if place is not None:
            odd_store.control(place)
        end(run.process)
        return common_rate(run.steps())


def lag(place: Path, seconds: float, wait: float) -> list[float]:
    """Return the bytes by which the log in the store was behind the run, twice a second, after its first pass."""
    remote, found = Path(tempfile.mkdtemp(dir=place)), []
    with ours.running("async", "lenet5", 2, 1, [*ours.ENDLESS, "--mirror", f"odd://{remote}"]) as run:
        run.wait_for_pushes(1)
        odd_store.control(place, wait)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.5)
            manifests = sorted(remote.glob("run/0*/manifests/*.json"))
            if manifests:
                parts = json.loads(manifests[-1].read_text())["files"]["arrivals.log"]
                found.append(float(run.log.stat().st_size - sum(nbytes for nbytes, _ in parts)))
        odd_store.control(place)
    return found


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    seconds = QUICK_SECONDS if parsed.quick else SECONDS
    number, rows = pairs.num_pairs(parsed), []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ.update(odd_store.environment_for(place))
        for name, (wait, fails) in STORES.items():
            row = pairs.compare(
                name,
                lambda wait=wait, fails=fails: rate(seconds, place, wait, fails),  # type: ignore[misc]
                lambda: rate(seconds),
                number,
                at_least=LEAST_RATIO,
                say=pairs.teller(parsed, name),
            )
            rows.append(row)
        print(pairs.table(rows, "samples/s", sides=("with", "without")))
        for name, wait in (("prompt", 0.0), ("slow", SLOW_SECONDS)):
            behind = pairs.estimate([nbytes / 36 for nbytes in lag(place, 2 * seconds, wait)])
            print(f"log in the {name} store: {behind.median:,.0f} records behind (median), {behind.most:,.0f} at most")
    return pairs.close(parsed, "object_store", rows)


if __name__ == "__main__":
    sys.exit(main())
