"""Memory of this process: the allocator's settings, free memory, and the limit of open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
from pathlib import Path

from paceline.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = (1 << 31) - 1
_MMAP_THRESHOLDS = (1 << 30, 32 << 20)  # values to try in order; older versions of glibc refuse more than 32 MiB


def keep_freed_memory() -> None:
    """Make glibc serve large blocks from its heap and never shrink it; do nothing with other C libraries.

    Otherwise the activations of a CNN cause tens of thousands of page faults per second.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in _MMAP_THRESHOLDS):
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


def available_memory() -> int:
    """Return the bytes still available, from the system or the control group, whichever is less."""
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
    """Raise UserError if `nbytes` are more than the available memory."""
    free = available_memory()
    if nbytes > free:
        raise UserError(
            f"the {purpose} needs {mib(nbytes)} of {kind}, {mib(free)} are free: "
            "use fewer workers, a smaller model or a smaller data set"
        )


def mib(nbytes: int) -> str:
    """Format a size in MiB."""
    return f"{nbytes / 2**20:,.0f} MiB"


def raise_file_limit() -> None:
    """Raise the limit of open files to the user's maximum: a server has one connection per worker."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


def receive_fds(connection: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors. Raise UserError if some are missing: the limit of open files is reached."""
    packet, fds, flags, _ = socket.recv_fds(connection, nbytes, most)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise _too_many_files()
    return packet, fds


def require_open_files(number: int) -> None:
    """Raise UserError if a process may not open so many files at once."""
    if number > resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 0:
        raise _too_many_files()


def _too_many_files() -> UserError:
    maximum = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    what = f"the workers need more open files than the limit of {maximum} per process"
    return UserError(f"{what}: start fewer, or raise the limit, as in 'ulimit -n {max(1024, 4 * maximum)}'")
