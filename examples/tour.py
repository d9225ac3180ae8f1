"""`make tour`: sync, async and local SGD with the same server, on a quadratic problem under a virtual clock.

Each of four workers has its own quadratic loss; the weights should minimise their sum. A step takes 1 s (2 s on worker
3), a message 1 s. Read `drive` first: it makes a run from a task, a policy and a cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Input, Join, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, InnerLoop, Schedule, Training
from paceline.core.server import Roster, Server
from paceline.core.worker import LocalWorker
from paceline.interfaces import Batch, Policy, State, pack
from paceline.reports.tables import table
from paceline.simulation.event_queue import EventQueue
from paceline.simulation.network import NetworkLink
from paceline.simulation.simulator import Cluster, Simulation
from paceline.simulation.step_times import StepTimes, parse_speeds
from paceline.tasks.local_sgd import LocalSteps

NUM_WORKERS, SIZE, LR, SECONDS = 4, 16, 0.1, 120.0
RANDOM = torch.Generator().manual_seed(7)
BOTTOMS = torch.randn(NUM_WORKERS, SIZE, generator=RANDOM)
STEEPNESS = 0.2 + 1.6 * torch.rand(NUM_WORKERS, SIZE, generator=RANDOM)
OPTIMUM = (STEEPNESS * BOTTOMS).sum(0) / STEEPNESS.sum(0)


class Bowl:
    """A task without a network: the sum of steepness * (weights - bottom)^2 / 2, different for each worker."""

    layout, state_size = pack([("weights", (SIZE,), True)]), 0

    def __init__(self, worker: int) -> None:
        self.local_state: State = {}
        self._bottom, self._steepness = BOTTOMS[worker], STEEPNESS[worker]

    def initial(self) -> Tensor:
        return torch.zeros(SIZE)

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient = weights, gradient

    def gradient(self, batch: Batch) -> float:
        away = self._weights - self._bottom
        torch.mul(away, self._steepness, out=self._gradient)
        return 0.5 * float((self._gradient * away).sum())


class OneSample:
    """Batches without data, of one sample each."""

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 1, number)


@dataclass
class Watched:
    """Runs the server: sends weights with every reply and records a table row for every update."""

    server: Server
    agenda: EventQueue
    memories: dict[int, WorkerBuffers]
    rows: list[list[str]]
    send: Callable[[Reply], None]

    def handle(self, message: Input) -> None:
        version, before = self.server.version, self.server.staleness.copy()
        pushes = [member.accepted for member in self.server.members.values()]
        replies = self.server.handle(message).replies
        if self.server.version > version:
            now = [member.accepted for member in self.server.members.values()]
            workers = [str(worker) for worker in range(NUM_WORKERS) if now[worker] > pushes[worker]]
            distance = float((self.server.weights - OPTIMUM).norm())
            stale = max(self.server.staleness - before)
            row = [version + 1, f"{self.agenda.now:.0f} s", f"{distance:.3f}", stale, " ".join(workers), now]
            self.rows.append([str(entry) for entry in row])
        for reply in replies:
            self.server.send_weights(reply, self.memories[reply.worker])
            self.send(reply)


def drive(policy: Policy, inside: InnerLoop | None = None) -> list[list[str]]:
    """Two minutes of virtual time; a row for every update."""
    agenda, forever = EventQueue(), Budget(1_000_000, 1)
    schedule = Schedule(LR if inside is None else 1.0)  # a drift has its learning rate inside and is applied as it is
    server = Server(torch.zeros(SIZE), Plain(Sgd()), policy, Training(forever, schedule, inside), Roster(NUM_WORKERS))
    sides: list[Watched] = []

    def start(send: Callable[[Reply], None]) -> Watched:
        sides.append(Watched(server, agenda, {}, [], send))
        return sides[-1]

    def make_worker(worker: int, incarnation: int) -> LocalWorker:
        task = Bowl(worker) if inside is None else LocalSteps(Bowl(worker), Sgd())
        return LocalWorker(task, OneSample(), Join(worker, incarnation))

    speeds = StepTimes(parse_speeds("1,1,1,2", NUM_WORKERS), seed=0)
    steps = inside.steps if inside is not None else 1
    cluster = Cluster(speeds, nbytes=4 * SIZE, link=NetworkLink(1e9, latency=1.0), steps_per_push=steps)
    agenda.at(SECONDS, lambda _: setattr(agenda, "stopped", True), None)
    Simulation(agenda, cluster, NUM_WORKERS, make_worker, start).run()
    return sides[-1].rows


def show(title: str, rows: list[list[str]], every: int, notice: str) -> None:
    """Print the first, every `every`-th and the last update, then a remark."""
    shown = [row for row in rows if row is rows[0] or row is rows[-1] or int(row[0]) % every == 0]
    print(f"\n{title}\n")
    print(table(["update", "time", "distance", "staleness", "workers", "batches by worker"], shown))
    print(f"\n{notice}")


def main() -> None:
    """Run three policies and print three tables."""
    print("Four workers minimise the sum of four quadratic losses, one loss per worker.")
    print("The strategies differ only in when the server replies to a waiting worker.")
    notice = "Notice: it converges to the optimum, at the speed of worker 3."
    show("sync: the server replies when all have pushed", drive(Barrier()), 5, notice)
    notice = "Notice: five times as many updates, all stale: near at once, never at rest."
    show("async: the server replies at once", drive(Async()), 25, notice)
    notice = "Notice: few exchanges, but each pulls its own way: it ends beside the bottom."
    show(
        "local:8: eight steps each, then the mean of the drifts",
        drive(Barrier(), InnerLoop(8, Schedule(LR))),
        1,
        notice,
    )


if __name__ == "__main__":
    main()
