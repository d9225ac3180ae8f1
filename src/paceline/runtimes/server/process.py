"""The server process of a local run: build the host from settings and serve."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from paceline.assembly.cpu_sharing import server_threads
from paceline.assembly.preflight import announce_batches, announce_rule
from paceline.assembly.run import make_server, make_worker, sizes_of, work_of
from paceline.assembly.task import build_of, make_task
from paceline.assembly.work import WorkAssignment
from paceline.config import RunConfig, from_dict, max_workers_of
from paceline.core.buffers import BufferSizes
from paceline.core.messages import Join
from paceline.core.server import Server
from paceline.core.worker import LocalWorker
from paceline.data.datasets import Dataset
from paceline.data.shared import attach
from paceline.errors import PacelineError, RunFailed
from paceline.interfaces import Report
from paceline.runs.folder import ALL_GONE, RAISED, RunFolder
from paceline.runs.recovery import rebuild
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import Runtime, SupervisorChannel
from paceline.runtimes.server.service import LocalPeers, Service
from paceline.system.memory import keep_freed_memory, raise_file_limit, require_memory
from paceline.tasks.given_weights import read_given
from paceline.tasks.supervised import SupervisedTask
from paceline.transports.shared_memory import SharedBuffers

HostPieces: TypeAlias = tuple[Server, SupervisedTask, WorkAssignment, RunConfig, RunFolder, Report, Runtime]


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Serve one run until it is finished."""

    def serve(control: SupervisorChannel) -> None:
        config, folder = from_dict(spec["config"]), RunFolder(Path(spec["folder"]))
        dataset = attach(spec["dataset"], fds[1:]) if spec["dataset"] is not None else None
        peers = LocalPeers()
        host = make_host(config, dataset, folder, control.send, peers, spec["facts"], spec["resume"])
        assert host.task is not None and host.work is not None
        with torch.inference_mode():  # updates need no autograd
            sizes = sizes_of(config, host.task, host.work)
            Service(host, peers, control, build_of(host.task), sizes).run()
        if not host.server.pushes and (host.stop_reason or "").startswith((RAISED, ALL_GONE)):
            host.close()
            raise RunFailed(f"{host.stop_reason}, before the first update: nothing was trained")
        host.finish()
        host.close()

    return reporting(serve, fds[0], spec["folder"])


def reporting(serve: Callable[[SupervisorChannel], None], line: int, folder: str) -> int:
    """Call `serve` and tell the supervisor how it ended; a PacelineError or a full disk goes to it as one line."""
    control = SupervisorChannel(socket.socket(fileno=line))
    raise_file_limit()
    keep_freed_memory()
    try:
        with RunFolder(Path(folder)).naming_disk_errors():
            serve(control)
    except PacelineError as error:
        control.send({"kind": "failed", "code": error.exit_code, "text": str(error)})
        return error.exit_code
    control.send({"kind": "finished"})
    return 0


def make_host(
    config: RunConfig,
    dataset: Dataset | None,
    folder: RunFolder,
    report: Report,
    runtime: Runtime,
    facts: dict[str, Any],
    resume: bool,
) -> Host:
    """Build the server of a run and start its host."""
    task = make_task(config, dataset, read_given(config, folder.initial_file))
    work = work_of(task, config)
    server = make_server(config, task, work)
    if not resume:
        announce_rule(config, work, report)
        announce_batches(config, task.given.batch_size, task.given.shuffles, report)
    sizes = BufferSizes(task.layout.size, task.state_size, *server.codecs.capacities)
    require_memory(max_workers_of(config) * SharedBuffers.nbytes_for(sizes), "workers' weights")
    torch.set_num_threads(server_threads(config, task.layout))
    return start_host((server, task, work, config, folder, report, runtime), dataset, facts, resume)


def start_host(pieces: HostPieces, dataset: Dataset | None, facts: dict[str, Any], resume: bool) -> Host:
    """Start the host of a new run, or of one rebuilt from its checkpoint and log."""
    server, task, work, config, folder, report, _ = pieces

    def instance(join: Join) -> LocalWorker:
        return make_worker(config, make_task(config, dataset, read_given(config, folder.initial_file)), work, join)

    rebuilt = rebuild(server, instance, task, config, folder, report) if resume else None
    host = Host(*pieces, rebuilt.now if rebuilt is not None else 0.0, facts)
    host.verify_with(instance)
    if rebuilt is not None:
        host.resume_from(rebuilt)
    return host
