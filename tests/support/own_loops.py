"""Several own loops in one process, on the server that `paceline run` would make for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config import SCRIPT, RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Join, Push, Reply, SetLrFactor
from paceline.core.server import Server
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.server import learn
from paceline.runtimes.scripts.session import Session, WorkerEnv
from paceline.settings.resolve import resolve
from paceline.transports.protocol import Hello, ScriptTransport, Timing


class OneServer:
    """A server that the first session's model makes. Its policy must answer every push at once."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = resolve(RunConfig(**settings, task=SCRIPT, runs=str(folder), name="run"))
        self.folder = RunFolder.create(self.config)
        self.server: Server | None = None
        self.memories: dict[int, WorkerBuffers] = {}
        self.replies: dict[int, Reply] = {}

    def session(self, worker: int, incarnation: int = 0) -> Session:
        return Session(WorkerEnv(self.config, worker, incarnation, OneServerTransport(self, worker)))

    def handle(self, message: Any) -> None:
        assert self.server is not None
        for reply in self.server.handle(message).replies:
            self.server.send_weights(reply, self.memories[reply.worker])
            self.replies[reply.worker] = reply


class OneServerTransport(ScriptTransport):
    """Calls the server; there is no start barrier, so a worker may begin before the others have come."""

    def __init__(self, one: OneServer, worker: int) -> None:
        self._one, self._worker = one, worker

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        one = self._one
        if one.server is None:
            _, _, one.server = learn(one.config, [Hello(join, memory, facts)] * (one.config.workers or 1), one.folder)
            one.server.roster.pending.clear()
        one.memories[join.worker] = memory
        one.handle(join)
        return one.replies[join.worker]

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        self._one.handle(push)
        return self._one.replies[push.worker]

    def set_rate(self, rate: SetLrFactor) -> None:
        self._one.handle(rate)

    def read_weights(self, final: bool) -> bool | None:
        server = self._one.server
        assert server is not None
        self._one.memories[self._worker].weights.copy_(server.evaluated)
        return server.evaluated is not server.weights

    def merge_statistics(self, samples: int) -> bool:
        return True

    def report(self, figures: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
