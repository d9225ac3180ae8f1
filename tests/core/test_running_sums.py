"""Sums over all workers' gradients: one huge gradient leaves nothing behind in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.messages import Drain, Join, Leave, Push
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.cached import Cached
from paceline.core.rules.dana import Dana
from paceline.core.rules.foresight import Foresight, ForesightCached
from paceline.core.rules.ringleader import Ringleader
from paceline.core.rules.step_limit import LrScaling
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import RECOMPUTE_EVERY, Roster, Server, restore_server, server_facts
from paceline.interfaces import Rule
from paceline.runtimes.sharded.sharded_rule import ShardedRule

RULES: dict[str, Callable[[], Rule]] = {
    "cached": lambda: Averaged(Cached(Sgd(), 3)),
    "foresight": lambda: LrScaling(Foresight(0.9, 3), 2),
    "foresight-cached": lambda: ForesightCached(0.9, 3),
    "dana": lambda: Dana(0.1, 3),
}
TRAINING = Training(Budget(10**9, 100), Schedule(1e-4))
SPIKE, SIZE = 1e3, 4


def server_with(rule: Rule) -> Server:
    server = Server(torch.zeros(SIZE), rule, Async(), TRAINING, Roster(3))
    for worker in range(3):
        server.handle(Join(worker, 0, None))
    return server


def push(server: Server, worker: int, gradient: Tensor) -> None:
    seq = server.members[worker].seq + 1
    assert server.handle(Push(worker, 0, seq, seq, 1, 0.5, gradient, torch.empty(0))).replies


def gradient_of(update: int) -> Tensor:
    """Small numbers that no rounding of thousands keeps."""
    return torch.tensor([0.1, 0.2, 0.3, 0.7]) / (1 + update % 7)


def sum_in_order(rows: Tensor) -> Tensor:
    return rows[0] + rows[1] + rows[2]


def rows_of(server: Server) -> Tensor:
    state = server.rule_state
    return state["cache"] if "cache" in state else state["velocities"]


def spiked(rule: Rule, pushes: int) -> Server:
    """A server after one huge gradient and then small ones, `pushes` in all."""
    server = server_with(rule)
    for update in range(pushes):
        push(server, update % 3, gradient_of(update) + (SPIKE if update == 1 else 0.0))
    return server


@pytest.mark.parametrize("name", RULES)
def test_one_huge_gradient_leaves_nothing_behind(name: str) -> None:
    server = spiked(RULES[name](), RECOMPUTE_EVERY - 1)
    assert not torch.equal(server.rule_state["total"], sum_in_order(rows_of(server))), "the spike shows what it left"
    push(server, 0, gradient_of(0))
    assert torch.equal(server.rule_state["total"], sum_in_order(rows_of(server)))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", [Drain, Leave])
def test_nothing_is_left_of_a_worker_that_leaves(name: str, kind: type[Drain | Leave]) -> None:
    server = spiked(RULES[name](), 30)
    server.handle(Leave(1, 0) if kind is Leave else Drain(1))
    if kind is Drain:
        push(server, 1, gradient_of(1))
    assert server.num_live == 2 and not rows_of(server)[1].any()
    assert torch.equal(server.rule_state["total"], sum_in_order(rows_of(server)))


@pytest.mark.parametrize("name", RULES)
def test_a_restored_server_and_one_of_a_range_get_the_same_bits(name: str) -> None:
    server, twin, part = spiked(RULES[name](), 250), server_with(RULES[name]()), spiked(RULES[name](), 250)
    restore_server(twin, server_facts(server), server.weights, server.rule_state)
    span = slice(1, 3)
    ranged = ShardedRule(part.rule, RULES[name](), span, part.weights, part.rule_state)
    part.updater.restrict_to(ranged, span, None, None)
    for update in range(250, 270):
        gradient = gradient_of(update)
        push(server, update % 3, gradient)
        push(twin, update % 3, gradient)
        push(part, update % 3, gradient[span])
        assert torch.equal(twin.weights, server.weights)
        assert torch.equal(twin.rule_state["total"], server.rule_state["total"])
        assert torch.equal(part.weights[span], server.weights[span])
        assert torch.equal(part.rule_state["total"][span], server.rule_state["total"][span])


@pytest.mark.parametrize("name", RULES)
def test_many_runs_at_once_get_the_sums_of_each_alone(name: str) -> None:
    rule, alone = RULES[name](), RULES[name]()
    state = rule.start(torch.zeros(2, SIZE))
    rows = state["cache"] if "cache" in state else state["velocities"]
    rows.copy_(torch.arange(24.0).sin().view(2, 3, SIZE))
    rule.recompute_sums(state)
    for run in range(2):
        single = alone.start(torch.zeros(SIZE))
        (single["cache"] if "cache" in single else single["velocities"]).copy_(rows[run])
        alone.recompute_sums(single)
        assert torch.equal(single["total"], state["total"][run])
        assert torch.equal(single["total"], sum_in_order(rows[run]))


def test_the_sums_of_ringleader_begin_anew_with_every_round() -> None:
    server = spiked(Ringleader(0.0, 3), 30)
    state = server.rule_state
    assert not state["stepped"].any(), "between two rounds"
    torch.testing.assert_close(state["total"], sum_in_order(state["means"] * (state["pushes"] > 0)), rtol=0, atol=1e-6)
