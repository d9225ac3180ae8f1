"""Servers of own loops without a loop: tests write the vectors that the loops would send with their pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.core.messages import Join, Outcome, Push
from paceline.core.own_loop.settings import LoopLayout, Number, OwnLoops
from paceline.core.own_loop.torch_optimizer import TorchOptimizer
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Exchange, Roster, Server
from paceline.interfaces import Layout, Policy, State, pack

LAYOUT = pack([("a", (2,), True), ("b", (3,), True)])
LOOP = LoopLayout(
    1, (Number(0, "lr"), Number(0, "momentum"), Number(1, "lr"), Number(1, "momentum")), groups=((0,), (1,))
)
"""One place, and two groups of one parameter each."""
ENDLESS = Budget(samples=0, epoch_samples=100, per_worker=True)


def make_sgd(groups: list[list[Any]]) -> Optimizer:
    return SGD([{"params": group} for group in groups], lr=1.0, momentum=0.0)


def served(
    policy: Policy,
    num_workers: int,
    *,
    budget: Budget = ENDLESS,
    make: Callable[[list[list[Any]]], Optimizer] = make_sgd,
    layout: Layout = LAYOUT,
    loop: LoopLayout = LOOP,
    initial: State | None = None,
    quota: int | None = None,
    own_loop: bool = True,
) -> Server:
    """A server whose weights are 0, on which every worker has joined."""
    optimizer = TorchOptimizer(make, layout, loop, initial)
    exchange = Exchange(own_loops=OwnLoops(loop, [optimizer]))
    training = Training(budget, Schedule(1.0))
    server = Server(torch.zeros(layout.size), Plain(optimizer), policy, training, Roster(num_workers), exchange)
    for worker in range(num_workers):
        server.handle(Join(worker, 0, quota, own_loop=own_loop))
    return server


def vector(
    lr: float | Sequence[float] = 1.0, momentum: float = 0.0, place: int = 0, flags: Sequence[int] = (1, 1)
) -> Tensor:
    """What a loop with two groups says."""
    first, second = (lr, lr) if isinstance(lr, float) else lr
    return torch.tensor([place, first, momentum, second, momentum, *flags], dtype=torch.float64)


def push(
    server: Server,
    worker: int,
    loop: Tensor | None = None,
    *,
    gradient: float | Tensor = -1.0,
    weight: float | None = None,
    samples: int = 1,
    loss: float = 0.5,
) -> Outcome:
    """A push of one gradient everywhere, -1 if not told otherwise: it moves the weights by their learning rate."""
    member = server.members[worker]
    update = gradient if isinstance(gradient, Tensor) else torch.full((server.weights.numel(),), gradient)
    named = worker, member.incarnation, member.serial, member.serial
    loop = vector() if loop is None else loop
    return server.handle(Push(*named, samples, loss, update, torch.empty(0), weight, loop))


def values(server: Server) -> list[float]:
    """The first weight of each parameter."""
    return [view.reshape(-1)[0].item() for view in LAYOUT.views(server.weights).values()]
