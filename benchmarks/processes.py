"""Start and end the processes of a benchmark, and compute the joint speed of workers from their step times."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

DROPPED_STEPS = 10
LEAST_STEPS = 3 * DROPPED_STEPS
"""Minimum steps of each worker in a measurement, even on a slow machine."""
ENDING_SECONDS = 15.0
Step = tuple[float, int]
"""End of a step in seconds, and its number of samples."""


@contextlib.contextmanager
def ended(processes: Sequence[subprocess.Popen[bytes]], within: float = 3600.0) -> Iterator[None]:
    """End all `processes` on exit, and after `within` seconds at the latest."""
    watchdog = threading.Timer(within, _kill, [processes])
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        for process in processes:
            end(process)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()


def children(parent: int) -> list[int]:
    """Return the processes that a process has started, none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def end(process: subprocess.Popen[bytes]) -> int:
    """Terminate a process, kill it if it does not stop, and return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def common_rate(steps: Mapping[int, Sequence[Step]]) -> float:
    """Return the samples per second of all workers together, while all of them are past their first steps.

    >>> common_rate({0: [(float(t), 1) for t in range(20)], 1: [(float(t), 3) for t in range(15)]})
    4.0
    """
    for worker, done in steps.items():
        if len(done) < DROPPED_STEPS + 2:
            raise RuntimeError(f"worker {worker} made only {len(done)} steps: measure for longer")
    start = max(done[DROPPED_STEPS - 1][0] for done in steps.values())
    stop = min(done[-1][0] for done in steps.values())
    if stop <= start:
        raise RuntimeError("the workers never worked at the same time: measure for longer")
    return sum(samples for done in steps.values() for time, samples in done if start < time <= stop) / (stop - start)
