"""Share the cores between the workers and their server: threads, polling and scheduling."""

from __future__ import annotations

import contextlib
import os

from paceline.config import RunConfig
from paceline.interfaces import Layout
from paceline.settings.strategies import on_ring, strategy_of
from paceline.system.cpu import cores

SHARING_THRESHOLD = 1 << 19
"""Floats from which on a pass over the weights is faster on several cores than waking them costs."""


def server_threads(config: RunConfig, layout: Layout) -> int:
    """All cores if the workers wait while a round closes and the vector is long enough, else 1.

    On a ring no worker waits meanwhile: each makes the update by itself.
    """
    waiting = strategy_of(config).in_rounds and not on_ring(config)
    return cores() if waiting and layout.size >= SHARING_THRESHOLD else 1


POLLS = 800  # about two milliseconds: longer than a round of workers that are alike lets one of them wait


def polls_before_sleep(config: RunConfig) -> int:
    """How often a worker polls for its reply before it sleeps; 0 if another process could use its core.

    A core that was idle is slow at first: after 0.3 ms a LeNet5 step takes a tenth longer, after 10 ms half as long
    again. Two workers in step on two cores are 5 % faster for not sleeping.
    """
    fit = (config.workers or 1) * (config.threads or 1) <= cores()
    return POLLS if fit and strategy_of(config).in_rounds else 0


def yield_to_server() -> None:
    """Make this process a batch process, which does not preempt another one when it is woken.

    Otherwise the first worker that is answered preempts the server, and the others wait for their replies: with two
    workers on two cores, the server's part of a round took 1.2 ms instead of 0.45.
    """
    with contextlib.suppress(OSError, AttributeError):  # a system without the policy, or a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def lends_core(config: RunConfig, layout: Layout) -> bool:
    """Whether a worker moves the server to its own core before it waits for a reply.

    If workers fill all cores, the server would otherwise interrupt one worker while another one's core is idle: with
    two workers on two cores, 5 % of all time. If cores are spare, or the server uses several, the server stays.
    """
    full = (config.workers or 1) * (config.threads or 1) >= cores()
    return full and server_threads(config, layout) == 1
