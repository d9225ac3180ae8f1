"""A worker of a ring: besides its own gradients it has its own copy of the server, fed what all workers push.

Everybody feeds the same pushes in the same order to the same Server, so everybody has the same weights, bit for bit,
and nobody has to send them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.assembly.run import make_join, make_server, make_steps, work_of
from paceline.config import RunConfig
from paceline.core.buffers import Memory, Sizes
from paceline.core.messages import Input, Join, Leave, Push, Reply
from paceline.core.server import Mean, Server
from paceline.core.worker import Seat
from paceline.interfaces import Loader
from paceline.runtimes.ring.shared_memory import Round
from paceline.runtimes.server.timing import Stopwatch, Timekeeper
from paceline.settings.durations import delays_of
from paceline.tasks.supervised import SupervisedTask
from paceline.transports.protocol import Timing


class Ring(Protocol):
    """How a worker meets the others once a round."""

    gradient: Tensor
    state: Tensor

    def ready(self) -> None: ...

    def exchange(self, push: Push, timing: Timing) -> Round: ...

    def done(self) -> None: ...


class Driver(Protocol):
    """Takes inputs through a server: a Host, which logs them and evaluates, or nobody but the server itself."""

    server: Server
    send: Callable[[Reply], None]

    def handle(self, message: Input) -> None: ...


class Place:
    """What every worker of a ring builds alike: its task and data, and a server of its own."""

    def __init__(
        self,
        config: RunConfig,
        task: SupervisedTask,
        worker: int,
        incarnation: int,
        mean: Mean | None = None,
        nbytes: int | None = None,
    ) -> None:
        self.config, self.task = config, task
        self.work = work_of(task, config)
        self.server = make_server(config, task, self.work, mean, nbytes)
        self.join = make_join(config, self.work, worker, incarnation)
        self.num_workers = config.workers or 1

    def roll(self, missing: Sequence[int] = ()) -> list[Join | Leave]:
        """Who joins and who is not waited for, in worker order."""
        incarnation = self.join.incarnation
        return [
            Leave(worker, incarnation) if worker in missing else make_join(self.config, self.work, worker, incarnation)
            for worker in range(self.num_workers)
        ]

    def seat(self, ring: Ring, around: Callable[[Loader], Loader] | None = None) -> Seat:
        """This worker, computing on the server's own weights: no push moves them."""
        task, loader = make_steps(self.config, self.task, self.work, self.join.worker)
        weights = self.server.weights

        def memory(sizes: Sizes) -> Memory:
            return Memory.private(sizes, weights=weights, update=ring.gradient, state=ring.state)

        return Seat(task, loader if around is None else around(loader), self.join, weights.device, make_memory=memory)

    def memories(self, own: Memory) -> dict[int, Memory]:
        """Where each worker's weights go: only this one's are here, the others write their own."""
        others = Memory.private(Sizes(0), weights=self.server.weights)
        return {worker: own if worker == self.join.worker else others for worker in range(self.num_workers)}


class Replica:
    """One worker and its copy of the server."""

    def __init__(
        self,
        driver: Driver,
        seat: Seat,
        ring: Ring,
        config: RunConfig,
        timekeeper: Timekeeper | None = None,
    ) -> None:
        self._driver, self._seat, self._ring, self._config = driver, seat, ring, config
        self._join = seat.join
        self._timekeeper = timekeeper
        self._delay = delays_of(config).get(seat.join.worker)
        self._reply: Reply | None = None
        driver.send = self._take

    def _take(self, reply: Reply) -> None:
        if reply.worker == self._join.worker:
            self._reply = reply

    def start(self, joins: list[Join | Leave]) -> None:
        """Everybody who is there joins, everybody who is not is not waited for."""
        for message in joins:
            self._driver.handle(message)

    def run(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Round after round until the budget is spent, or the first worker ends it; `stopping` is asked in between."""
        server, stopwatch = self._driver.server, Stopwatch()
        while self._reply is not None and not self._reply.over and not server.over and not stopping():
            self._ring.ready()
            stopwatch.replied()
            push = self._compute(self._reply)
            rounds = self._ring.exchange(push, stopwatch.step())
            if rounds.stop:
                return
            for worker in rounds.gone:
                self._driver.handle(Leave(worker, self._join.incarnation))
            for push, timing in zip(rounds.pushes, rounds.timings, strict=True):
                if self._timekeeper is not None:
                    self._timekeeper.add(push.worker, timing, server.steps_of(push.worker))
                self._driver.handle(push)
            self._ring.done()

    def bow_out(self) -> None:
        """One round more that nobody applies, where the others cannot be told otherwise that this was the end."""
        steps = 1 if self._driver.server.inside is not None else 0
        reply = Reply(self._join.worker, self._join.incarnation, 0, 0, 0, steps=steps)
        self._ring.exchange(self._compute(reply), Timing(0.0, 0.0, 0.0))

    def _compute(self, reply: Reply) -> Push:
        self._seat.pending = reply
        push = self._seat.push()
        assert push is not None, "a reply that was not the last is worth a push"
        if self._delay is not None:
            time.sleep((reply.steps or 1) * self._delay.seconds(self._config.seed, self._join.worker, push.seq))
        return push
