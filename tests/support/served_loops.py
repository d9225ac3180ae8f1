"""Own loops served over TCP by a thread of the test: real clients, whose loops are sessions or made-up numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import Any

from paceline.config import SCRIPT, RunConfig
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Disposition, Join, Push, Reply
from paceline.interfaces import State, pack
from paceline.runs.arrival_log import read_arrivals
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.remote.client import LoopClient
from paceline.runtimes.scripts.serving.introductions import Introductions, UnstartedRun
from paceline.runtimes.scripts.session import Session, WorkerEnv
from paceline.runtimes.server.remote_service import ForegroundChannel
from paceline.settings.resolve import resolve_own_loop
from paceline.system.environment import package_version
from paceline.transports.listener import Listener
from paceline.transports.protocol import Timing
from tests.support.own_loops import first_facts

TOKEN = b"of these served loops"
LAYOUT = pack([("weight", (2, 3), True)])
TIMING = Timing(0.1, 0.1, 0.0)


class ServedLoops:
    """The server of a run of a script: from the first worker to the result."""

    def __init__(
        self,
        folder: Path,
        workers: int = 1,
        first_incarnation: int = 0,
        wait_seconds: float | None = None,
        **settings: Any,
    ) -> None:
        asked = RunConfig(**{"strategy": "async", **settings}, task=f"{SCRIPT}:loop", runs=str(folder), name="run")
        self.config = resolve_own_loop(dataclasses.replace(asked, workers=workers, threads=1))
        self.folder = RunFolder.create(self.config)
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self.result: dict[str, Any] | None = None
        self.listener = Listener("127.0.0.1:0", TOKEN)
        self.line = ForegroundChannel(lambda row: self.notes.append(str(row.get("text"))))
        run = UnstartedRun(self.config, self.folder, first_incarnation)
        self.introductions = Introductions(run, self.listener, self.line, {}, wait_seconds)
        self._clients: list[LoopClient] = []
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        try:
            self.result = self.introductions.serve({}, resume=False)
        except BaseException as error:
            self.error = error
        finally:
            self.listener.close()
            for peer in self.introductions.peers.by_worker.values():
                peer.close()

    def __enter__(self) -> ServedLoops:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self.line.stop("interrupted")
        self.wait()
        for client in self._clients:
            client.abandon()
            client.close()
        for one in (self.line.connection, self.line._other):
            one.close()

    def wait(self) -> None:
        """Until the run is over."""
        self._thread.join(20)
        assert not self._thread.is_alive()

    def worker(self, worker: int | None = None, address: str | None = None) -> LoopWorker:
        """A worker that the server has welcomed."""
        made = LoopWorker(self, worker, address or self.listener.address)
        self._clients.append(made.client)
        return made

    def log(self) -> list[tuple[Any, ...]]:
        """The inputs in the run's log, without their times and without pushes that were sent again."""
        records, _ = read_arrivals(self.folder.arrivals_file, self.folder.config())
        taken = [record for record in records if record.disposition != Disposition.REPEATED]
        return [(record.kind, record.worker, record.seq, record.samples) for record in taken]


class LoopWorker:
    """A worker whose loop is what the test sends."""

    def __init__(self, served: ServedLoops, worker: int | None, address: str) -> None:
        self.served, self.client = served, LoopClient(address, TOKEN, patience=20)
        self.welcome = self.client.apply({"version": package_version("paceline"), "worker": worker}, patience=5)
        self.number, self.incarnation = self.welcome["worker"], self.welcome["incarnation"]
        self.memory = WorkerBuffers.private(BufferSizes(LAYOUT.size, loop=3))
        self.reply: Reply | None = None

    def session(self) -> Session:
        """A session of this worker, for a loop of its own."""
        env = WorkerEnv(self.served.config, self.number, self.incarnation, self.client, keep=self.client.keep)
        return Session(env)

    def hello(self, frozen: State | None = None, used: State | None = None, **facts: Any) -> Reply | None:
        """Say hello for a loop without an optimizer, that is true except for these facts."""
        self.client.keep(frozen or {}, used or {})
        join = Join(self.number, self.incarnation, None, 1, own_loop=True)
        told = first_facts(LAYOUT, **{"settings": {"lr": 0.1}, "numbers": 3, **facts})
        self.reply = self.client.hello(join, self.memory, told)
        return self.reply

    def push(self, gradient: float = 1.0, optimizer: int = 0, weight: float | None = None) -> Reply | None:
        """Push one number everywhere."""
        assert self.reply is not None
        self.memory.update.fill_(gradient)
        named = self.number, self.incarnation, self.reply.serial, self.reply.serial
        tensors = self.memory.update, self.memory.state, weight, self.memory.loop
        self.reply = self.client.exchange(Push(*named, 10, 0.5, *tensors, optimizer), TIMING)
        return self.reply

    def finish(self) -> None:
        """End the loop, and leave."""
        assert self.client.read_weights(final=True) is not None
        self.client.close()


def in_thread(call: Any) -> threading.Thread:
    """Run a call that blocks beside the test."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread
