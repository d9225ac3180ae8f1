"""A rule with momentum of its own under parameter groups: what their settings change, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.messages import Join, Push
from paceline.core.own_loop.grouped import Grouped
from paceline.core.own_loop.settings import LoopLayout, Number, OwnLoops
from paceline.core.policies import Async
from paceline.core.rules.buffered import Buffered
from paceline.core.rules.dana import Dana, DanaSlim
from paceline.core.rules.foresight import Foresight, ForesightCached, ForesightFair
from paceline.core.rules.ringleader import Ringleader
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Exchange, Roster, Server
from paceline.interfaces import Rule, pack

LAYOUT = pack([("a", (3,), True), ("b", (20,), True), ("c", (2, 2), True)])
NUMBERS = tuple(Number(group, name) for group in range(2) for name in ("lr", "momentum", "weight_decay"))
LOOP = LoopLayout(0, NUMBERS, ((0, 2), (1,)))
RULES: dict[str, Callable[[float], Rule]] = {
    "foresight": lambda momentum: Foresight(momentum, 2),
    "foresight-fair": lambda momentum: ForesightFair(momentum, 2),
    "foresight-cached": lambda momentum: ForesightCached(momentum, 2),
    "dana": lambda momentum: Dana(momentum, 2),
    "dana-slim": lambda momentum: DanaSlim(momentum, 2),
    "ringleader": lambda momentum: Ringleader(momentum, 2),
    "buffered": lambda momentum: Buffered(2, momentum),
}
every_rule = pytest.mark.parametrize("name", RULES)


class Run:
    """Two workers that push in turn; `pull` is what each was sent last."""

    def __init__(self, rule: Rule, lr: float = 1.0) -> None:
        grouped = isinstance(rule, Grouped)
        exchange = Exchange(own_loops=OwnLoops(LOOP, [rule])) if isinstance(rule, Grouped) else Exchange()
        training = Training(Budget(0, 1, per_worker=True), Schedule(1.0 if grouped else lr))
        start = torch.zeros(LAYOUT.size)
        for number, view in enumerate(LAYOUT.views(start).values()):
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(number)))
        self.server = Server(start, rule, Async(), training, Roster(2), exchange)
        self.sent = torch.zeros(LAYOUT.size)
        for worker in range(2):
            self.server.handle(Join(worker, 0, own_loop=True))

    def push(self, number: int, gradient: Tensor, loop: list[float] | None = None) -> None:
        worker = number % 2
        serial = self.server.members[worker].serial
        vector = torch.tensor(loop, dtype=torch.float64) if loop is not None else None
        named = worker, 0, serial, serial
        self.server.handle(Push(*named, 1, 0.5, gradient, torch.empty(0), None, vector))
        self.server.updater.reply_weights(worker, self.sent)

    def of(self, name: str) -> Tensor:
        return LAYOUT.views(self.server.weights)[name].clone()


def gradient(number: int) -> Tensor:
    flat = torch.zeros(LAYOUT.size)
    for place, view in enumerate(LAYOUT.views(flat).values()):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(100 + 10 * number + place)))
    return flat


def grouped(name: str, momentum: float = 0.5) -> Grouped:
    return Grouped(RULES[name](momentum), LAYOUT, LOOP)


def loop(
    lrs: tuple[float, float] = (0.1, 0.1), momentum: float = 0.5, decays: Any = (0.0, 0.0), flags: Any = (1, 1, 1)
) -> list[float]:
    return [lrs[0], momentum, decays[0], lrs[1], momentum, decays[1], *flags]


@every_rule
def test_with_equal_learning_rates_it_is_the_rule_alone(name: str) -> None:
    ours, alone = Run(grouped(name)), Run(RULES[name](0.5), lr=0.1)
    for number in range(9):
        ours.push(number, gradient(number), loop())
        alone.push(number, gradient(number))
        assert torch.equal(ours.server.weights, alone.server.weights) and torch.equal(ours.sent, alone.sent)
    assert ours.server.rule.name.startswith(name) and ours.of("a").norm() > 0


@every_rule
def test_the_momentum_is_that_of_the_loop(name: str) -> None:
    ours, alone = Run(grouped(name, momentum=0.5)), Run(RULES[name](0.75), lr=0.1)
    for number in range(9):
        ours.push(number, gradient(number), loop(momentum=0.75))
        alone.push(number, gradient(number))
    assert torch.equal(ours.server.weights, alone.server.weights) and torch.equal(ours.sent, alone.sent)


@every_rule
def test_each_group_moves_as_if_the_rule_had_its_learning_rate(name: str) -> None:
    ours = Run(grouped(name))
    alone = [Run(RULES[name](0.5), lr) for lr in (0.125, 0.5)]
    for number in range(9):
        for run in alone:
            run.push(number, gradient(number))
        ours.push(number, gradient(number), loop((0.125, 0.5)))
    for part, run in (("a", alone[0]), ("c", alone[0]), ("b", alone[1])):
        torch.testing.assert_close(ours.of(part), run.of(part), rtol=1e-5, atol=1e-6)
        sent = [LAYOUT.views(one.sent)[part] for one in (ours, run)]
        torch.testing.assert_close(*sent, rtol=1e-5, atol=1e-6)


@every_rule
def test_weight_decay_is_added_to_the_gradients_of_its_group(name: str) -> None:
    ours, alone = Run(grouped(name)), Run(RULES[name](0.5), lr=0.1)
    for number in range(9):
        decayed = gradient(number)
        LAYOUT.views(decayed)["b"].add_(alone.of("b"), alpha=0.25)
        alone.push(number, decayed)
        ours.push(number, gradient(number), loop(decays=(0.0, 0.25)))
    torch.testing.assert_close(ours.server.weights, alone.server.weights, rtol=1e-5, atol=1e-6)


@every_rule
def test_a_parameter_without_a_gradient_stays_where_it_is_also_for_workers(name: str) -> None:
    run = Run(grouped(name))
    for number in range(4):
        run.push(number, gradient(number), loop(decays=(0.0, 0.25)))
    before = {part: run.of(part) for part in "abc"}
    for number in range(4, 8):
        run.push(number, gradient(number), loop(decays=(0.0, 0.25), flags=(1, 0, 1)))
        assert torch.equal(run.of("b"), before["b"])
        assert torch.equal(LAYOUT.views(run.sent)["b"], before["b"])
    assert not torch.equal(run.of("a"), before["a"]) and not torch.equal(run.of("c"), before["c"])


@every_rule
def test_a_learning_rate_of_0_is_no_division_by_it(name: str) -> None:
    run = Run(grouped(name))
    before = run.server.weights.clone()
    for number in range(4):
        run.push(number, gradient(number), loop((0.0, 0.0)))
    assert torch.equal(run.server.weights, before)


def test_a_pushs_memory_is_left_as_it_was() -> None:
    run, pushed = Run(grouped("foresight")), gradient(0)
    run.push(0, pushed, loop((0.1, 0.5), decays=(0.1, 0.1), flags=(1, 0, 1)))
    assert torch.equal(pushed, gradient(0))
