"""A ring of workers on one machine: every worker reads all gradients from shared memory, without copies.

Each worker counts the rounds it has posted and the rounds it has read, in memory that all of them map. A worker waits
for the others once per round; it checks that all have read its gradient only before it writes the next one.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.messages import Push
from paceline.system.shared_segment import Segment, page_aligned
from paceline.transports.protocol import Timing

NUM_FACTS = 10
"""Numbers stored with a gradient: incarnation, seq, reply, samples, loss, three times, weight, and whether to stop."""
WEIGHT, STOP = NUM_FACTS - 2, NUM_FACTS - 1
RECHECK_SECONDS = 0.0005


def facts_of(push: Push, timing: Timing) -> list[float]:
    """The numbers stored with a gradient, except whether to stop."""
    return [push.incarnation, push.seq, push.reply, push.samples, push.loss, *timing, push.weight or 0.0]


def push_from(worker: int, facts: list[float], update: Tensor, state: Tensor) -> Push:
    """Build the push of `worker` from these numbers."""
    incarnation, seq, reply, samples = (int(value) for value in facts[:4])
    return Push(worker, incarnation, seq, reply, samples, facts[4], update, state, facts[WEIGHT] or None)


def timing_from(facts: list[float]) -> Timing:
    """Read the timing of a step from these numbers."""
    return Timing(*facts[5:WEIGHT])


@dataclass(frozen=True)
class RingRound:
    """The pushes of all workers in worker order, the workers that were lost, and whether the run stops."""

    pushes: list[Push]
    timings: list[Timing]
    gone: list[int]
    stop: bool


class RingMemory:
    """The shared block: counters, facts, and each worker's gradient and state."""

    def __init__(self, segment: Segment, num_workers: int, size: int, state_size: int) -> None:
        self.segment, self.num_workers = segment, num_workers
        self.counters = segment.array((3, num_workers), np.int64, 0)
        offset = page_aligned(self.counters.nbytes)
        self.facts = segment.array((num_workers, NUM_FACTS), np.float64, offset)
        offset += page_aligned(self.facts.nbytes)
        self.gradients = self._vectors(offset, size)
        self.states = self._vectors(offset + num_workers * page_aligned(4 * size), state_size)

    def _vectors(self, offset: int, size: int) -> list[Tensor]:
        if not size:
            return [torch.empty(0)] * self.num_workers
        places = [offset + worker * page_aligned(4 * size) for worker in range(self.num_workers)]
        return [torch.frombuffer(self.segment.memory, dtype=torch.float32, count=size, offset=at) for at in places]

    @staticmethod
    def nbytes(num_workers: int, size: int, state_size: int) -> int:
        """The size of the block in bytes."""
        head = page_aligned(24 * num_workers) + page_aligned(8 * NUM_FACTS * num_workers)
        return head + num_workers * (page_aligned(4 * size) + page_aligned(4 * state_size))

    @staticmethod
    def create(num_workers: int, size: int, state_size: int) -> RingMemory:
        """Allocate a new block."""
        nbytes = RingMemory.nbytes(num_workers, size, state_size)
        return RingMemory(Segment.create(nbytes, "gradients of a ring"), num_workers, size, state_size)


class SharedRing:
    """One worker of the ring.

    `bells` has one eventfd per worker, which wakes it. While a worker waits, it serves the sockets given to `listen`.
    It polls `polls` times, yielding the core in between, before it sleeps.
    """

    def __init__(self, memory: RingMemory, worker: int, bells: list[int], polls: int = 0) -> None:
        self.memory, self.worker = memory, worker
        self.gradient, self.state = memory.gradients[worker], memory.states[worker]
        self._bells, self._polls = bells, polls
        self._others = [place for place in range(memory.num_workers) if place != worker]
        self._posted, self._read, self._gone = memory.counters
        self._round = 0
        self._poll = select.epoll()
        self._poll.register(bells[worker], select.EPOLLIN)
        self._heard: dict[int, Callable[[], None]] = {}

    def listen(self, line: socket.socket, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `line` is readable."""
        self._heard[line.fileno()] = callback
        self._poll.register(line.fileno(), select.EPOLLIN)

    def forget(self, line: socket.socket) -> None:
        """Stop listening to `line`."""
        self._poll.unregister(line.fileno())
        del self._heard[line.fileno()]

    def hear(self, seconds: float | None = 0.0) -> None:
        """Serve all readable sockets, waiting at most `seconds` for one (None: without a limit)."""
        for line, _ in self._poll.poll(seconds):
            if line == self._bells[self.worker]:
                os.eventfd_read(line)
            elif line in self._heard:
                self._heard[line]()

    def lose(self, worker: int) -> None:
        """Mark a worker as lost. Its counters do not change any more, so all workers miss it from the same round on."""
        self._gone[worker] = 1
        self._ring_all()
        os.eventfd_write(self._bells[self.worker], 1)  # this one too: the caller may be another thread

    def ready(self) -> None:
        """Before writing the next gradient: wait until all have read the last one."""
        self._wait(self._read, RECHECK_SECONDS)

    def exchange(self, push: Push, timing: Timing) -> RingRound:
        """Post a push and wait for those of all workers. The gradients stay readable until `done`."""
        memory, facts = self.memory, self.memory.facts
        facts[self.worker, :STOP] = facts_of(push, timing)
        self._post()
        self._wait(self._posted, None)
        here = [place for place in range(memory.num_workers) if self._posted[place] >= self._round]
        rows = facts.tolist()
        return RingRound(
            [push_from(place, rows[place], memory.gradients[place], memory.states[place]) for place in here],
            [timing_from(rows[place]) for place in here],
            [place for place in self._others if place not in here],
            bool(rows[0][STOP]),
        )

    def stop(self) -> None:
        """On the first worker: tell all workers that the run has ended."""
        self.memory.facts[self.worker, STOP] = 1.0
        self._post()

    def _post(self) -> None:
        self._round += 1
        self._posted[self.worker] = self._round
        self._ring_all()

    def done(self) -> None:
        """Finish the round: buffers may be reused, and workers that did not take part are removed from the ring."""
        self._others = [place for place in self._others if self._posted[place] >= self._round]
        self._read[self.worker] = self._round

    def _ring_all(self) -> None:
        for place in self._others:
            os.eventfd_write(self._bells[place], 1)

    def _is_there(self, counters: Any) -> bool:
        return all(counters[place] >= self._round or self._gone[place] for place in self._others)

    def _wait(self, counters: Any, recheck: float | None) -> None:
        for _ in range(self._polls):
            if self._is_there(counters):
                return
            os.sched_yield()
        while not self._is_there(counters):
            self.hear(recheck)
