"""Number of CPU cores that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))
