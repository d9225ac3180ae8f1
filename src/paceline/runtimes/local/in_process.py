"""All workers and the server in this one process: `classic`, and workers that share one GPU.

With several workers each computes in turn on the weights it was last sent, so pushes are as stale as with processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paceline.assembly.preflight import facts_of, startup_warnings
from paceline.assembly.run import make_join, make_seat, make_server, work_of
from paceline.assembly.task import make_task, prepare_device
from paceline.config import RunConfig
from paceline.core.messages import Join, Reply
from paceline.core.worker import Seat
from paceline.data.datasets import Location, load
from paceline.interfaces import Report
from paceline.runs.folder import ALL_GONE, RunFolder
from paceline.runs.recovery import rebuild
from paceline.runtimes.server.host import Host
from paceline.settings.durations import Delay, delays_of
from paceline.system.memory import keep_freed_memory
from paceline.system.signals import stop_signals


def train_in_process(
    config: RunConfig, folder: RunFolder, location: Location | None, report: Report, incarnation: int
) -> dict[str, Any]:
    """Train `classic`, or several workers on one GPU; an incarnation above 0 resumes the run in `folder`."""
    keep_freed_memory()
    device = prepare_device(config)
    dataset = load(location, report=report) if location is not None else None
    task = make_task(config, dataset).to(device)
    work = work_of(task, config)
    server = make_server(config, task, work)
    for line in startup_warnings(config, location, work.skew):
        report({"kind": "note", "text": line})

    def seat(join: Join) -> Seat:
        return make_seat(config, make_task(config, dataset).to(device), work, join)

    rebuilt = rebuild(server, seat, task, config, folder, report) if incarnation else None
    seconds = rebuilt.now if rebuilt is not None else 0.0
    host = Host(server, task, work, config, folder, report, seconds, facts_of(config, location))
    if rebuilt is not None:
        host.go_on(rebuilt)
    seats = [seat(make_join(config, work, worker, incarnation)) for worker in range(config.workers or 1)]
    with stop_signals(report) as reason:
        run_inline(host, seats, lambda: reason[0] if reason else None, delays_of(config))
        result = host.finish()
    host.close()
    return result


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
