"""All workers and the server in one process: `classic`, and workers that share one GPU.

Several workers compute in turn, each on the weights it was last sent, so pushes are as stale as with processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from paceline.core.messages import Reply
from paceline.core.worker import Seat
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.host import Host
from paceline.runtimes.worker_loop import WorkerLoop


def run_inline(host: Host, replies: deque[Reply], seats: Iterable[Seat], stopped: Callable[[], str | None]) -> None:
    """Let the workers compute in turn until training is over; the host's runtime appends its replies to `replies`.

    If `stopped` returns a reason, end early.
    """
    loops = {seat.join.worker: WorkerLoop(seat, host.config) for seat in seats}
    for worker, loop in loops.items():
        host.memories[worker] = loop.seat.memory
        host.handle(loop.seat.join)
    while replies:
        reason = stopped()
        if reason is not None:
            host.stop(reason)
        host.look_at_the_clock()
        reply = replies.popleft()
        if not reply.over and not host.server.over:
            push, _ = loops[reply.worker].step(reply)
            with torch.inference_mode():  # an update needs no autograd
                host.handle(push)
    if not host.server.over:
        host.stop(ALL_GONE)  # the last worker was drained
