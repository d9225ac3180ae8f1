"""A worker on any machine: it connects to a server, gets its settings from it, and works until training is over.

With `overlap` one process is several workers that take turns: while one waits for its reply, the next computes.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from paceline.assembly.run import make_join, make_worker, work_of
from paceline.assembly.task import identity_of, make_task, prepare_device
from paceline.config import RunConfig, from_dict, max_workers_of
from paceline.core.messages import Push, Reply
from paceline.data.datasets import Dataset
from paceline.errors import ProtocolError, UnknownWorker, UserError
from paceline.runtimes.scripts.remote.client import LoopClient
from paceline.runtimes.scripts.remote.worker import (
    LEAVE_SECONDS,
    WorkerCommand,
    require_good_end,
    work_in_processes,
    work_in_script,
)
from paceline.runtimes.server.admission import own_place
from paceline.runtimes.sharded.client import ShardedClient
from paceline.runtimes.sharded.spans import coding_of
from paceline.runtimes.worker_loop import WorkerLoop
from paceline.settings.resolve import check_names
from paceline.system.cpu import cores
from paceline.system.environment import package_version
from paceline.system.memory import keep_freed_memory
from paceline.system.signals import leave_signal
from paceline.system.terminal import counted, printable
from paceline.tasks.given_weights import read_given
from paceline.tasks.host_staging import pinned_memory
from paceline.tasks.supervised import SupervisedTask
from paceline.transports.frames import Ending
from paceline.transports.handshake import ConnectionReport
from paceline.transports.protocol import Timing
from paceline.transports.tls import Tls, worker_tls

JOIN_SECONDS = 30.0  # how long to try to join, at most: the server may be starting, or evaluating its model
Load: TypeAlias = Callable[[RunConfig], Dataset | None]
BlockingCall: TypeAlias = Callable[[], None]
Calls: TypeAlias = "queue.SimpleQueue[BlockingCall | None]"
Turns: TypeAlias = "queue.SimpleQueue[tuple[PipelineSlot, BaseException | None]]"


@dataclass(frozen=True)
class ServerAddress:
    """How to reach a server."""

    address: str
    token: bytes
    tls: Tls | None
    patience: float  # how many seconds to try while the server cannot be reached

    def open(self, report_of: Callable[[str], ConnectionReport]) -> ShardedClient:
        """Create the client to this server and to the others of the run, which this one names."""

        def open_one(address: str, tls: Tls | None) -> LoopClient:
            client = LoopClient(address, self.token, tls, self.patience, report=report_of(address))
            client.runs_script = False  # until the welcome names a script
            return client

        def open_shard(address: str, fingerprint: str | None) -> LoopClient:
            return open_one(address, worker_tls(fingerprint, None) if fingerprint is not None else None)

        return ShardedClient(self.address, open_shard, open_one(self.address, self.tls))


@dataclass(frozen=True)
class WorkerOptions:
    """Settings that belong to the worker's machine, not to the run."""

    data_dir: str | None = None
    threads: int | None = None
    worker: int | None = None
    overlap: int = 0
    device: str = "cpu"
    script: str | None = None  # the file of the run's script on this machine
    weights: str | None = None


def work(
    connection: ServerAddress, options: WorkerOptions, load: Load, say: Callable[[str], None], command: WorkerCommand
) -> bool:
    """Work until training is over. Return False if the server went away before.

    Raise Interrupted if the run was stopped, and Diverged if it has diverged. On SIGTERM this finishes its push, leaves
    the run and raises KeyboardInterrupt. `command` starts another worker like this one: a run of a user's script has
    one in each process.
    """
    keep_freed_memory()
    if ":" in options.device:
        torch.cuda.set_device(options.device)
    with contextlib.ExitStack() as stack:
        is_leaving = stack.enter_context(leave_signal(LEAVE_SECONDS))
        context = WorkerContext(options, connection.patience, load, say, is_leaving)
        numbers = range(options.overlap + 1)
        clients = [stack.enter_context(contextlib.closing(connection.open(context.report_of))) for _ in numbers]
        welcome = context.apply(clients[0], 0)
        if welcome["script"] is not None:
            return _work_in_script(clients[0], welcome, context, command)
        if options.script is not None:
            raise UserError(f"--script {options.script}: this run has no script; leave it out")
        welcomes = [welcome, *(context.apply(client, number) for number, client in enumerate(clients[1:], start=1))]
        report = context.report_of(connection.address)
        slots = [PipelineSlot(*pair, context, report) for pair in zip(clients, welcomes, strict=True)]
        if len(slots) > 1:
            _take_turns(slots, stack)
        else:
            call: BlockingCall | None = slots[0].greet
            while call is not None:
                call()
                call = slots[0].advance()
    if is_leaving() and not all(slot.has_finished for slot in slots):
        raise KeyboardInterrupt
    require_good_end(clients[0].ending)
    return all(slot.has_finished for slot in slots)


def _work_in_script(
    client: ShardedClient, welcome: dict[str, Any], context: WorkerContext, command: WorkerCommand
) -> bool:
    """Run the script of the run here; with `--overlap` one in each of several processes, which take turns."""
    options = context.options
    given = {"--device": options.device, "--data-dir": options.data_dir, "--weights": options.weights}
    for flag, value in given.items():
        if value not in (None, "cpu"):
            what = "the run's script chooses its device, and reads its data and weights itself"
            raise UserError(f"{flag} {value}: {what}; leave it out")
    if options.overlap:
        client.close()
        first = options.worker
        return work_in_processes(command, [first if first is None else first + n for n in range(options.overlap + 1)])
    assert isinstance(client.first, LoopClient)
    client.first.runs_script, client.first.is_leaving = True, context.is_leaving
    config = replace(_config_of(welcome["config"]), threads=context.threads)
    work_in_script(client.first, welcome, config, options.script, context.say)
    return True


def _take_turns(slots: list[PipelineSlot], stack: contextlib.ExitStack) -> None:
    """Compute for the worker whose reply came first. Each worker has a thread that makes its blocking calls."""
    turns: Turns = queue.SimpleQueue()
    calls = {slot: stack.enter_context(_caller(slot, turns)) for slot in slots}
    for slot in slots:
        calls[slot].put(slot.greet)
    left = len(slots)
    while left:
        slot, failure = turns.get()
        if failure is not None:
            raise failure
        call = slot.advance()
        if call is not None:
            calls[slot].put(call)
        else:
            left -= 1


@contextlib.contextmanager
def _caller(slot: PipelineSlot, turns: Turns) -> Iterator[Calls]:
    """Start a thread that makes one blocking call after another, and queues the worker and any failure after each.

    One queue in each direction only: for steps of milliseconds, each further lock between two threads costs time.
    """
    calls: Calls = queue.SimpleQueue()

    def run() -> None:
        for call in iter(calls.get, None):
            try:
                call()
            except BaseException as failure:
                turns.put((slot, failure))
            else:
                turns.put((slot, None))

    thread = threading.Thread(target=run, name="paceline-lane", daemon=True)
    thread.start()
    try:
        yield calls
    finally:
        calls.put(None)
        thread.join()


class WorkerContext:
    """What the workers of this process share: the data, loaded once, and the settings of this machine."""

    def __init__(
        self,
        options: WorkerOptions,
        patience: float,
        load: Load,
        say: Callable[[str], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        self.options, self.patience, self._load, self.say, self.is_leaving = options, patience, load, say, is_leaving
        self.report_of = functools.cache(functools.partial(ConnectionReport, say))
        self.threads = options.threads or cores()
        self._loaded: tuple[RunConfig, Dataset | None] | None = None

    def apply(self, client: ShardedClient, number: int) -> dict[str, Any]:
        """Ask to join, as worker `number` of this process."""
        wanted = None if self.options.worker is None else self.options.worker + number
        facts = {"worker": wanted, "version": package_version("paceline"), "device": self.options.device}
        return client.apply(facts, min(JOIN_SECONDS, self.patience), lambda: {"place": own_place(self.threads)})

    def prepare(self, config: RunConfig) -> tuple[RunConfig, Dataset | None]:
        """Return the server's settings with this machine's own in their place, and the data."""
        device = self.options.device.partition(":")[0]
        config = replace(config, data_dir=self.options.data_dir, threads=self.threads, device=device)
        if self._loaded is None or self._loaded[0] != config:
            self._loaded = config, self._load(config)
        return self._loaded

    def make_task(self, config: RunConfig, dataset: Dataset | None) -> SupervisedTask:
        """Build the task of a run, from this machine's copy of the file of `--weights`, if the run has one.

        The server sends all weights that are trained. A model without other tensors needs no copy.
        """
        if config.weights is None or self.options.weights is not None:
            path = Path(self.options.weights) if self.options.weights is not None else None
            return make_task(config, dataset, read_given(config, path))
        try:
            return make_task(config, dataset, read_given(config))
        except UserError as error:
            task, where = (
                make_task(replace(config, weights=None), dataset),
                "copy the file here, and give --weights FILE",
            )
            if task.flat.frozen() or task.state_size:
                what = "this worker needs the file that the run begins from, for frozen weights and statistics"
                raise UserError(f"{what} ({error}): {where}") from None
            return task


def _config_of(described: dict[str, Any]) -> RunConfig:
    """The settings in a server's welcome; ProtocolError if no server of this version sends such settings."""
    try:
        config = from_dict(described)
        check_names(config)
    except (UserError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the server sent settings that cannot be used: {printable(str(error))}") from None
    return config


class PipelineSlot:
    """One worker of this process: its transport, its loop, and its next blocking call."""

    def __init__(
        self, transport: ShardedClient, welcome: dict[str, Any], context: WorkerContext, report: ConnectionReport
    ) -> None:
        self._transport, self._context, self._server_report = transport, context, report
        self.has_finished = False  # whether the server said that training is over
        self._begin(welcome)

    def _begin(self, welcome: dict[str, Any]) -> None:
        """Start a new incarnation: build everything but the data."""
        worker, incarnation, described = welcome["worker"], welcome["incarnation"], welcome["config"]
        if worker is None or incarnation is None or described is None:
            raise ProtocolError("the server's welcome has no number for this worker, or no settings")
        config, dataset = self._context.prepare(_config_of(described))
        self._server_report.run = printable(str(Path(config.runs) / (welcome.get("run") or "RUN")))
        device = prepare_device(config)
        task = self._context.make_task(config, dataset).to(device)
        self._transport.reach(welcome, task.layout.size, functools.partial(coding_of, config, task.layout))
        division = work_of(task, config)
        join, staged = make_join(config, division, worker, incarnation), device.type != "cpu"
        instance = make_worker(config, task, division, join, pinned_memory if staged else None, staged)
        self._loop = WorkerLoop(instance, config)
        self._transport.count_steps(lambda: instance.num_steps)
        what, threads = config.task or config.model, counted(config.threads or 1, "thread")
        device_name = config.device if staged else threads
        self._context.say(
            printable(f"worker {worker} of {max_workers_of(config)}: {config.strategy}, {what}, {device_name}")
        )
        self._identity = identity_of(task)
        self._reply: Reply | None = None
        self._push: tuple[Push, Timing] | None = None
        self._welcome: dict[str, Any] | None = None

    def advance(self) -> BlockingCall | None:
        """Process the result of the last blocking call. Return the next call to make, or None when finished."""
        if self._welcome is not None:
            self._context.say("the server was restarted or took this worker for lost: joining again")
            self._begin(self._welcome)
            return self.greet
        if self._reply is None or self._reply.finished:
            self.has_finished = self._reply is not None
            self._say_end()
            return None
        if self._context.is_leaving():
            self._context.say(f"worker {self._loop.instance.join.worker} was terminated: it leaves after its push")
            return None
        self._push = self._loop.step(self._reply)
        return self.exchange

    def _say_end(self) -> None:
        """Tell the user why this worker ends; if its server is gone, that was said already."""
        worker = self._loop.instance.join.worker
        if self.has_finished and self._transport.ending == Ending.DRAINED:
            self._context.say(f"worker {worker} was drained: it has left the run, which goes on")
        elif self.has_finished and self._transport.ending == Ending.FINISHED:
            self._context.say(f"worker {worker} has finished: the server needs no more steps of it")
        elif self._transport.farewell is not None:
            self._context.say(f"worker {worker} ends: {printable(self._transport.farewell)}")

    def greet(self) -> None:
        """Blocking call: join, and wait at the start barrier."""
        with self._keeping_welcome():
            instance = self._loop.instance
            self._reply = self._transport.hello(instance.join, instance.memory, self._identity)

    def exchange(self) -> None:
        """Blocking call: send the push and wait for its reply."""
        assert self._push is not None
        with self._keeping_welcome():
            self._reply = self._transport.exchange(*self._push)
            self._loop.timer.arrived()

    @contextlib.contextmanager
    def _keeping_welcome(self) -> Iterator[None]:
        """If the server does not know this worker any more, keep its new welcome for `advance`."""
        try:
            yield
        except UnknownWorker as unknown:
            self._welcome = unknown.welcome
