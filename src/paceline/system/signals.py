"""Handle Ctrl-C and SIGTERM: end a command at the next safe moment, or call a handler."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.interfaces import Report

INTERRUPTED, TERMINATED = "interrupted", "terminated"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPT_SIGNALS = (*STOP_SIGNALS, signal.SIGALRM)
"""Signals that InterruptHandler handles: SIGALRM repeats one that came during an import."""
RETRY_SECONDS = 0.02

Handler = Callable[[int, FrameType | None], None]


class InterruptHandler:
    """Signal handler that raises KeyboardInterrupt; during an import, as soon as the import is done.

    KeyboardInterrupt during an import can be lost in a callback of the import system, become an ImportError, or break a
    half-loaded library: of 450 signals sent into `import torch`, 42 were lost and 6 ended in a traceback or an abort.
    """

    pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pending = _is_importing(frame)
        if not self.pending:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def handle_signals(handler: Handler) -> Iterator[None]:
    """Call `handler(number, frame)` for Ctrl-C and SIGTERM inside this context; do nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        if any(isinstance(previous, InterruptHandler) and previous.pending for previous in before.values()):
            raise KeyboardInterrupt
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def leave_signal(seconds: float) -> Iterator[Callable[[], bool]]:
    """Yield whether a first SIGTERM asked to leave. A second one, Ctrl-C or `seconds` raise KeyboardInterrupt."""
    asked: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if asked or number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM is one of INTERRUPT_SIGNALS

    try:
        with handle_signals(handler):
            yield lambda: bool(asked)
    finally:
        if asked:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextlib.contextmanager
def stop_signals(report: Report, react: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Collect Ctrl-C and SIGTERM as reasons to stop, polled between steps; a second Ctrl-C raises at once."""
    reasons: list[str] = []

    def stop(number: int, frame: object) -> None:
        if reasons and number == signal.SIGINT:
            raise KeyboardInterrupt
        reasons.append(INTERRUPTED if number == signal.SIGINT else TERMINATED)
        report({"kind": "stopping", "reason": reasons[0]})
        if react is not None:
            react(reasons[0])

    with handle_signals(stop):
        yield reasons
