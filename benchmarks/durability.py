"""Cost of durability: `--durable`, the pause of a checkpoint, and the time from a killed server to the next push.

    python benchmarks/durability.py [--pairs N] [--quick] [--json] [--strict]

Rates are of LeNet5, `async`, 2 workers, with and without the flag in turn. Pauses are those that runs report; a
recovery lasts from the SIGKILL of the server until the next push in arrivals.log, polled every 2 ms.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ours
import pairs
from processes import LEAST_STEPS, children, common_rate, end

from paceline.runs.arrival_log import RECORD_BYTES
from paceline.runs.events import read_events

RATE_SECONDS, QUICK_SECONDS = 6.0, 2.0
TAIL_PUSHES = (0, 500, 2000)
PAUSED = {"lenet5": 6.0, "cnn": 6.0, "resnet18": 25.0}


def rate(seconds: float, *flags: str) -> float:
    """Return the samples per second of a run."""
    with ours.running("async", "lenet5", 2, 1, [*ours.ENDLESS, *flags]) as run:
        run.wait_for_pushes(1)
        time.sleep(seconds)
        run.wait_for_pushes(2 * LEAST_STEPS)
        end(run.process)
        return common_rate(run.steps())


def sync_milliseconds(number: int = 200) -> float:
    """Return the median time to append and sync one record on an idle machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        times = []
        for _ in range(number):
            os.write(file, b"x" * RECORD_BYTES)
            began = time.perf_counter()
            os.fdatasync(file)
            times.append(1e3 * (time.perf_counter() - began))
        os.close(file)
    return statistics.median(times)


def pauses(model: str, seconds: float) -> tuple[int, float, float]:
    """Return the number of checkpoints of a run, and the median and maximum of their pauses in milliseconds."""
    flags = [*ours.ENDLESS, "--checkpoint-every", str(seconds / 12)]
    with ours.running("async", model, 2, 1, flags, rule="foresight-cached") as run:
        run.wait_for_pushes(1)
        time.sleep(seconds)
        rows = [row for row in read_events(run.folder / "events.jsonl") if row["kind"] == "checkpoint"]
    found = [1e3 * row["pause_seconds"] for row in rows]
    return len(found), statistics.median(found), max(found)


def server_of(supervisor: int) -> int:
    """Return the server's process: the first child of the fork server, the supervisor's only child."""
    (forks,) = children(supervisor)
    return min(children(forks))


def recovery(pushes: int, *flags: str) -> tuple[float, float]:
    """Return the seconds from a killed server to the next push, and the part of them spent on recovery."""
    every = "100000" if pushes else "0.2"
    words = [*ours.ENDLESS, "--checkpoint-every", every, "--restart", "1", *flags]
    with ours.running("async", "lenet5", 2, 1, words) as run:
        run.wait_for_pushes(pushes or 200)
        os.kill(server_of(run.process.pid), signal.SIGKILL)
        began, size = time.monotonic(), run.log.stat().st_size
        while run.log.stat().st_size < size + 4 * RECORD_BYTES:  # a resume, two joins and a push
            run.check_alive()
            time.sleep(ours.POLL_SECONDS)
        took = time.monotonic() - began
        (row,) = _recovered(run.folder)
    return took, row["seconds"]


def _recovered(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_events(folder / "events.jsonl") if row["kind"] == "recovered"]


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    seconds = QUICK_SECONDS if parsed.quick else RATE_SECONDS
    say = pairs.teller(parsed, "samples/s")
    row = pairs.compare(
        "durable", lambda: rate(seconds, "--durable"), lambda: rate(seconds), pairs.num_pairs(parsed), say=say
    )
    print(pairs.table([row], "samples/s", sides=("with", "without")))
    print(f"one record synced alone: {sync_milliseconds():.2f} ms")
    for model, length in PAUSED.items():
        number, middle, longest = pauses(model, length / 3 if parsed.quick else length)
        print(f"pause of a checkpoint, {model}: median {middle:.2f} ms, longest {longest:.2f} ms of {number}")
    for pushes in TAIL_PUSHES[: 2 if parsed.quick else None]:
        took, back = recovery(pushes)
        print(
            f"killed server, {pushes or 'few'} pushes since the checkpoint: {took:.2f} s, {back:.2f} s of it computing"
        )
    took, back = recovery(0, "--recovery", "checkpoint")
    print(f"killed server, --recovery checkpoint: {took:.2f} s, {back:.2f} of it reading")
    return pairs.close(parsed, "durability", [row])


if __name__ == "__main__":
    sys.exit(main())
