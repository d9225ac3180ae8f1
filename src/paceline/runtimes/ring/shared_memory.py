"""Workers of one machine that exchange with each other: everybody reads everybody's gradient where it was written.

Each worker counts the rounds it has posted and the rounds it has read, in memory that all of them map. Nobody copies a
gradient, and nobody waits twice: that all have read is only looked at when the next gradient is about to be written.
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

NUM_FACTS = 9
"""Numbers that ride beside a gradient: incarnation, seq, reply, samples, loss, three times, and whether to stop."""
STOP = NUM_FACTS - 1
RECHECK_SECONDS = 0.0005


def facts_of(push: Push, timing: Timing) -> list[float]:
    """All that rides beside a gradient but the word to stop."""
    return [push.incarnation, push.seq, push.reply, push.samples, push.loss, *timing]


def push_from(worker: int, facts: list[float], update: Tensor, state: Tensor) -> Push:
    """The push of `worker` that these facts tell of."""
    incarnation, seq, reply, samples = (int(value) for value in facts[:4])
    return Push(worker, incarnation, seq, reply, samples, facts[4], update, state)


def timing_from(facts: list[float]) -> Timing:
    """How long its step took."""
    return Timing(*facts[5:STOP])


@dataclass(frozen=True)
class Round:
    """What all workers pushed, in worker order; who left before posting; whether the first worker ends the run."""

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
        self.gradients = [self._floats(offset + worker * page_aligned(4 * size), size) for worker in range(num_workers)]
        offset += num_workers * page_aligned(4 * size)
        part = page_aligned(4 * state_size)
        self.states = [self._floats(offset + worker * part, state_size) for worker in range(num_workers)]

    def _floats(self, offset: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0)
        return torch.frombuffer(self.segment.memory, dtype=torch.float32, count=size, offset=offset)

    @staticmethod
    def nbytes(num_workers: int, size: int, state_size: int) -> int:
        """Bytes the block takes."""
        head = page_aligned(24 * num_workers) + page_aligned(8 * NUM_FACTS * num_workers)
        return head + num_workers * (page_aligned(4 * size) + page_aligned(4 * state_size))

    @staticmethod
    def create(num_workers: int, size: int, state_size: int) -> RingMemory:
        """A new block, reserved."""
        nbytes = RingMemory.nbytes(num_workers, size, state_size)
        return RingMemory(Segment.create(nbytes, "gradients of a ring"), num_workers, size, state_size)


class SharedRing:
    """One worker's place in the ring.

    `bells` wake sleepers, one a worker. While it waits it hears `lines`: sockets with what to do when they are ready.
    It looks `polls` times, giving way to others in between, before it goes to sleep.
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
        """Call `callback` whenever `line` has something to say."""
        self._heard[line.fileno()] = callback
        self._poll.register(line.fileno(), select.EPOLLIN)

    def forget(self, line: socket.socket) -> None:
        """Listen to `line` no longer."""
        self._poll.unregister(line.fileno())
        del self._heard[line.fileno()]

    def hear(self, seconds: float | None = 0.0) -> None:
        """Attend to whatever is ready on the lines, waiting at most so long for it (None: until something is)."""
        for line, _ in self._poll.poll(seconds):
            if line == self._bells[self.worker]:
                os.eventfd_read(line)
            elif line in self._heard:
                self._heard[line]()

    def lose(self, worker: int) -> None:
        """A worker's process is gone: its counters stand still, so everybody finds it missing from the same round."""
        self._gone[worker] = 1
        self._ring_all()
        os.eventfd_write(self._bells[self.worker], 1)  # this one too: whoever tells may be another thread

    def ready(self) -> None:
        """Before the gradient is written again: until all have read the last one."""
        self._wait(self._read, RECHECK_SECONDS)

    def exchange(self, push: Push, timing: Timing) -> Round:
        """Post a push, and wait for everybody's; the gradients stay readable until `done`."""
        memory, facts = self.memory, self.memory.facts
        facts[self.worker, :STOP] = facts_of(push, timing)
        self._post()
        self._wait(self._posted, None)
        here = [place for place in range(memory.num_workers) if self._posted[place] >= self._round]
        rows = facts.tolist()
        return Round(
            [push_from(place, rows[place], memory.gradients[place], memory.states[place]) for place in here],
            [timing_from(rows[place]) for place in here],
            [place for place in self._others if place not in here],
            bool(rows[0][STOP]),
        )

    def stop(self) -> None:
        """The first worker's last word: whoever still posts learns that the run has ended."""
        self.memory.facts[self.worker, STOP] = 1.0
        self._post()

    def _post(self) -> None:
        self._round += 1
        self._posted[self.worker] = self._round
        self._ring_all()

    def done(self) -> None:
        """This round's gradients are read, and whoever is missing is missed from now on."""
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
