"""A worker on any machine: it applies to a server, is told what to train, and works until it is over.

Where the connection breaks it finds back to its place; where the server was started anew it joins anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.assemble import cores
from paceline.config import RunConfig, from_dict, places_of
from paceline.core.messages import Reply
from paceline.core.worker import Seat
from paceline.crew import identity_of, make_join, make_seat, make_task, work_of
from paceline.data.datasets import Dataset, load
from paceline.delays import parse_delays
from paceline.errors import Forgotten
from paceline.launch import locate_data
from paceline.runs.environment import package_version
from paceline.runtimes.allocator import keep_freed_memory
from paceline.runtimes.timekeeping import Stopwatch
from paceline.transports.tcp_worker import TcpWorkerDoor
from paceline.transports.tls import Tls

Say = Callable[[str], None]


@dataclass(frozen=True)
class Connection:
    """How to reach a server."""

    address: str
    token: bytes
    tls: Tls | None
    patience: float
    """Seconds to go on trying while it cannot be reached."""


@dataclass(frozen=True)
class Own:
    """What a worker decides itself, whatever the server says."""

    data_dir: str | None = None
    threads: int | None = None
    worker: int | None = None


def work(connection: Connection, own: Own, say: Say) -> bool:
    """Work until it is over; False where the server went away before."""
    keep_freed_memory()
    bench = Workbench(own, say)
    with contextlib.closing(
        TcpWorkerDoor(connection.address, connection.token, connection.tls, connection.patience)
    ) as door:
        welcome = door.apply(own_words(own))
        while True:
            try:
                return bench.serve(door, welcome)
            except Forgotten as forgotten:
                welcome = forgotten.welcome
                say("the server was started anew, or took us for lost: joining again")


def own_words(own: Own) -> dict[str, Any]:
    """What an applicant says of itself."""
    return {"worker": own.worker, "version": package_version("paceline"), "torch": torch.__version__}


class Workbench:
    """The data, loaded once, and everything that is made from it for each incarnation."""

    def __init__(self, own: Own, say: Say) -> None:
        self._own, self._say = own, say
        self._loaded: tuple[RunConfig, Dataset | None] | None = None

    def serve(self, door: TcpWorkerDoor, welcome: dict[str, Any]) -> bool:
        """One incarnation, from hello to the end; False where the server was gone before."""
        config, dataset = self._prepare(from_dict(welcome["config"]))
        worker = int(welcome["worker"])
        torch.set_num_threads(config.threads or 1)
        task = make_task(config, dataset)
        division = work_of(task, config)
        join = make_join(config, division, worker, int(welcome["incarnation"]))
        seat = make_seat(config, task, division, join)
        self._say(f"worker {worker} of {config.workers}: {config.strategy}, {config.model}, {config.threads} threads")
        reply = door.hello(join, seat.memory, identity_of(task))
        return self._exchange(door, seat, config, reply)

    def _prepare(self, config: RunConfig) -> tuple[RunConfig, Dataset | None]:
        """The server's settings with this machine's own in their place, and the data."""
        config = replace(config, data_dir=self._own.data_dir, threads=self._own.threads or cores())
        if self._loaded is None or self._loaded[0] != config:
            location = locate_data(config)
            self._loaded = config, load(location) if location is not None else None
        return self._loaded

    @staticmethod
    def _exchange(door: TcpWorkerDoor, seat: Seat, config: RunConfig, reply: Reply | None) -> bool:
        worker, stopwatch = seat.join.worker, Stopwatch()
        delay = parse_delays(config.delay or [], places_of(config)).get(worker)
        while reply is not None and not reply.over:
            seat.pending = reply
            push = seat.push()
            assert push is not None, "a reply that was not the last is worth a push"
            if delay is not None:
                time.sleep((reply.steps or 1) * delay.seconds(config.seed, worker, push.seq))
            reply = door.exchange(push, stopwatch.step())
            stopwatch.replied()
        return reply is not None
