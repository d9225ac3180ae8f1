"""Time of one server update, compared with its minimum: the rule's pass and one copy of the weights.

    python benchmarks/server_cost.py [--pairs N] [--quick] [--json] [--strict]

One process, one thread. Ours is Server.handle(push) under `async` (with its guard, which measures the push) and the
write of the weights into the worker's buffers; the peer is rule.apply and copy_ on the same sizes, also in shared
memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pairs
import torch

from paceline.core.buffers import BufferSizes
from paceline.core.messages import Disposition, Join, Push
from paceline.core.optimizers import Adam, Optimizer, Sgd
from paceline.core.policies import Async
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import PushGuard, Roster, Server
from paceline.interfaces import Arrival
from paceline.transports.shared_memory import SharedBuffers

SIZES = {"62k": 61_712, "1.2M": 1_200_000, "11M": 11_000_000}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {"sgd": lambda: Sgd(0.9), "adam": Adam}
NUM_WORKERS = 2
SIDE_SECONDS, QUICK_SIDE_SECONDS = 1.0, 0.3
LR, BAR = 0.005, 1.5
LEAST_JUDGED = 1_000_000
"""Minimum size with a bar: below it, the time of Python exceeds that of the arithmetic."""


class Served:
    """A server that handles pushes of two workers in turn."""

    def __init__(self, optimizer: Optimizer, slots: list[SharedBuffers], size: int) -> None:
        weights = torch.zeros(size)
        self._slots = slots
        training = Training(Budget(1 << 62, 60_000), Schedule(LR))
        self._server = Server(weights, Plain(optimizer), Async(), training, Roster(NUM_WORKERS))
        self._server.guard = PushGuard(self._server.members, self._server.norms, self._server.updater)
        replies = [reply for w in range(NUM_WORKERS) for reply in self._server.handle(Join(w, 0)).replies]
        self._serials = {reply.worker: reply.serial for reply in replies}

    def update(self, worker: int) -> None:
        slot, serial = self._slots[worker], self._serials[worker]
        outcome = self._server.handle(Push(worker, 0, serial, serial, 32, 0.5, slot.update, slot.state))
        assert outcome.disposition is Disposition.TAKEN
        for reply in outcome.replies:
            self._server.updater.reply_weights(reply.worker, self._slots[reply.worker].weights)
            self._serials[reply.worker] = reply.serial


class Floor:
    """The same arithmetic without a server."""

    def __init__(self, optimizer: Optimizer, slots: list[SharedBuffers], size: int) -> None:
        self._slots = slots
        self._weights = torch.zeros(size)
        self._rule = Plain(optimizer)
        self._state = self._rule.start(self._weights)
        self._arrivals = [Arrival(worker, 1, torch.tensor(LR), NUM_WORKERS) for worker in range(NUM_WORKERS)]

    def update(self, worker: int) -> None:
        slot = self._slots[worker]
        self._rule.apply(self._weights, self._state, slot.update, self._arrivals[worker])
        slot.weights.copy_(self._weights)


def milliseconds(update: Callable[[int], None], repetitions: int) -> float:
    """Return the mean time of an update."""
    begun = time.perf_counter()
    for number in range(repetitions):
        update(number % NUM_WORKERS)
    return 1000.0 * (time.perf_counter() - begun) / repetitions


def measure(name: str, size: int, number: int, seconds: float, say: Callable[[str], None] | None) -> pairs.Row:
    """Measure one row: 10 updates to warm up, then pairs of about `seconds` per side."""
    make = OPTIMIZERS[name.partition(" ")[0]]
    slots = [SharedBuffers.create(BufferSizes(size)) for _ in range(NUM_WORKERS)]
    for slot in slots:
        slot.update.copy_(torch.randn(size) * 1e-3)
        slot.segment.close_descriptor()
    served, floor = Served(make(), slots, size), Floor(make(), slots, size)
    milliseconds(served.update, 10)
    repetitions = max(10, round(1000.0 * seconds / milliseconds(floor.update, 10)))
    return pairs.compare(
        name,
        lambda: milliseconds(served.update, repetitions),
        lambda: milliseconds(floor.update, repetitions),
        number,
        at_most=BAR if size >= LEAST_JUDGED else None,
        say=say,
    )


def main() -> int:
    parsed = pairs.flags(__doc__).parse_args()
    number, seconds = pairs.num_pairs(parsed), QUICK_SIDE_SECONDS if parsed.quick else SIDE_SECONDS
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for optimizer in OPTIMIZERS:
        for title, size in SIZES.items():
            name = f"{optimizer} {title}"
            rows.append(measure(name, size, number, seconds, pairs.teller(parsed, name)))
    print(pairs.table(rows, "ms an update"))
    return pairs.close(parsed, "server_cost", rows)


if __name__ == "__main__":
    sys.exit(main())
