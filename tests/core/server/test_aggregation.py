"""Median and trimmed mean of a round: equal to numpy's, in any order of arrival, whatever a minority sends."""

from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
import pytest
import torch

from paceline.core.messages import Join, Push
from paceline.core.optimizers import Sgd
from paceline.core.policies import Barrier
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Exchange, Roster, Server, TrimmedMean, aggregation
from paceline.core.server.aggregation import comparators

BUDGET = Budget(samples=10**9, epoch_samples=100)
SIZE = 97


def pushes_of(updates: torch.Tensor, seq: int = 0, losses: dict[int, float] | None = None) -> list[Push]:
    """One push for each row; the samples differ."""
    told = losses or {}
    return [
        Push(worker, 0, seq, seq, worker + 1, told.get(worker, 1.0), update, torch.empty(0))
        for worker, update in enumerate(updates)
    ]


def oracle(updates: torch.Tensor, trim: int | None) -> np.ndarray:
    values = updates.numpy()
    if trim is None:
        return np.median(values, axis=0)
    return np.sort(values, axis=0)[trim : len(values) - trim].mean(axis=0)


@pytest.mark.parametrize("span", [SIZE - 1, 10, 1 << 15])
@pytest.mark.parametrize(("count", "trim"), [(n, None) for n in range(2, 12)] + [(3, 1), (5, 1), (5, 2), (8, 3)])
def test_it_equals_its_oracle(count: int, trim: int | None, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "SPAN", span)
    updates = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(count))
    updates[:, 5] = updates[0, 5]  # ties
    combine = TrimmedMean(trim)
    for _ in range(2):
        found = combine(pushes_of(updates), 9)
        if trim is None:
            assert np.array_equal(found.numpy(), oracle(updates, trim))
        else:
            np.testing.assert_allclose(found.numpy(), oracle(updates, trim), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", range(1, 11))
def test_the_network_sorts_every_sequence_of_zeros_and_ones(count: int) -> None:
    """Then it sorts everything (Knuth's 0-1 principle)."""
    for values in product((0, 1), repeat=count):
        row = list(values)
        for low, high in comparators(count):
            row[low], row[high] = min(row[low], row[high]), max(row[low], row[high])
        assert row == sorted(values)


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("trim", [None, 1])
def test_a_lie_leaves_the_result_between_honest_values(lie: float, trim: int | None) -> None:
    updates = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1))
    updates[3] = lie
    honest = updates[[0, 1, 2, 4]]
    found = TrimmedMean(trim)(pushes_of(updates), 5)
    assert (found >= honest.amin(0)).all() and (found <= honest.amax(0)).all()


@pytest.mark.parametrize(("trim", "left"), [(None, None), (1, 0), (2, 1)])
def test_a_broken_push_counts_as_one_of_those_to_leave_out(trim: int | None, left: int | None) -> None:
    """As the highest value of every coordinate it would bias what remains."""
    updates = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(4))
    updates[2, 7] = math.nan
    expected = oracle(updates[[0, 1, 3, 4, 5]], left)
    np.testing.assert_allclose(TrimmedMean(trim)(pushes_of(updates), 6).numpy(), expected, rtol=1e-6, atol=1e-7)


def server_of(combine: TrimmedMean, count: int) -> Server:
    training, rule = Training(BUDGET, Schedule(0.5)), Plain(Sgd())
    server = Server(torch.zeros(SIZE), rule, Barrier(), training, Roster(count), Exchange(aggregate=combine))
    for worker in range(count):
        server.handle(Join(worker, 0))
    return server


def test_the_order_of_arrival_does_not_matter() -> None:
    updates = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(2))
    found = []
    for order in permutations(range(4)):
        server = server_of(TrimmedMean(1), 4)
        for worker in order:
            server.handle(pushes_of(updates)[worker])
        found.append(server.weights)
    assert all(torch.equal(weights, found[0]) for weights in found)
    np.testing.assert_allclose(found[0].numpy(), -0.5 * oracle(updates, 1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("broken", [{"update": math.nan}, {"loss": math.inf}], ids=str)
@pytest.mark.parametrize(("combine", "most"), [(TrimmedMean(), 2), (TrimmedMean(1), 1), (None, 0)])
def test_a_run_survives_as_many_broken_pushes_as_are_left_out(
    broken: dict[str, float], combine: TrimmedMean | None, most: int
) -> None:
    for number in range(4):
        server = server_of(combine or TrimmedMean(1), 5)
        if combine is None:
            server = Server(torch.zeros(SIZE), Plain(Sgd()), Barrier(), Training(BUDGET, Schedule(0.5)), Roster(5))
            for worker in range(5):
                server.handle(Join(worker, 0))
        updates = torch.ones(5, SIZE)
        updates[:number] = broken.get("update", 1.0)
        losses = dict.fromkeys(range(number), broken.get("loss", 1.0))
        for push in pushes_of(updates, losses=losses):
            server.handle(push)
        assert (server.divergence is None) == (number <= most)
        assert torch.isfinite(server.weights).all()


def test_a_round_that_lost_workers_is_trimmed_to_what_it_has() -> None:
    updates = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(3))
    assert torch.equal(TrimmedMean(2)(pushes_of(updates), 2), updates.sum(0) / 2)
