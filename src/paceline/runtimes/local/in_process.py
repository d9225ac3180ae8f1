"""All workers and the server in this one process: `classic`, and workers that share one GPU.

With several workers each computes in turn on the weights it was last sent, so pushes are as stale as with processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from paceline.core.messages import Reply
from paceline.core.worker import Seat
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.host import Host
from paceline.settings.durations import Delay


def run_inline(
    host: Host, seats: Iterable[Seat], stopped: Callable[[], str | None], delays: Mapping[int, Delay] | None = None
) -> None:
    """Drive the seats in turn until the server says it is over; `stopped` gives a reason to end early, or None."""
    by_worker = {seat.join.worker: seat for seat in seats}
    turn: deque[Seat] = deque()

    def deliver(reply: Reply) -> None:
        seat = by_worker[reply.worker]
        seat.pending = reply
        turn.append(seat)

    host.send = deliver
    for seat in by_worker.values():
        host.memories[seat.join.worker] = seat.memory
        host.handle(seat.join)
    while turn:
        reason = stopped()
        if reason is not None:
            host.stop(reason)
        host.look_at_the_clock()
        seat = turn.popleft()
        steps = host.server.steps_of(seat.join.worker)
        push = seat.push() if not host.server.over else None
        if push is not None:
            if delays and push.worker in delays:
                time.sleep(steps * delays[push.worker].seconds(host.config.seed, push.worker, push.seq))
            with torch.inference_mode():  # autograd has no part in an update
                host.handle(push)
    if not host.server.over:
        host.stop(ALL_GONE)  # the last of them was drained
