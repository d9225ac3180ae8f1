"""Memory of a run of 10 workers on LeNet5: the sum of the proportional set sizes of all its processes.

    python benchmarks/memory.py [--pairs RUNS] [--quick] [--json] [--strict]

A page shared by several processes is divided among them, so end other programs that use torch first. The sum is
sampled every half second during training; the maximum of each run counts.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import ours
import pairs
from processes import end

WORKERS = 10
SECONDS, QUICK_SECONDS = 8.0, 3.0
EVERY_SECONDS = 0.5
BAR_GIB = 2.5


def family(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, []))
    return found


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of one process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def largest(seconds: float) -> tuple[float, int]:
    """Return the maximum memory in GiB and the maximum number of processes of one run during training."""
    most_bytes = most_processes = 0
    with ours.running("async", "lenet5", WORKERS, 1) as run:
        run.wait_for_pushes(1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            run.check_alive()
            sizes = [size for size in map(proportional_bytes, family(run.process.pid)) if size]
            most_bytes, most_processes = max(most_bytes, sum(sizes)), max(most_processes, len(sizes))
            time.sleep(EVERY_SECONDS)
        end(run.process)
    if most_processes < WORKERS:
        raise RuntimeError(f"only {most_processes} processes could be read, {WORKERS} workers were started")
    return most_bytes / 2**30, most_processes


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    number = parsed.pairs or (1 if parsed.quick else 3)
    with pairs.Disturbance() as by:
        seen = [largest(QUICK_SECONDS if parsed.quick else SECONDS) for _ in range(number)]
    sizes, processes = [size for size, _ in seen], max(count for _, count in seen)
    found = pairs.estimate(sizes)
    disposition = pairs.judge(found, at_most=BAR_GIB)
    taken = by.steal_percent, by.others_percent
    row = pairs.Row("10 workers, GiB", found.median, None, found, f"<={BAR_GIB:g}", disposition, *taken, number)
    print(f"{WORKERS} workers, LeNet5, {processes} processes: {found.median:.2f} GiB in all (proportional set size)")
    print(f"{found.least:.2f} to {found.most:.2f} GiB, runs {number}, bar {BAR_GIB:g} GiB: {disposition}")
    print(pairs.disturbed([row]))
    return pairs.close(parsed, "memory", [row], processes=processes)


if __name__ == "__main__":
    sys.exit(main())
