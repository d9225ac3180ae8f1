"""Keep freed memory instead of giving it back: a training step frees and takes the same blocks again and again."""

from __future__ import annotations

import ctypes

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
