"""Flush subnormal floats to zero, in this thread, in torch's thread pool and in every thread started later."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.system.cpu import cores

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def flush_subnormals() -> None:
    """Treat floats below 1.2e-38 as zero from now on; every process that computes calls this before it starts.

    On Intel cores arithmetic on subnormal floats is up to 18 times slower, and a momentum that decays without
    gradients is subnormal after some thousand updates. The mode changes bits, so a run and its replay both need it.
    It belongs to a thread, and a new thread inherits it; only threads that torch has started before need a call.
    """
    if torch.set_flush_denormal(True) and _has_other_threads():
        _call_in_pool(lambda: torch.set_flush_denormal(True))


def _has_other_threads() -> bool:
    """Whether a library has started threads in this process, which may be torch's pool."""
    tasks = Path("/proc/self/task")
    return not tasks.is_dir() or sum(1 for _ in tasks.iterdir()) > threading.active_count()


def _call_in_pool(function: Callable[[], object]) -> None:
    """Call `function` once in each thread of torch's OpenMP pool, through the entry point that compilers use."""
    parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    if parallel is None:
        return  # torch was built without OpenMP
    parallel.argtypes, parallel.restype = [_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None

    def body(_: int | None) -> None:
        function()

    parallel(_BODY(body), None, max(cores(), torch.get_num_threads()), 0)
