"""Low rank among workers that average with each other: nothing is lost, and everybody has the same."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from paceline.codecs.lowrank import LowRank
from paceline.interfaces import State, pack

LAYOUT = pack([("conv", (6, 3, 5, 5), True), ("bias", (6,), False), ("dense", (40, 33), True), ("last", (10,), True)])


class Circle:
    """Workers in threads of one process, whose vectors become their mean."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number)
        self._vectors: dict[int, Tensor] = {}
        self._number = number

    def average(self, worker: int, vector: Tensor) -> None:
        self._vectors[worker] = vector.clone()
        self._barrier.wait()
        mean = torch.stack([self._vectors[place] for place in range(self._number)]).mean(0)
        self._barrier.wait()
        vector.copy_(mean)


def updates_of(worker: int, rounds: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(worker)
    found = []
    for _ in range(rounds):
        flat = torch.zeros(LAYOUT.size)
        for view in LAYOUT.views(flat).values():
            view.copy_(torch.randn(view.shape, generator=generator))
        found.append(flat)
    return found


@pytest.mark.parametrize("number", [1, 3])
def test_what_all_have_and_what_each_keeps_is_what_went_in(number: int) -> None:
    circle, rounds = Circle(number), 4
    means: dict[int, list[Tensor]] = {worker: [] for worker in range(number)}
    memories: dict[int, State] = {}

    def work(worker: int) -> None:
        codec = LowRank(LAYOUT, 2)
        memory = memories[worker] = codec.start(worker)
        for update in updates_of(worker, rounds):
            memory["error"].add_(update)
            out = torch.full((LAYOUT.size,), torch.nan)
            codec.reduce(memory, out, lambda vector: circle.average(worker, vector))
            means[worker].append(out)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in range(number):
        assert all(torch.equal(one, other) for one, other in zip(means[0], means[worker], strict=True))
    went_in = sum(torch.stack(updates_of(worker, rounds)).sum(0) for worker in range(number)) / number
    kept = sum(memories[worker]["error"] for worker in range(number)) / number
    assert torch.allclose(torch.stack(means[0]).sum(0) + kept, went_in, atol=1e-4)
    assert float(kept.abs().sum()) > 0.0


def test_alone_it_is_what_a_server_would_decode() -> None:
    codec, update = LowRank(LAYOUT, 3), updates_of(0, 1)[0]
    ours, theirs = codec.start(), codec.start()
    ours["error"].add_(update)
    out, decoded = torch.empty(LAYOUT.size), torch.empty(LAYOUT.size)
    codec.reduce(ours, out, lambda vector: None)
    payload = torch.empty(codec.capacity, dtype=torch.uint8)
    codec.encode(update, theirs, payload)
    codec.decode(payload, decoded)
    assert torch.allclose(out, decoded, atol=1e-5)
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-4), name
