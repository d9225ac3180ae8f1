"""Several own loops in one process, on the server that `paceline run` would make for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.assembly.own_loop import optimizer_state
from paceline.config import SCRIPT, RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Join, Leave, Push, Reply
from paceline.core.server import Server
from paceline.interfaces import Layout, State
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.serving.server import learn
from paceline.runtimes.scripts.session import Session, WorkerEnv
from paceline.settings.resolve import resolve
from paceline.transports.protocol import Hello, ScriptTransport, Timing


def first_facts(layout: Layout, /, **known: Any) -> dict[str, Any]:
    """What a loop without an optimizer says in its first message, as far as a test does not say otherwise."""
    facts = {"layout": layout.to_rows(), "state_layout": [], "sources": None, "settings": {}, "optimizers": []}
    data = {"num_samples": 100, "order": None, "skew": 0.0, "batch_size": 10, "max_samples": 10}
    return {**facts, "numbers": 0, "loaders": 0, "notes": [], "steps": None, "epochs": 1.0, **data, **known}


class OneServer:
    """A server that the first session's model makes. Its policy must answer every push at once."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = resolve(RunConfig(**settings, task=f"{SCRIPT}:loop", runs=str(folder), name="run"))
        self.folder = RunFolder.create(self.config)
        self.server: Server | None = None
        self.facts: list[dict[str, Any]] = []  # of the first messages
        self.memories: dict[int, WorkerBuffers] = {}
        self.replies: dict[int, Reply] = {}

    def session(self, worker: int, incarnation: int = 0) -> Session:
        return Session(WorkerEnv(self.config, worker, incarnation, OneServerTransport(self, worker)))

    def lose(self, worker: int) -> None:
        """As if the worker's process was killed."""
        assert self.server is not None
        self.handle(Leave(worker, self.server.members[worker].incarnation))

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
        one.facts.append(json.loads(json.dumps(facts)))
        if one.server is None:
            _, _, one.server = learn(one.config, [Hello(join, memory, facts)] * (one.config.workers or 1), one.folder)
            one.server.roster.pending.clear()
        one.memories[join.worker] = memory
        one.handle(join)
        return one.replies[join.worker]

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        self._one.handle(push)
        return self._one.replies[push.worker]

    def read_optimizer(self, number: int) -> State | None:
        assert self._one.server is not None
        return optimizer_state(self._one.server, number)

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
