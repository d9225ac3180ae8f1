"""Child processes: start our own modules, die with the parent, and describe how a process ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

TETHER_VARIABLE = "PACELINE_TETHERED"  # set in a worker that ends when its standard input closes
_PR_SET_PDEATHSIG = 1
_SAFE_PATH = "PYTHONSAFEPATH"


def helper_command(module: str, *words: str) -> list[str]:
    """Return the command that runs one of our modules. With -P it imports nothing from the folder it starts in."""
    return [sys.executable, "-P", "-m", module, *words]


def helper_environment() -> dict[str, str]:
    """Return the environment of a helper: it finds modules where this process does, except in the current folder.

    That folder counts only if PYTHONPATH names it, or if this package itself is in it.
    """
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    implicit = {"", str(Path.cwd())} - set(named)
    found = [path for path in sys.path if path not in implicit]
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found if root in found else [*found, root])}


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Start interpreters as with -P inside this context, for a library that writes their command lines itself."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def die_with(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends, even if it is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def describe_end(status: int) -> str:
    """Describe in words how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
        return f"killed by signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"
