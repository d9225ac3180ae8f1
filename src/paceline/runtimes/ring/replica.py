"""A worker of a ring: it computes gradients and has its own copy of the server, which gets the pushes of all workers.

All copies get the same pushes in the same order, so all workers have the same weights, bit for bit, without sending
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.assembly.run import make_join, make_server, make_steps, work_of
from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Input, Join, Leave, Push, Reply
from paceline.core.server import Mean, Server
from paceline.core.worker import LocalWorker
from paceline.interfaces import Loader
from paceline.runtimes.ring.shared_memory import RingRound
from paceline.runtimes.server.timing import TimingCollector
from paceline.runtimes.worker_loop import WorkerLoop
from paceline.tasks.supervised import SupervisedTask
from paceline.transports.protocol import Timing


class Ring(Protocol):
    """How workers exchange their pushes, once per round."""

    gradient: Tensor
    state: Tensor

    def ready(self) -> None: ...

    def exchange(self, push: Push, timing: Timing) -> RingRound: ...

    def done(self) -> None: ...


class InputDriver(Protocol):
    """What feeds inputs to a server: a Host, which logs and evaluates, or the bare driver."""

    server: Server

    def handle(self, message: Input) -> None: ...


class ReplyInbox:
    """The latest reply to this worker, put there by the driver of its server copy."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self.reply: Reply | None = None

    def put(self, reply: Reply) -> None:
        """Keep a reply to this worker; the other workers' copies answer the others."""
        if reply.worker == self._worker:
            self.reply = reply


class RingWorker:
    """What every worker of a ring builds: its task, its data and its copy of the server."""

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

    def membership(self, missing: Sequence[int] = ()) -> list[Join | Leave]:
        """The joins of all workers, in worker order, with a leave for each missing one."""
        incarnation = self.join.incarnation
        return [
            Leave(worker, incarnation) if worker in missing else make_join(self.config, self.work, worker, incarnation)
            for worker in range(self.num_workers)
        ]

    def instance(self, ring: Ring, around: Callable[[Loader], Loader] | None = None) -> LocalWorker:
        """Build this worker. It computes on the weights of its server copy, so no reply copies them."""
        task, loader = make_steps(self.config, self.task, self.work, self.join.worker)
        weights = self.server.weights

        def memory(sizes: BufferSizes) -> WorkerBuffers:
            return WorkerBuffers.private(sizes, weights=weights, update=ring.gradient, state=ring.state)

        return LocalWorker(
            task, loader if around is None else around(loader), self.join, weights.device, make_memory=memory
        )

    def memories(self, own: WorkerBuffers) -> dict[int, WorkerBuffers]:
        """The buffers of each worker, as the server copy sees them: only this worker's are real."""
        others = WorkerBuffers.private(BufferSizes(0), weights=self.server.weights)
        return {worker: own if worker == self.join.worker else others for worker in range(self.num_workers)}


class Replica:
    """One worker and its copy of the server."""

    def __init__(
        self,
        driver: InputDriver,
        instance: LocalWorker,
        ring: Ring,
        config: RunConfig,
        inbox: ReplyInbox,
        timings: TimingCollector | None = None,
    ) -> None:
        self._driver, self._ring, self._join = driver, ring, instance.join
        self._loop = WorkerLoop(instance, config)
        self._timings = timings
        self._inbox = inbox

    def start(self, joins: list[Join | Leave]) -> None:
        """Feed the joins and leaves of `RingWorker.membership` to the server copy."""
        for message in joins:
            self._driver.handle(message)

    def run(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Train round by round until the budget is spent, the first worker stops, or `stopping` returns True."""
        server = self._driver.server
        self._loop.timer.restart()
        while (
            (reply := self._inbox.reply) is not None and not reply.finished and not server.finished and not stopping()
        ):
            self._ring.ready()
            rounds = self._ring.exchange(*self._loop.step(reply))
            if rounds.stop:
                return
            for worker in rounds.gone:
                self._driver.handle(Leave(worker, self._join.incarnation))
            for push, timing in zip(rounds.pushes, rounds.timings, strict=True):
                if self._timings is not None:
                    self._timings.add(push.worker, timing, max(1, server.members[push.worker].steps))
                self._driver.handle(push)
            self._ring.done()

    def final_exchange(self) -> None:
        """Take part in one last round that is not applied, because it carries the stop to the other workers."""
        steps = 1 if self._driver.server.inside is not None else 0
        reply = Reply(self._join.worker, self._join.incarnation, 0, 0, 0, steps=steps)
        self._ring.exchange(*self._loop.step(reply))
