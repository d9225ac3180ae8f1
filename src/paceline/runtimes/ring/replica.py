"""A worker of a ring: it computes gradients and has its own copy of the server, which gets the pushes of all workers.

All copies get the same pushes in the same order, so all workers have bit-identical weights without sending them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from paceline.assembly.run import make_join, make_server, make_steps, work_of
from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import Input, Leave, Push, Reply
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
    memories: dict[int, WorkerBuffers]

    def handle(self, message: Input) -> None: ...


Reduced: TypeAlias = tuple[Mean | None, int | None]
"""How a round's mean is obtained if pushes arrive reduced, and what a push then costs in bytes."""


class RingWorker:
    """What every worker of a ring builds: its task, its data and its copy of the server."""

    def __init__(
        self, config: RunConfig, task: SupervisedTask, worker: int, incarnation: int, reduced: Reduced = (None, None)
    ) -> None:
        self.config, self.task, self.num_workers = config, task, config.workers or 1
        self.work = work_of(task, config)
        self.server = make_server(config, task, self.work, *reduced)
        self.join = make_join(config, self.work, worker, incarnation)
        self.reply: Reply | None = None  # the latest reply of the server copy to this worker

    def put(self, reply: Reply) -> None:
        """Keep a reply to this worker; the other workers' copies answer the others."""
        if reply.worker == self.join.worker:
            self.reply = reply

    def instance(self, ring: Ring, around: Callable[[Loader], Loader] | None = None) -> LocalWorker:
        """Build this worker. It computes on the weights of its server copy, so no reply copies them."""
        task, loader = make_steps(self.config, self.task, self.work, self.join.worker)
        weights = self.server.weights

        def memory(sizes: BufferSizes) -> WorkerBuffers:
            return WorkerBuffers.private(sizes, weights=weights, update=ring.gradient, state=ring.state)

        loader = loader if around is None else around(loader)
        return LocalWorker(task, loader, self.join, weights.device, make_memory=memory)


class Replica:
    """One worker and its copy of the server. `driver` sends replies to `place.put`."""

    def __init__(
        self, place: RingWorker, driver: InputDriver, instance: LocalWorker, ring: Ring, timings: TimingCollector | None
    ) -> None:
        self._place, self._driver, self._ring, self._timings = place, driver, ring, timings
        self._loop, self._join = WorkerLoop(instance, place.config), place.join
        # only this worker's buffers are real: the server copy writes no weights for other workers
        others = WorkerBuffers.private(BufferSizes(0), weights=place.server.weights)
        driver.memories.update(dict.fromkeys(range(place.num_workers), others))
        driver.memories[place.join.worker] = instance.memory

    def start(self, missing: Sequence[int] = ()) -> None:
        """Feed the server copy a join of each worker, in worker order, or a leave if the worker is missing."""
        place, incarnation = self._place, self._join.incarnation
        for worker in range(place.num_workers):
            join = make_join(place.config, place.work, worker, incarnation)
            self._driver.handle(Leave(worker, incarnation) if worker in missing else join)

    def run(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Train round by round until the budget is spent, the first worker stops, or `stopping` returns True."""
        server = self._driver.server
        self._loop.timer.restart()
        while (reply := self._place.reply) is not None and not (reply.finished or server.finished or stopping()):
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
        steps = int(self._driver.server.inside is not None)
        reply = Reply(self._join.worker, self._join.incarnation, 0, 0, 0, steps=steps)
        self._ring.exchange(*self._loop.step(reply))
