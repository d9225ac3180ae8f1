"""`make tour`: the pure core on a quadratic, in one process: the same server under four reply policies.

Worker i pulls towards its own centre; the mean of all centres is the optimum of the whole.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.messages import Join, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import AtOnce, Bounded, Rounds
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.interfaces import Batch, Layout, Policy, pack
from paceline.reports.tables import table

NUM_WORKERS, SIZE, SPEEDS = 4, 16, (1.0, 1.0, 1.0, 4.0)


class Pull:
    """A task without a net: the gradient of |weights - centre|^2 / 2."""

    layout: Layout = pack([("weights", (SIZE,), True)])
    state_size = 0

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre

    def initial(self) -> Tensor:
        return torch.zeros(SIZE)

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient = weights, gradient

    def gradient(self, batch: Batch) -> float:
        torch.sub(self._weights, self.centre, out=self._gradient)
        return 0.5 * float(self._gradient.square().sum())


@dataclass
class OneSample:
    """Batches that hold nothing but their number."""

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 1, number)


def run(policy: Policy, steps: int) -> list[str]:
    """Drive one server; who pushes next is whoever is ready first (worker 3 takes four times as long)."""
    centres = torch.randn(NUM_WORKERS, SIZE, generator=torch.Generator().manual_seed(7))
    budget = Budget(samples=steps * NUM_WORKERS, epoch_samples=NUM_WORKERS)
    server = Server(torch.zeros(SIZE), Plain(Sgd()), policy, budget, Schedule(0.05), NUM_WORKERS)
    seats = [Seat(Pull(centres[worker]), OneSample(), Join(worker, 0)) for worker in range(NUM_WORKERS)]
    ready: dict[int, float] = {}
    now, pushes = 0.0, [0] * NUM_WORKERS
    jitter = random.Random(1)

    def deliver(replies: tuple[Reply, ...]) -> None:
        for reply in replies:
            server.weights_for(reply.worker, seats[reply.worker].weights)
            if not reply.over:
                seats[reply.worker].pending = reply
                ready[reply.worker] = now + SPEEDS[reply.worker] * jitter.uniform(0.9, 1.1)

    for seat in seats:
        deliver(server.handle(seat.join).replies)
    while ready and not server.over:
        worker = min(ready, key=lambda name: (ready[name], name))
        now = ready.pop(worker)
        push = seats[worker].push()
        assert push is not None
        pushes[worker] += 1
        deliver(server.handle(push).replies)
    distance = float((server.weights - centres.mean(0)).norm())
    stale = max(server.staleness, default=0)
    return [f"{now:.0f}", str(server.version), str(stale), str(server.dropped), f"{distance:.3f}", str(pushes)]


def main() -> None:
    """Four policies, one table."""
    paces: dict[str, Policy] = {
        "sync": Rounds(),
        "backup:1": Rounds(spare=1),
        "bounded:2": Bounded(2),
        "async": AtOnce(),
    }
    print("Four workers, the last four times slower, pull the weights towards their own centres.")
    print("A reply withheld is a worker held back: that is the whole difference between the rows.\n")
    rows = [[name, *run(policy, steps=100)] for name, policy in paces.items()]
    print(table(["pace", "time", "updates", "stale", "dropped", "distance", "pushes by worker"], rows))
    print("\nsync waits for the slowest; async is four times as fast and forgets the slow worker's centre;")
    print("bounded keeps everyone within two steps; backup goes ahead without the last, and drops its work.")


if __name__ == "__main__":
    main()
