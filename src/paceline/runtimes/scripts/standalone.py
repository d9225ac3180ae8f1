"""The transport of a script that runs alone: the server is in the same process, without a run folder or a log."""

from __future__ import annotations

from typing import Any

from paceline.assembly.core import make_policy, make_rule, make_schedule
from paceline.config import RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Input, Join, Push, Reply, SetLrFactor, Stop
from paceline.core.schedules import Budget, Training
from paceline.core.server import Roster, Server
from paceline.errors import Diverged
from paceline.interfaces import Layout
from paceline.settings.stopping import goal_of
from paceline.transports.protocol import ScriptTransport, Timing


class InProcessClient(ScriptTransport):
    """A worker's connection to a server in the same process."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._memory: WorkerBuffers | None = None
        self.figures: dict[str, float] = {}

    def start(self, config: RunConfig, layout: Layout, memory: WorkerBuffers, budget: Budget, skew: float) -> None:
        """Start the server from the model's current weights."""
        rule, policy = make_rule(config, layout, skew=skew), make_policy(config)
        training = Training(budget, make_schedule(config))
        self._server = Server(memory.weights.clone(), rule, policy, training, Roster(1))
        self._memory, self._goal = memory, goal_of(config)

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        return self._handle(join)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        return self._handle(push)

    def set_rate(self, rate: SetLrFactor) -> None:
        self._take(rate)

    def read_weights(self, final: bool) -> bool | None:
        assert self._server is not None and self._memory is not None, "start() comes first"
        self._memory.weights.copy_(self._server.evaluated)
        return self._server.evaluated is not self._server.weights

    def merge_statistics(self, samples: int) -> bool:
        return True

    def _take(self, message: Input) -> tuple[Reply, ...]:
        assert self._server is not None, "start() comes first"
        return self._server.handle(message).replies

    def _handle(self, message: Join | Push) -> Reply | None:
        (reply,) = self._take(message)
        assert self._server is not None and self._memory is not None, "start() comes first"
        if (found := self._server.divergence) is not None:
            what = "the loss is" if found.is_update_finite else "a gradient holds"
            raise Diverged(f"training diverged at update {self._server.version}: {what} a NaN or infinity")
        self._server.updater.reply_weights(message.worker, self._memory.weights)
        return reply

    def report(self, figures: dict[str, float]) -> None:
        self.figures |= figures
        if self._server is not None and self._goal is not None and self._goal.is_met(figures.get(self._goal.metric)):
            self._take(Stop())

    def close(self) -> None:
        pass
