"""The server of a script that was started alone: in the same process, with no folder and no log."""

from __future__ import annotations

from typing import Any

from paceline.assembly.core import make_policy, make_rule, make_schedule
from paceline.config import RunConfig
from paceline.core.messages import Input, Join, Push, Rate, Reply, Stop
from paceline.core.schedules import Budget, Training
from paceline.core.server import Roster, Server
from paceline.errors import Diverged
from paceline.interfaces import Layout
from paceline.settings.stopping import goal_of
from paceline.transports.protocol import Timing
from paceline.transports.shared_memory import Slot


class OwnServer:
    """A worker's door to a server that is here."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._slot: Slot | None = None
        self.figures: dict[str, float] = {}

    def start(self, config: RunConfig, layout: Layout, slot: Slot, budget: Budget) -> None:
        """Take the model's weights as they are."""
        rule, policy, training = make_rule(config, layout), make_policy(config), Training(budget, make_schedule(config))
        self._server = Server(slot.weights.clone(), rule, policy, training, Roster(1))
        self._slot, self._goal = slot, goal_of(config)

    def hello(self, join: Join, slot: Slot, facts: dict[str, Any]) -> Reply | None:
        return self._handle(join)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        return self._handle(push)

    def set_rate(self, rate: Rate) -> None:
        self._take(rate)

    def _take(self, message: Input) -> tuple[Reply, ...]:
        assert self._server is not None, "start() comes first"
        return self._server.handle(message).replies

    def _handle(self, message: Join | Push) -> Reply | None:
        (reply,) = self._take(message)
        assert self._server is not None and self._slot is not None, "start() comes first"
        if self._server.divergence is not None:
            raise Diverged(f"training diverged at update {self._server.version}: a gradient holds a NaN or infinity")
        self._server.updater.weights_for(message.worker, self._slot.weights)
        return reply

    def report(self, figures: dict[str, float]) -> None:
        self.figures |= figures
        if self._server is not None and self._goal is not None and self._goal.is_met(figures.get(self._goal.metric)):
            self._take(Stop())

    def close(self) -> None:
        pass
