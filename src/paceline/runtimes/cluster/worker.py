"""A worker on any machine: it applies to a server, is told what to train, and works until it is over.

With `overlap` one process is several workers that take turns: while the push of one is under way, the next computes.
Where a connection breaks it finds back to its place; where the server was started anew it joins anew.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from paceline.assembly.run import make_join, make_seat, work_of
from paceline.assembly.task import identity_of, make_task, prepare_device
from paceline.config import RunConfig, from_dict
from paceline.core.messages import Push, Reply
from paceline.data.datasets import Dataset
from paceline.errors import Forgotten
from paceline.runtimes.server.timing import Stopwatch
from paceline.runtimes.server.worker_hosts import own_place
from paceline.runtimes.sharded.client import ShardDoors
from paceline.runtimes.sharded.spans import coding_of
from paceline.settings.durations import delays_of
from paceline.system.cpu import cores
from paceline.system.environment import package_version
from paceline.system.memory import keep_freed_memory
from paceline.tasks.host_staging import pinned_memory
from paceline.transports.protocol import Timing
from paceline.transports.tcp_client import TcpWorkerDoor
from paceline.transports.tls import Tls, worker_tls

KNOCKING_SECONDS = 30.0
"""A server that is started at the same time needs a while, and one that scores its model opens to nobody."""
Say: TypeAlias = Callable[[str], None]
Load: TypeAlias = Callable[[RunConfig], Dataset | None]
Errand: TypeAlias = Callable[[], None]
Errands: TypeAlias = "queue.SimpleQueue[Errand | None]"


@dataclass(frozen=True)
class Connection:
    """How to reach a server."""

    address: str
    token: bytes
    tls: Tls | None
    patience: float
    """Seconds to go on trying while it cannot be reached."""

    def door(self) -> ShardDoors:
        """To its server; and to the others of the run, which that one will name."""

        def open_door(address: str, fingerprint: str | None) -> TcpWorkerDoor:
            tls = worker_tls(fingerprint, None) if fingerprint is not None else None
            return TcpWorkerDoor(address, self.token, tls, self.patience)

        return ShardDoors(self.address, open_door, TcpWorkerDoor(self.address, self.token, self.tls, self.patience))


@dataclass(frozen=True)
class Own:
    """What a worker decides itself, whatever the server says."""

    data_dir: str | None = None
    threads: int | None = None
    worker: int | None = None
    overlap: int = 0
    device: str = "cpu"


def work(connection: Connection, own: Own, load: Load, say: Say) -> bool:
    """Work until it is over; False where the server went away before."""
    keep_freed_memory()
    if ":" in own.device:
        torch.cuda.set_device(own.device)
    bench = Workbench(own, load, say)
    with contextlib.ExitStack() as stack:
        lanes = [Lane(stack, connection, bench, number) for number in range(own.overlap + 1)]
        if len(lanes) == 1:
            _go_alone(lanes[0])
        else:
            _take_turns(lanes, stack)
    return all(lane.was_told for lane in lanes)


def _go_alone(lane: Lane) -> None:
    errand: Errand | None = lane.greet
    while errand is not None:
        errand()
        errand = lane.advance()


def _take_turns(lanes: list[Lane], stack: contextlib.ExitStack) -> None:
    """Compute for whoever was answered first; each lane's errands to the server are run by a thread beside it."""
    turns: queue.SimpleQueue[tuple[Lane, BaseException | None]] = queue.SimpleQueue()
    errands = {lane: stack.enter_context(_runner(lane, turns)) for lane in lanes}
    for lane in lanes:
        errands[lane].put(lane.greet)
    left = len(lanes)
    while left:
        lane, failure = turns.get()
        if failure is not None:
            raise failure
        errand = lane.advance()
        if errand is not None:
            errands[lane].put(errand)
        else:
            left -= 1


@contextlib.contextmanager
def _runner(lane: Lane, turns: queue.SimpleQueue[tuple[Lane, BaseException | None]]) -> Iterator[Errands]:
    """A thread that runs errands one by one: after each it is the lane's turn, with what went wrong.

    One queue there and one back: between two threads of one core every lock more is felt by a step of milliseconds.
    """
    errands: Errands = queue.SimpleQueue()

    def run() -> None:
        for errand in iter(errands.get, None):
            try:
                errand()
            except BaseException as failure:
                turns.put((lane, failure))
            else:
                turns.put((lane, None))

    thread = threading.Thread(target=run, name="paceline-lane", daemon=True)
    thread.start()
    try:
        yield errands
    finally:
        errands.put(None)
        thread.join()


class Workbench:
    """The data, loaded once, and everything that is made from it for each incarnation of each worker here."""

    def __init__(self, own: Own, load: Load, say: Say) -> None:
        self.own, self._load, self._say = own, load, say
        self._loaded: tuple[RunConfig, Dataset | None] | None = None

    def apply(self, door: ShardDoors, number: int) -> dict[str, Any]:
        """Ask to work; the `number`-th worker of this process."""
        wanted = None if self.own.worker is None else self.own.worker + number
        words = {"worker": wanted, "version": package_version("paceline"), "device": self.own.device}
        return door.apply({**words, "place": own_place(self._threads)}, KNOCKING_SECONDS)

    @property
    def _threads(self) -> int:
        return self.own.threads or cores()

    def prepare(self, config: RunConfig) -> tuple[RunConfig, Dataset | None]:
        """The server's settings with this machine's own in their place, and the data."""
        own = self.own
        config = replace(config, data_dir=own.data_dir, threads=self._threads)
        config = replace(config, device=own.device.partition(":")[0])
        if self._loaded is None or self._loaded[0] != config:
            self._loaded = config, self._load(config)
        return self._loaded

    def say(self, worker: int, config: RunConfig) -> None:
        """Who we are, for the user."""
        what = config.model if config.task is None else config.task
        where = f"{config.threads} threads" if config.device == "cpu" else config.device
        self._say(f"worker {worker} of {config.workers}: {config.strategy}, {what}, {where}")

    def say_again(self) -> None:
        """What happened when a server did not know us any more."""
        self._say("the server was started anew, or took us for lost: joining again")


class Lane:
    """One worker of this process: its door, its seat, and what is next for it."""

    def __init__(self, stack: contextlib.ExitStack, connection: Connection, bench: Workbench, number: int) -> None:
        self._bench = bench
        self.was_told = False
        """Whether the server said that it is over."""
        self._door = stack.enter_context(contextlib.closing(connection.door()))
        self._begin(bench.apply(self._door, number))

    def _begin(self, welcome: dict[str, Any]) -> None:
        """A new incarnation: everything but the data is made anew."""
        config, dataset = self._bench.prepare(from_dict(welcome["config"]))
        self._config, worker = config, int(welcome["worker"])
        device = prepare_device(config)
        task = make_task(config, dataset).to(device)
        self._door.reach(welcome, task.layout.size, functools.partial(coding_of, config, task.layout))
        division = work_of(task, config)
        join, staged = make_join(config, division, worker, int(welcome["incarnation"])), device.type != "cpu"
        self._seat = make_seat(config, task, division, join, pinned_memory if staged else None, staged)
        self._delay = delays_of(config).get(worker)
        self._bench.say(worker, config)
        self._identity = identity_of(task)
        self._stopwatch = Stopwatch()
        self._reply: Reply | None = None
        self._push: tuple[Push, Timing] | None = None
        self._welcome: dict[str, Any] | None = None

    def advance(self) -> Errand | None:
        """Do what the last errand brought; the next one, or None where there is none."""
        if self._welcome is not None:
            self._bench.say_again()
            self._begin(self._welcome)
            return self.greet
        if self._reply is None or self._reply.over:
            self.was_told = self._reply is not None
            return None
        self._compute(self._reply)
        return self.exchange

    def _compute(self, reply: Reply) -> None:
        self._stopwatch.replied()
        self._seat.pending = reply
        push = self._seat.push()
        assert push is not None, "a reply that was not the last is worth a push"
        if self._delay is not None:
            seconds = self._delay.seconds(self._config.seed, self._seat.join.worker, push.seq)
            time.sleep((reply.steps or 1) * seconds)
        self._push = push, self._stopwatch.step()

    def greet(self) -> None:
        """Errand: say hello, and wait until everybody is here."""
        with self._being_forgotten():
            self._reply = self._door.hello(self._seat.join, self._seat.memory, self._identity)

    def exchange(self) -> None:
        """Errand: send the push, and wait for its reply."""
        assert self._push is not None
        with self._being_forgotten():
            self._reply = self._door.exchange(*self._push)
            self._stopwatch.arrived()

    @contextlib.contextmanager
    def _being_forgotten(self) -> Iterator[None]:
        """A server that does not know us any more has told us who we are to be."""
        try:
            yield
        except Forgotten as forgotten:
            self._welcome = forgotten.welcome
