"""The transport of a script that runs alone: the server is in the same process, without a run folder or a log."""

from __future__ import annotations

from typing import Any

from paceline.assembly.own_loop import loop_config, loop_server, optimizer_state
from paceline.config import RunConfig
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Join, Push, Reply, Stop
from paceline.core.own_loop.torch_optimizer import OptimizerFailed
from paceline.core.server import Server
from paceline.errors import Diverged, UserError
from paceline.interfaces import State
from paceline.settings.stopping import goal_of
from paceline.transports.protocol import ScriptTransport, Timing


class InProcessClient(ScriptTransport):
    """A worker's connection to a server in the same process, which the first message starts."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._goal = config, goal_of(config)
        self._server: Server | None = None
        self._memory: WorkerBuffers | None = None
        self.figures: dict[str, float] = {}
        self.initial: list[State] = []
        """The states that the user had loaded into the optimizers."""

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        config = loop_config(self._config, facts)
        self._server = loop_server(config, facts, memory.weights.clone(), initial=self.initial)
        self._memory = memory
        return self._handle(join)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        return self._handle(push)

    def read_weights(self, final: bool) -> bool | None:
        assert self._server is not None and self._memory is not None, "hello() comes first"
        self._memory.weights.copy_(self._server.evaluated)
        return self._server.evaluated is not self._server.weights

    def read_optimizer(self, number: int) -> State | None:
        assert self._server is not None, "hello() comes first"
        return {name: tensor.clone() for name, tensor in optimizer_state(self._server, number).items()}

    def merge_statistics(self, samples: int) -> bool:
        return True

    def _handle(self, message: Join | Push) -> Reply | None:
        assert self._server is not None and self._memory is not None, "hello() comes first"
        try:
            (reply,) = self._server.handle(message).replies
        except OptimizerFailed as error:
            raise UserError(f"the optimizer of the script fails in the server: {error}") from error
        if (found := self._server.divergence) is not None:
            what = "the loss is" if found.is_update_finite else "a gradient holds"
            raise Diverged(f"training diverged at update {self._server.version}: {what} a NaN or infinity")
        self._server.send_weights(reply, self._memory)
        return reply

    def report(self, figures: dict[str, float]) -> None:
        self.figures |= figures
        if self._server is not None and self._goal is not None and self._goal.is_met(figures.get(self._goal.metric)):
            self._server.handle(Stop())

    def close(self) -> None:
        pass
