"""What a user's own loop does, in one process with the server."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.core.server import AppliedUpdate
from tests.support.own_loops import OneServer


def data(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


class Loop:
    """A plain loop of one epoch with a schedule that halves the learning rate at each step."""

    def __init__(self, one: OneServer, worker: int) -> None:
        model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        self.scheduler: Any = LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.session = one.session(worker)
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        self.model, _, _, batches = self.session.prepare(model, self.optimizer, self.scheduler, loader, epochs=1)
        self.batches = iter(batches)

    def step(self) -> None:
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        loss_of(self.model, x, y).backward()
        self.optimizer.step()
        self.scheduler.step()


def test_each_worker_follows_its_own_schedule(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=2, rule="plain", average="none")
    loops = [Loop(one, worker) for worker in range(2)]
    applied: list[tuple[int, float]] = []

    def note(update: AppliedUpdate) -> None:
        applied.append((update.pushes[0].worker, update.lr))

    assert one.server is not None
    one.server.on_update = note
    for worker in (0, 0, 0, 1, 0, 1):
        loops[worker].step()
    assert applied == [(0, 0.25), (0, 0.125), (0, 0.0625), (1, 0.25), (0, 0.03125), (1, 0.125)]


def test_a_pass_has_as_many_steps_as_the_loader_says_though_some_are_dropped(tmp_path: Path) -> None:
    """The schedule has one value for each step of a pass; a dropped step has used one up."""
    one = OneServer(tmp_path, strategy="async", workers=2, rule="ringmaster:1", average="none")
    loops = [Loop(one, worker) for worker in range(2)]
    loops[1].step()
    seen = []
    for x, y in loops[0].batches:
        seen.append(x)
        loss_of(loops[0].model, x, y).backward()
        loops[0].optimizer.step()
        loops[0].scheduler.step()
    assert len(seen) == 4 == loops[0].session.step_number and loops[0].session.batch_number == 3
    assert [torch.equal(one, other) for one, other in pairwise(seen)] == [True, False, False], "the batch came again"
    assert one.server is not None and one.server.dropped == 1
