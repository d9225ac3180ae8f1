"""Steps that shorten when many pushes are under way."""

from __future__ import annotations

import pytest
import torch

from paceline.core.optimizers import Sgd
from paceline.core.rules.plain import Plain
from paceline.core.rules.step_limit import STALENESS_SMOOTHING, LrScaling
from paceline.interfaces import Arrival


def slow_steps(stalenesses: list[int], live: list[int], most: int) -> list[float]:
    """What the lr is multiplied by at each update."""
    mean, found = 0.0, []
    for staleness, number in zip(stalenesses, live, strict=True):
        mean = (1 - STALENESS_SMOOTHING) * mean + STALENESS_SMOOTHING * staleness
        found.append(min(1.0, most / max(number, mean + 1)))
    return found


CASES = {
    "few workers step fully": ([1] * 30, [2] * 30),
    "many step shorter at once": ([0] * 5, [8] * 5),
    "longer again when they leave": ([3] * 10, [8] * 5 + [2] * 5),
    "old pushes of few workers shorten too": ([40] * 200, [3] * 200),
}


@pytest.mark.parametrize("name", CASES)
def test_the_step_follows_the_pushes_under_way(name: str) -> None:
    stalenesses, live = CASES[name]
    weights, many = torch.zeros(1), torch.zeros(2, 1)
    rule, beside = LrScaling(Plain(Sgd()), 4), LrScaling(Plain(Sgd()), 4)
    state, states = rule.start(weights), beside.start(many)
    expected, before = slow_steps(stalenesses, live, 4), 0.0
    for number, (staleness, workers) in enumerate(zip(stalenesses, live, strict=True)):
        rule.apply(weights, state, -torch.ones(1), Arrival(0, staleness, torch.tensor(1.0), workers))
        arrival = Arrival(
            torch.zeros(2, dtype=torch.int64),
            torch.full((2, 1), float(staleness)),
            torch.ones(2, 1),
            torch.full((2, 1), float(workers)),
        )
        beside.apply(many, states, -torch.ones(2, 1), arrival)
        assert weights.item() - before == pytest.approx(expected[number], rel=1e-4)
        before = weights.item()
    assert many[1].item() == pytest.approx(before, rel=1e-4)
    assert min(expected) < 1.0 or name.startswith("few")
