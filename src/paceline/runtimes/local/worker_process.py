"""A worker process on the server's machine: build the task, allocate shared buffers, work until training is over."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch

from paceline.assembly.cpu_sharing import lends_core, polls_before_sleep, yield_to_server
from paceline.assembly.run import make_join, make_worker, work_of
from paceline.assembly.task import build_of, make_task
from paceline.config import from_dict, max_workers_of
from paceline.data.shared import attach
from paceline.runs.folder import RunFolder
from paceline.runtimes.worker_loop import WorkerLoop
from paceline.system.memory import keep_freed_memory
from paceline.tasks.given_weights import read_given
from paceline.transports.shared_memory import SharedBuffers, SharedMemoryClient


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Work until training is over or the server is gone."""
    keep_freed_memory()
    yield_to_server()
    config = from_dict(spec["config"])
    torch.set_num_threads(config.threads or 1)
    transport = SharedMemoryClient(socket.socket(fileno=fds[0]), polls_before_sleep(config), max_workers_of(config))
    dataset = attach(spec["dataset"], fds[1:]) if spec["dataset"] is not None else None
    task = make_task(config, dataset, read_given(config, RunFolder(Path(spec["folder"])).initial_file))
    facts = build_of(task)
    division = work_of(task, config)
    join = make_join(config, division, spec["worker"], spec["incarnation"])
    instance = make_worker(config, task, division, join, SharedBuffers.create)
    if lends_core(config, task.layout):
        transport.lends_core_to = spec.get("server_pid")
    WorkerLoop(instance, config).run(transport, facts)
    return 0
