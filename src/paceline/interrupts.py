"""Ctrl-C and SIGTERM handled in one's own way for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

Handler = Callable[[int, object], None]


@contextlib.contextmanager
def interrupts(handler: Handler) -> Iterator[None]:
    """Have `handler(number, frame)` called by both, then whatever was before; a thread beside the main one has none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
