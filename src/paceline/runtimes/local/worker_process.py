"""A worker process: builds its task, offers its memory to the server, and works until it is over."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch

from paceline.assembly.cpu_sharing import CoreLender, polls_before_sleep, yield_to_server
from paceline.assembly.run import make_join, make_seat, work_of
from paceline.assembly.task import identity_of, make_task
from paceline.config import from_dict, places_of
from paceline.data.shared import attach
from paceline.runtimes.server.timing import Stopwatch
from paceline.settings.durations import delays_of
from paceline.system.memory import keep_freed_memory
from paceline.transports.shared_memory import Slot, WorkerDoor


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Work until told that it is over, or until the server is gone."""
    keep_freed_memory()
    yield_to_server()
    config = from_dict(spec["config"])
    torch.set_num_threads(config.threads or 1)
    worker = spec["worker"]
    door = WorkerDoor(socket.socket(fileno=fds[0]), polls_before_sleep(config), places_of(config))
    dataset = attach(spec["dataset"], fds[1:]) if spec["dataset"] is not None else None
    task = make_task(config, dataset)
    division = work_of(task, config)
    join = make_join(config, division, worker, spec["incarnation"])
    seat = make_seat(config, task, division, join, Slot.create)
    delay = delays_of(config).get(worker)
    lender = CoreLender(config, task.layout, spec.get("server_pid"))
    assert isinstance(seat.memory, Slot)
    reply = door.hello(join, seat.memory, identity_of(task))
    stopwatch = Stopwatch()
    while reply is not None and not reply.over:
        seat.pending = reply
        push = seat.push()
        assert push is not None
        if delay is not None:
            time.sleep((reply.steps or 1) * delay.seconds(config.seed, worker, push.seq))
        timing = stopwatch.step()
        lender.lend()
        reply = door.exchange(push, timing)
        stopwatch.replied()
    return 0
