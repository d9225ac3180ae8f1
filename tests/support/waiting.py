"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

PATIENCE = 60.0
"""Seconds after which a test fails: far more than any machine needs, so that no test measures one."""


def until(predicate: Callable[[], Found], what: str | Callable[[], str] = "it", seconds: float = PATIENCE) -> Found:
    """Poll until the predicate returns something true, and return that; after so many seconds, fail and say `what`."""
    deadline = time.monotonic() + seconds
    while not (found := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
    return found
