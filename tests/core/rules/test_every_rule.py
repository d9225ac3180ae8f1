"""What holds for every rule: many runs are each alone, and a state that was saved goes on bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.policies import Async
from paceline.core.rules.foresight import ForesightCached
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server
from paceline.errors import UserError
from paceline.interfaces import Rule, State
from paceline.runs.checkpoint import (
    read_checkpoint,
    restore,
    take_checkpoint,
    write_checkpoint,
)
from tests.support.courses import Walk, course, walk_together
from tests.support.every_rule import RULES

some = settings(max_examples=4)


@pytest.mark.parametrize("name", RULES)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=3))
@some
def test_runs_side_by_side_are_each_alone(name: str, seeds: list[int]) -> None:
    several = [course(seed, max_workers=3, length=20) for seed in seeds]
    together = walk_together(RULES[name](3), several)
    for run, along in enumerate(several):
        alone = torch.tensor(Walk(RULES[name](3), along).to_the_end())
        torch.testing.assert_close(together[:, run], alone, rtol=1e-5, atol=1e-6)


def server_with(rule: Rule, weights: torch.Tensor) -> Server:
    return Server(weights, rule, Async(), Training(Budget(10**6, 10), Schedule(0.1)), Roster(3))


def through_a_checkpoint(walk: Walk, folder: Path, fresh: Rule) -> tuple[torch.Tensor, State]:
    """Written and read back, into the state of a rule that has seen nothing."""
    before = server_with(fresh, walk.weights)
    before.rule_state = walk.state
    path = write_checkpoint(folder, take_checkpoint(before, {}, 0, 0.0))
    after = server_with(fresh, torch.zeros_like(walk.weights))
    restore(after, read_checkpoint(path))
    return after.weights, after.rule_state


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", [5, 11])
def test_a_state_saved_in_mid_run_goes_on_bit_for_bit(name: str, seed: int, tmp_path: Path) -> None:
    along = course(seed, max_workers=3, length=40)
    walk, again = Walk(RULES[name](3), along), Walk(RULES[name](3), along)
    for turn in along.turns[:20]:
        walk.turn(turn)
        again.turn(turn)
    fresh = RULES[name](3)
    again.weights, again.state = through_a_checkpoint(again, tmp_path, fresh)
    again.rule = fresh
    for turn in along.turns[20:]:
        walk.turn(turn)
        again.turn(turn)
        assert torch.equal(walk.weights, again.weights)
        assert all(torch.equal(tensor, again.state[key]) for key, tensor in walk.state.items())
    assert torch.equal(*(one.rule.evaluated(one.weights, one.state) for one in (walk, again)))


@pytest.mark.parametrize("name", sorted(set(RULES) - {"plain", "damped", "buffered", "delayed"}))
def test_who_leaves_leaves_nothing_behind(name: str) -> None:
    """When everybody has gone, no row holds anything and no sum counts anybody."""
    along = course(3, max_workers=3, length=30)
    walk = Walk(RULES[name](3), along)
    for turn in along.turns:
        walk.turn(turn)
    for worker in range(3):
        walk.rule.leave(walk.state, worker)
    for key, tensor in walk.state.items():
        if tensor.dim() > 1:
            assert not tensor.any(), key
    if "total" in walk.state and name != "ringleader":  # there who leaves after its step counts until the round ends
        torch.testing.assert_close(walk.state["total"], torch.zeros_like(walk.weights), rtol=0.0, atol=1e-4)


OTHERS = [("foresight-cached", "dana"), ("averaged", "foresight-cached"), ("plain", "damped"), ("dana", "cached")]


@pytest.mark.parametrize(("then", "now"), OTHERS)
def test_a_checkpoint_of_another_rule_is_refused_naming_both(then: str, now: str) -> None:
    checkpoint = take_checkpoint(server_with(RULES[then](3), torch.ones(4)), {}, 0, 0.0)
    server = server_with(RULES[now](3), torch.zeros(4))
    with pytest.raises(UserError) as error:
        restore(server, checkpoint)
    text = str(error.value)
    assert f"made by rule {RULES[then](3).name} (" in text and f"this run uses rule {RULES[now](3).name} (" in text
    assert "\n" not in text
    assert not server.weights.any(), "nothing was restored"


def test_a_checkpoint_of_another_size_is_refused_naming_both() -> None:
    checkpoint = take_checkpoint(server_with(ForesightCached(0.9, 3), torch.ones(4)), {}, 0, 0.0)
    with pytest.raises(UserError, match=r"cache \[3, 4\].*cache \[4, 4\]"):
        restore(server_with(ForesightCached(0.9, 4), torch.ones(4)), checkpoint)
    with pytest.raises(UserError, match=r"another model \(4 floats\) .*\(6 floats\)"):
        restore(server_with(ForesightCached(0.9, 3), torch.ones(6)), checkpoint)
    unnamed = dataclasses.replace(
        checkpoint, facts={key: value for key, value in checkpoint.facts.items() if key != "rule"}
    )
    restore(server_with(ForesightCached(0.9, 3), torch.zeros(4)), unnamed)  # as written before rules had names
