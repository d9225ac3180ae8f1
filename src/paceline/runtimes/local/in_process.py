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
from paceline.runtimes.server.runtime import Runtime
from paceline.settings.durations import Delay


class Turns(Runtime):
    """The runtime of workers that take turns in this process: a reply queues its worker."""

    def __init__(self) -> None:
        self.seats: dict[int, Seat] = {}
        self.queue: deque[Seat] = deque()

    def send(self, reply: Reply, with_state: bool) -> None:
        """Give a worker its reply; its turn comes after those of the workers before it."""
        seat = self.seats[reply.worker]
        seat.pending = reply
        self.queue.append(seat)


def run_inline(
    host: Host,
    turns: Turns,
    seats: Iterable[Seat],
    stopped: Callable[[], str | None],
    delays: Mapping[int, Delay] | None = None,
) -> None:
    """Drive the workers in turn until training is over; `turns` is the host's runtime.

    `stopped` returns the reason to end early, or None.
    """
    turn = turns.queue
    turns.seats.update({seat.join.worker: seat for seat in seats})
    for seat in turns.seats.values():
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
