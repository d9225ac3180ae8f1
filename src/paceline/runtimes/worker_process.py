"""A worker process: builds its task, offers its memory to the server, and lets the generator work until it is over."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch

from paceline.config import from_dict
from paceline.core.messages import Push
from paceline.core.worker import work as working
from paceline.crew import identity_of, make_join, make_task, work_of
from paceline.delays import parse_delays
from paceline.runtimes.allocator import keep_freed_memory
from paceline.runtimes.scheduling import CoreLender, polls_before_sleep, yield_to_server
from paceline.runtimes.shared_dataset import attach
from paceline.runtimes.timekeeping import Stopwatch
from paceline.transports.shared_memory import Slot, WorkerDoor


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Work until told that it is over, or until the server is gone."""
    keep_freed_memory()
    yield_to_server()
    config = from_dict(spec["config"])
    torch.set_num_threads(config.threads or 1)
    worker = spec["worker"]
    door = WorkerDoor(socket.socket(fileno=fds[0]), polls_before_sleep(config))
    dataset = attach(spec["dataset"], fds[1:]) if spec["dataset"] is not None else None
    task = make_task(config, dataset)
    division = work_of(task, config)
    slot = Slot.create(task.layout.size, task.state_size)
    task.bind(slot.weights, slot.gradient, slot.state)
    join = make_join(config, division, worker, spec["incarnation"])
    loader = task.loader(division.batches(worker, config), config.seed, worker)
    task.warm_up(loader.batch(0))
    delay = parse_delays(config.delay or [], config.workers or 1).get(worker)
    lender = CoreLender(config, task.layout, spec.get("server_pid"))
    generator = working(task, loader, join, slot.gradient, slot.state)
    next(generator)
    reply = door.hello(join, slot, identity_of(task))
    stopwatch = Stopwatch()
    while reply is not None and not reply.over:
        push = generator.send(reply)
        assert isinstance(push, Push)
        if delay is not None:
            time.sleep(delay.seconds(config.seed, worker, push.seq))
        timing = stopwatch.step()
        lender.lend()
        reply = door.exchange(push, timing)
        stopwatch.replied()
    return 0
