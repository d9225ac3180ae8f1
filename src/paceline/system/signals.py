"""Handle Ctrl-C and SIGTERM: end a command at the next safe moment, or call a handler."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
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
PRESS_SECONDS = 1.0  # Ctrl-C pressed twice within this time asks once

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


class StopRequests:
    """What was asked of a run that is being stopped: a Ctrl-C well after the first signal asks not to wait."""

    def __init__(self) -> None:
        self._first: float | None = None

    def are_new(self, number: int) -> bool:
        """Whether this signal is to be acted on. Raise KeyboardInterrupt if it asks not to wait any longer."""
        now = time.monotonic()
        if self._first is None or number != signal.SIGINT:
            self._first = now if self._first is None else self._first
            return True
        if now - self._first > PRESS_SECONDS:
            raise KeyboardInterrupt
        return False


@contextlib.contextmanager
def stop_signals(report: Report, react: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Collect Ctrl-C and SIGTERM as reasons to stop, polled between steps; a Ctrl-C a second later raises."""
    reasons: list[str] = []
    requests = StopRequests()

    def stop(number: int, frame: object) -> None:
        if not requests.are_new(number):
            return
        reasons.append(INTERRUPTED if number == signal.SIGINT else TERMINATED)
        report({"kind": "stopping", "reason": reasons[0]})
        if react is not None:
            react(reasons[0])

    with handle_signals(stop):
        yield reasons
