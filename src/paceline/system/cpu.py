"""The CPU cores that this process may use, and how its threads wait for each other on them."""

from __future__ import annotations

import os

SPINS = "1000"  # before an OpenMP thread sleeps: what libgomp takes itself if it has more threads than cores


def cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def busy_line() -> str | None:
    """Return a line that says that other programs use the cores; None if they are free."""
    load, num_cores = os.getloadavg()[0], cores()
    if load <= 0.5 * num_cores:
        return None
    return f"the load is {load:.1f} on {num_cores} cores: another program is running, so timings will be off"


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep soon while they wait for each other, unless the environment decides.

    Call it before torch is imported. By default they spin for milliseconds, also if another program has taken the core
    of the thread that they wait for: on two cores that others used, a LeNet5 step on two threads took 10 to 30 times
    as long (docs/measured.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
