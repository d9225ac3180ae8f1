"""Keep freed memory instead of giving it back: a training step frees and takes the same blocks again and again."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

from paceline.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = (1 << 31) - 1
_MMAP_THRESHOLDS = (1 << 30, 32 << 20)
"""The first that the library takes; older ones refuse more than 32 MiB."""


def keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from its heap and never to shrink it; elsewhere this does nothing.

    Otherwise every step of a CNN pays tens of thousands of page faults a second for its activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in _MMAP_THRESHOLDS):
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


def available_memory() -> int:
    """Bytes that can still be taken: what the system has free, or what the control group leaves."""
    free = 1 << 62
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        free = min(free, int(limit) - int(used))
    return max(free, 0)


def require_memory(nbytes: int, purpose: str, kind: str = "shared memory") -> None:
    """An error before anything is taken, when `nbytes` are more than there is."""
    free = available_memory()
    if nbytes > free:
        raise UserError(
            f"the {purpose} needs {_mib(nbytes)} of {kind}, {_mib(free)} are free: "
            "use fewer workers, a smaller model or a smaller data set"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def allow_many_files() -> None:
    """A connection a worker: take as many descriptors as this user may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
