"""What Ctrl-C and SIGTERM do: end a verb at the next moment that is safe, or, for a while, what somebody asked for.

Never in the middle of an import. Raised there, an interrupt is lost in one of the import system's callbacks, becomes
another package's ImportError, or breaks a library that is half loaded: of 450 sent into `import torch` 42 were lost and
6 ended in a traceback or an abort. So one that comes while something is being imported waits until that is done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from paceline.interfaces import Report

INTERRUPTED, TERMINATED = "interrupted", "terminated"


Handler = Callable[[int, FrameType | None], None]
STOPPING = (signal.SIGINT, signal.SIGTERM)
LOOK_AGAIN_SECONDS = 0.02


class Ending:
    """Handles a signal by raising KeyboardInterrupt, during an import as soon as that is over."""

    def __init__(self) -> None:
        self.waits = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.waits = _importing(frame)
        if not self.waits:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_SECONDS)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt for whoever waits for it around this."""
    with _handled_by(Ending(), (*STOPPING, signal.SIGALRM)):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextlib.contextmanager
def interrupts(handler: Handler) -> Iterator[None]:
    """Have `handler(number, frame)` called by both, then whatever was before; a thread beside the main one has none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled_by(handler, STOPPING) as before:
        if any(isinstance(previous, Ending) and previous.waits for previous in before):
            raise KeyboardInterrupt
        yield


@contextlib.contextmanager
def _handled_by(handler: Handler, numbers: tuple[signal.Signals, ...]) -> Iterator[list[object]]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield list(before.values())
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def stop_signals(report: Report, react: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Ctrl-C and SIGTERM become a reason to stop, looked at between two steps; a second Ctrl-C does not wait."""
    reasons: list[str] = []

    def stop(number: int, frame: object) -> None:
        if reasons and number == signal.SIGINT:
            raise KeyboardInterrupt
        reasons.append(INTERRUPTED if number == signal.SIGINT else TERMINATED)
        report({"kind": "stopping", "reason": reasons[0]})
        if react is not None:
            react(reasons[0])

    with interrupts(stop):
        yield reasons
