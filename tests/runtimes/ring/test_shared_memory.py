"""The meeting place of a ring: everybody sees the same rounds, also those who come late and those who die."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest
import torch

from paceline.core.messages import Push
from paceline.runtimes.ring.shared_memory import RingMemory, RingRound, SharedRing
from paceline.transports.protocol import Timing

SIZE, NO_TIME = 32, Timing(0.0, 0.0, 0.0)


def make_rings(number: int, polls: int = 0) -> list[SharedRing]:
    memory = RingMemory.create(number, SIZE, 3)
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(number)]
    return [SharedRing(memory, worker, bells, polls) for worker in range(number)]


def push_of(ring: SharedRing, step: int) -> Push:
    weight = ring.worker + 0.25 if ring.worker else None
    return Push(ring.worker, 0, step, step, 8 + ring.worker, 0.5 * step, ring.gradient, ring.state, weight)


def step(ring: SharedRing, number: int) -> tuple[RingRound, torch.Tensor]:
    ring.ready()
    ring.gradient.fill_(10.0 * number + ring.worker)
    found = ring.exchange(push_of(ring, number), NO_TIME)
    total = torch.stack([push.update for push in found.pushes]).sum(0)
    ring.done()
    return found, total


@pytest.mark.parametrize("polls", [0, 50])
def test_everybody_reads_what_everybody_wrote_in_every_round(polls: int) -> None:
    rings = make_rings(3, polls)
    seen: list[list[tuple[float, list[int]]]] = [[], [], []]

    def work(ring: SharedRing) -> None:
        hurry = random.Random(ring.worker)
        for number in range(200):
            if hurry.random() < 0.1:
                time.sleep(0.001)
            found, total = step(ring, number)
            seen[ring.worker].append((float(total[0]), [push.samples for push in found.pushes]))

    threads = [threading.Thread(target=work, args=(ring,)) for ring in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == seen[2] == [(30.0 * number + 3.0, [8, 9, 10]) for number in range(200)]


def test_facts_of_a_push_arrive_as_they_were_sent() -> None:
    one, other = make_rings(2)
    answers: list[RingRound] = []
    thread = threading.Thread(target=lambda: answers.append(other.exchange(push_of(other, 7), Timing(1.0, 2.0, 3.0))))
    thread.start()
    found = one.exchange(push_of(one, 7), Timing(4.0, 5.0, 6.0))
    thread.join()
    facts = [(push.worker, push.seq, push.reply, push.samples, push.loss, push.weight) for push in found.pushes]
    assert facts == [(0, 7, 7, 8, 3.5, None), (1, 7, 7, 9, 3.5, 1.25)]
    assert found.timings == answers[0].timings == [Timing(4.0, 5.0, 6.0), Timing(1.0, 2.0, 3.0)]
    assert not found.stop and not found.gone


def test_who_died_before_posting_is_missing_from_the_same_round_for_all() -> None:
    rings = make_rings(3)
    found: dict[int, list[RingRound]] = {0: [], 1: [], 2: []}

    def work(ring: SharedRing, rounds: int) -> None:
        for number in range(rounds):
            found[ring.worker].append(step(ring, number)[0])

    threads = [threading.Thread(target=work, args=(ring, 6 if ring.worker < 2 else 4)) for ring in rings]
    for thread in threads:
        thread.start()
    threads[2].join()
    rings[0].lose(2)
    for thread in threads[:2]:
        thread.join()
    for worker in (0, 1):
        assert [len(one.pushes) for one in found[worker]] == [3, 3, 3, 3, 2, 2]
        assert [one.gone for one in found[worker]] == [[], [], [], [], [2], []]


def test_who_died_after_posting_still_counts_in_that_round() -> None:
    one, other = make_rings(2)
    other.stop()  # posts, and waits for nobody
    one.lose(1)
    found = one.exchange(push_of(one, 0), NO_TIME)
    assert [push.worker for push in found.pushes] == [0, 1] and not found.gone


def test_the_first_worker_ends_the_run_for_everybody() -> None:
    first, other = make_rings(2)
    first.stop()
    assert other.exchange(push_of(other, 0), NO_TIME).stop


def test_a_waiting_worker_hears_its_lines() -> None:
    first, _ = make_rings(2)
    ours, theirs = socket.socketpair()

    class Gone(Exception):
        pass

    def notice() -> None:
        raise Gone

    first.listen(ours, notice)
    threading.Timer(0.05, theirs.close).start()
    with ours, pytest.raises(Gone):
        first.exchange(push_of(first, 0), NO_TIME)
