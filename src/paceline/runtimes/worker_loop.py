"""The worker's loop, used by every runtime: from a reply to the next push, with its injected delay and its timing."""

from __future__ import annotations

import time
from typing import Any

from paceline.config import RunConfig
from paceline.core.messages import Push, Reply
from paceline.core.worker import LocalWorker
from paceline.settings.notation import delays_of
from paceline.transports.protocol import Timing, Transport


class StepTimer:
    """Measures a worker's steps, and adds the delay that `--delay` asks for at the end of each."""

    def __init__(self, config: RunConfig, worker: int) -> None:
        self._delay = delays_of(config).get(worker)
        self._seed, self._worker = config.seed, worker
        self.restart()

    def restart(self) -> None:
        """Measure the wait for the next reply from now on."""
        self._pushed = time.perf_counter()
        self._arrived: float | None = None

    def arrived(self) -> None:
        """Note that the reply has come, if its step cannot begin yet because another worker uses this process."""
        self._arrived = time.perf_counter()

    def end(self, began: float, cpu: float, seq: int, steps: int) -> Timing:
        """Sleep for the injected delay of push `seq` (`steps` local steps, 0 for one gradient), then end the step.

        The step began at `began` by the clock, and at `cpu` by the time that this process has computed.
        """
        if self._delay is not None:
            time.sleep((steps or 1) * self._delay.seconds(self._seed, self._worker, seq))
        waited = (self._arrived or began) - self._pushed
        self._pushed, self._arrived = time.perf_counter(), None
        return Timing(time.process_time() - cpu, self._pushed - began, waited)


class WorkerLoop:
    """One worker at work: `step` turns a reply into a timed push, `run` exchanges pushes until training is over."""

    def __init__(self, instance: LocalWorker, config: RunConfig) -> None:
        self.instance = instance
        self.timer = StepTimer(config, instance.join.worker)

    def step(self, reply: Reply) -> tuple[Push, Timing]:
        """Compute the push that `reply`, which is not the last one, asks for."""
        began, cpu = time.perf_counter(), time.process_time()
        self.instance.pending = reply
        push = self.instance.push()
        assert push is not None, "a reply that is not the last one asks for a push"
        return push, self.timer.end(began, cpu, push.seq, reply.steps)

    def run(self, transport: Transport, facts: dict[str, Any]) -> Reply | None:
        """Join and work until training is over. Return the last reply, or None if the server is gone."""
        reply = transport.hello(self.instance.join, self.instance.memory, facts)
        self.timer.restart()
        while reply is not None and not reply.finished:
            reply = transport.exchange(*self.step(reply))
        return reply
