"""All workers and the server in one process: `classic`, and workers that share one GPU."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.assembly.preflight import announce_batches, announce_rule, provenance, startup_warnings
from paceline.assembly.run import make_join, make_server, make_worker, work_of
from paceline.assembly.task import make_task, prepare_device
from paceline.config import RunConfig
from paceline.core.messages import Join, Reply
from paceline.core.worker import LocalWorker
from paceline.data.datasets import Location, load
from paceline.errors import PacelineError
from paceline.interfaces import Report
from paceline.runs.folder import ALL_GONE, RAISED, RunFolder
from paceline.runs.recovery import rebuild
from paceline.runtimes.local.failures import describe_exception
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LocalRuntime
from paceline.runtimes.worker_loop import WorkerLoop
from paceline.system.memory import keep_freed_memory
from paceline.system.signals import stop_signals
from paceline.tasks.given_weights import read_given


def train_in_process(
    config: RunConfig, folder: RunFolder, location: Location | None, report: Report, incarnation: int
) -> dict[str, Any]:
    """Train `classic`, or several workers on one GPU; an incarnation above 0 resumes the run in `folder`."""
    keep_freed_memory()
    device = prepare_device(config)
    dataset = load(location, report=report) if location is not None else None
    given = read_given(config, folder.initial_file)
    task = make_task(config, dataset, given).to(device)
    work = work_of(task, config)
    server = make_server(config, task, work)
    for line in startup_warnings(config, location, is_here=True):
        report({"kind": "note", "text": line})
    announce_rule(config, work, report)
    announce_batches(config, task.given.batch_size, task.given.shuffles, report)

    def instance(join: Join) -> LocalWorker:
        return make_worker(config, make_task(config, dataset, given).to(device), work, join)

    rebuilt = rebuild(server, instance, task, config, folder, report) if incarnation else None
    seconds = rebuilt.now if rebuilt is not None else 0.0
    replies: deque[Reply] = deque()
    runtime, facts = LocalRuntime(replies.append), provenance(config, location)
    host = Host(server, task, work, config, folder, report, runtime, seconds, facts)
    with contextlib.closing(host), stop_signals(report) as reason:
        if rebuilt is not None:
            host.resume_from(rebuilt)
        instances = [instance(make_join(config, work, worker, incarnation)) for worker in range(config.workers or 1)]
        try:
            run_inline(host, replies, instances, lambda: reason[0] if reason else None)
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:  # of the user's task: keep what was trained
            if server.pushes:
                host.stop(f"{RAISED}the task: {describe_exception(error).text}")
                host.finish()
            raise
        return host.finish()


def run_inline(
    host: Host, replies: deque[Reply], instances: Iterable[LocalWorker], stopped: Callable[[], str | None]
) -> None:
    """Let the workers compute in turn until training is over, or until `stopped` returns a reason.

    The host's runtime appends its replies to `replies`. Pushes are as stale as with processes.
    """
    loops = {instance.join.worker: WorkerLoop(instance, host.config) for instance in instances}
    for worker, loop in loops.items():
        host.memories[worker] = loop.instance.memory
        host.handle(loop.instance.join)
    while replies:
        if (reason := stopped()) is not None:
            host.stop(reason)
        host.check_time_limit()
        reply = replies.popleft()
        if not reply.finished and not host.server.finished:
            push, _ = loops[reply.worker].step(reply)
            with torch.inference_mode():  # an update needs no autograd
                host.handle(push)
    if not host.server.finished:
        host.stop(ALL_GONE)  # the last worker was drained
