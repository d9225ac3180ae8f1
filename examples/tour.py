"""`make tour`: the same server three times, in step, free, and with local steps, on a quadratic under a virtual clock.

Four workers each know a bowl of their own, and the weights belong at the bottom of all four together. A step takes 1 s,
worker 3 takes 2 s, a message is 1 s under way. Read `drive` first: a task, a policy and a cluster make a run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.buffers import Memory
from paceline.core.messages import Input, Join, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import AtOnce, Rounds
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Inside, Schedule
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.interfaces import Batch, Policy, State, pack
from paceline.reports.tables import table
from paceline.simulation.event_queue import Agenda
from paceline.simulation.network import Link
from paceline.simulation.simulator import Cluster, Simulation
from paceline.simulation.step_times import StepTimes, parse_speeds
from paceline.tasks.local_sgd import LocalSteps

NUM_WORKERS, SIZE, LR, SECONDS = 4, 16, 0.1, 120.0
RANDOM = torch.Generator().manual_seed(7)
BOTTOMS = torch.randn(NUM_WORKERS, SIZE, generator=RANDOM)
STEEPNESS = 0.2 + 1.6 * torch.rand(NUM_WORKERS, SIZE, generator=RANDOM)
OPTIMUM = (STEEPNESS * BOTTOMS).sum(0) / STEEPNESS.sum(0)


class Bowl:
    """A task without a net: steepness * (weights - bottom)^2 / 2, summed. Each worker has another."""

    layout, state_size = pack([("weights", (SIZE,), True)]), 0

    def __init__(self, worker: int) -> None:
        self.own: State = {}
        self._bottom, self._steepness = BOTTOMS[worker], STEEPNESS[worker]
        self.own: State = {}

    def initial(self) -> Tensor:
        return torch.zeros(SIZE)

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient = weights, gradient

    def gradient(self, batch: Batch) -> float:
        away = self._weights - self._bottom
        torch.mul(away, self._steepness, out=self._gradient)
        return 0.5 * float((self._gradient * away).sum())


class OneSample:
    """Batches that hold nothing but their number."""

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 1, number)


@dataclass
class Watched:
    """Keeps the server: hands out weights with every reply, and notes a row for every update."""

    server: Server
    agenda: Agenda
    memories: dict[int, Memory]
    rows: list[list[str]]
    send: Callable[[Reply], None]

    def handle(self, message: Input) -> None:
        version, before = self.server.version, self.server.staleness.copy()
        pushes = [member.accepted for member in self.server.members.values()]
        replies = self.server.handle(message).replies
        if self.server.version > version:
            now = [member.accepted for member in self.server.members.values()]
            who = [str(worker) for worker in range(NUM_WORKERS) if now[worker] > pushes[worker]]
            distance = float((self.server.weights - OPTIMUM).norm())
            stale = max(self.server.staleness - before)
            row = [version + 1, f"{self.agenda.now:.0f} s", f"{distance:.3f}", stale, " ".join(who), now]
            self.rows.append([str(entry) for entry in row])
        for reply in replies:
            self.server.hand_out(reply, self.memories[reply.worker])
            self.send(reply)


def drive(policy: Policy, inside: Inside | None = None) -> list[list[str]]:
    """Two minutes of virtual time; a row for every update."""
    agenda, forever = Agenda(), Budget(1_000_000, 1)
    schedule = Schedule(LR if inside is None else 1.0)  # a drift has its learning rate inside and is applied as it is
    server = Server(torch.zeros(SIZE), Plain(Sgd()), policy, forever, schedule, NUM_WORKERS, inside=inside)
    sides: list[Watched] = []

    def start(send: Callable[[Reply], None]) -> Watched:
        sides.append(Watched(server, agenda, {}, [], send))
        return sides[-1]

    def come(worker: int, incarnation: int) -> Seat:
        task = Bowl(worker) if inside is None else LocalSteps(Bowl(worker), Sgd())
        return Seat(task, OneSample(), Join(worker, incarnation))

    speeds = StepTimes(parse_speeds("1,1,1,2", NUM_WORKERS), seed=0)
    steps = inside.steps if inside is not None else 1
    cluster = Cluster(speeds, nbytes=4 * SIZE, link=Link(1e9, latency=1.0), steps_a_push=steps)
    agenda.at(SECONDS, lambda _: setattr(agenda, "stopped", True), None)
    Simulation(agenda, cluster, NUM_WORKERS, come, start).run()
    return sides[-1].rows


def show(title: str, rows: list[list[str]], every: int, notice: str) -> None:
    """The first update, every so many-th and the last, then what to see in them."""
    shown = [row for row in rows if row is rows[0] or row is rows[-1] or int(row[0]) % every == 0]
    print(f"\n{title}\n")
    print(table(["update", "time", "distance", "staleness", "who computed", "batches by worker"], shown))
    print(f"\n{notice}")


def main() -> None:
    """Three policies, three tables."""
    print("Four workers, each with a bowl of its own, look for the bottom of all four.")
    print("A reply withheld is a worker held back: that is the whole difference.")
    notice = "Notice: it goes straight to the bottom, but at the pace of worker 3."
    show("sync: the server replies when all have pushed", drive(Rounds()), 5, notice)
    notice = "Notice: five times as many updates, each stale: soon near, never at rest."
    show("async: the server replies at once", drive(AtOnce()), 25, notice)
    notice = "Notice: few exchanges, but each pulls its own way: it ends beside the bottom."
    show("local:8: eight steps each, then the mean of the drifts", drive(Rounds(), Inside(8, Schedule(LR))), 1, notice)


if __name__ == "__main__":
    main()
