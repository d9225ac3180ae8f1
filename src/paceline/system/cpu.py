"""The CPU cores that this process may use, and how its threads wait for each other on them."""

from __future__ import annotations

import os

SPINS = "1000"  # before an OpenMP thread sleeps: what libgomp takes itself if it has more threads than cores


def cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep soon while they wait for each other, unless the environment decides.

    Call it before torch is imported. By default they spin for milliseconds, also if another program has taken the core
    of the thread that they wait for: on two cores that others used, a LeNet5 step on two threads took 10 to 30 times
    as long (docs/measured.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
