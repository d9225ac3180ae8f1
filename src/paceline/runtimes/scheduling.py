"""How the operating system is asked to treat workers: as work that never interrupts the server."""

from __future__ import annotations

import contextlib
import os


def yield_to_server() -> None:
    """Make this process a batch process, which does not preempt another one when it is woken.

    Otherwise the first worker to be answered takes the core from under the server, and the others wait for their
    replies: with two workers on two cores the server's part of a round took 1.2 ms instead of 0.45.
    """
    with contextlib.suppress(OSError, AttributeError):  # a system without the policy, or a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
