"""Cost of copying a run to an object store behind it: samples per second with and without, in turn.

    python benchmarks/object_store.py [--pairs N] [--quick] [--json] [--strict] [--verbose]

LeNet5, `async`, 2 workers, a checkpoint every 2 s on both sides. The store is a folder behind fsspec that answers at
once, takes half a second for each call, or fails at every write after the start. Also, for
busy machines: the processor time of server and workers per push, that of the copy, and how far the copy is behind.
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

from paceline.runs.arrival_log import RECORD_BYTES

SECONDS, QUICK_SECONDS = 8.0, 3.0
SLOW_SECONDS = 0.5
LEAST_RATIO, MOST_COST = 0.95, 1.05
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


def watch(place: Path, seconds: float, wait: float, fails: bool) -> tuple[list[float], float]:
    """Return by how many records the log in the store was behind, twice a second, and the share of a core of the copy.

    The share is that of the helper process after its start; it counts its own processor time, so that it can be
    measured on a busy machine too.
    """
    remote, found = Path(tempfile.mkdtemp(dir=place)), []
    with ours.running(
        "async", "lenet5", 2, 1, [*ours.ENDLESS, "--checkpoint-every", "2", "--mirror", f"odd://{remote}"]
    ) as run:
        run.wait_for_pushes(1)
        odd_store.control(place, wait, fails)
        helper = helper_of(run.process.pid)
        before, began = processor_seconds(helper), time.monotonic()
        while time.monotonic() < began + seconds:
            time.sleep(0.5)
            manifests = sorted(remote.glob("run/0*/manifests/*.json"))
            files = json.loads(manifests[-1].read_text())["files"] if manifests else {}
            nbytes = sum(nbytes for nbytes, _ in files.get(run.log.name, ()))
            found.append((run.log.stat().st_size - nbytes) / RECORD_BYTES)
        share = (processor_seconds(helper) - before) / (time.monotonic() - began)
        odd_store.control(place)
    return found, share


def cost(seconds: float, place: Path | None = None) -> float:
    """Return the milliseconds of processor time of server and workers for a push, without those of the helper."""
    mirror = ["--mirror", f"odd://{tempfile.mkdtemp(dir=place)}"] if place is not None else []
    with ours.running("async", "lenet5", 2, 1, [*ours.ENDLESS, "--checkpoint-every", "2", *mirror]) as run:
        run.wait_for_pushes(2 * LEAST_STEPS)
        forks = next(child for child in children_of(run.process.pid) if "fork_server" in command_of(child))
        processes = children_of(forks)
        before, nbytes = sum(map(processor_seconds, processes)), run.log.stat().st_size
        time.sleep(seconds)
        used, pushes = sum(map(processor_seconds, processes)) - before, (run.log.stat().st_size - nbytes) / RECORD_BYTES
    return 1e3 * used / pushes


def helper_of(command: int) -> int:
    """Return the process that copies the run."""
    return next(child for child in children_of(command) if "object_store" in command_of(child))


def children_of(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        say = pairs.teller(parsed, "ms of processor time per push")
        spent = pairs.compare(
            "prompt", lambda: cost(seconds, place), lambda: cost(seconds), number, at_most=MOST_COST, say=say
        )
        print(pairs.table([spent], "CPU ms per push", sides=("with", "without")))
        for name, (wait, fails) in STORES.items():
            behind, share = watch(place, 3 * seconds, wait, fails)
            late = pairs.estimate(behind)
            what = f"the helper uses {100 * share:.2f} % of a core"
            print(f"{name}: {what}; the log is {late.median:,.0f} records behind (median), {late.most:,.0f} at most")
    return pairs.close(parsed, "object_store", [*rows, spent])


if __name__ == "__main__":
    sys.exit(main())
