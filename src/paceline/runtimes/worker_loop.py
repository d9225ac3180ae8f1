"""The worker's loop, used by every runtime: from a reply to the next push, with its injected delay and its timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.config import RunConfig
from paceline.core.messages import Push, Reply
from paceline.core.worker import LocalWorker
from paceline.settings.durations import delays_of
from paceline.transports.protocol import Timing, Transport


class StepTimer:
    """Measures a worker's steps and adds the delay that `--delay` asks for: `begin` on a reply, `end` before a push."""

    def __init__(self, config: RunConfig, worker: int) -> None:
        self._delay = delays_of(config).get(worker)
        self._seed, self._worker = config.seed, worker
        self.restart()

    def restart(self) -> None:
        """Measure the wait for the next reply from now on."""
        self._pushed = time.perf_counter()
        self._arrived: float | None = None
        self.begin()

    def arrived(self) -> None:
        """Note that the reply has come, if its step cannot begin yet because another worker uses this process."""
        self._arrived = time.perf_counter()

    def begin(self) -> None:
        """Begin the step that the reply asks for."""
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._waited = (self._arrived or self._began) - self._pushed
        self._arrived = None

    def end(self, seq: int, steps: int) -> Timing:
        """Sleep for the injected delay of push `seq` (`steps` local steps, 0 for one gradient), then end the step."""
        if self._delay is not None:
            time.sleep((steps or 1) * self._delay.seconds(self._seed, self._worker, seq))
        self._pushed = time.perf_counter()
        return Timing(time.process_time() - self._cpu, self._pushed - self._began, self._waited)


class WorkerLoop:
    """One worker at work: `step` turns a reply into a timed push, `run` exchanges pushes until training is over."""

    def __init__(self, seat: LocalWorker, config: RunConfig) -> None:
        self.seat = seat
        self.timer = StepTimer(config, seat.join.worker)

    def step(self, reply: Reply) -> tuple[Push, Timing]:
        """Compute the push that `reply`, which is not the last one, asks for."""
        self.timer.begin()
        self.seat.pending = reply
        push = self.seat.push()
        assert push is not None, "a reply that is not the last one asks for a push"
        return push, self.timer.end(push.seq, reply.steps)

    def run(
        self, transport: Transport, facts: dict[str, Any], before_push: Callable[[], None] | None = None
    ) -> Reply | None:
        """Join and work until training is over. Return the last reply, or None if the server is gone."""
        reply = transport.hello(self.seat.join, self.seat.memory, facts)
        self.timer.restart()
        while reply is not None and not reply.over:
            push, timing = self.step(reply)
            if before_push is not None:
                before_push()
            reply = transport.exchange(push, timing)
        return reply
