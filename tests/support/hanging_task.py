"""A task whose computation hangs for ever, in the first process that has made some steps; its heartbeats go on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline

STEPS = 20
MARK = Path("hung")  # made by the process that hangs; once it exists, no other process does
_made = [0]
OWN_LOOP = """
import torch
import paceline
from task import build, hang_once

torch.manual_seed(0)
task = build()
with paceline.join() as session:
    model, batches = session.prepare(task.model, task.train, batch_size=8)
    for inputs, targets in batches:
        hang_once()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        session.step(loss)
    session.finish()
"""
"""A script that trains the task, copied to `task.py`, in a loop of its own."""


def hang_once() -> None:
    """Call this at each step: one process hangs in its `STEPS`-th."""
    _made[0] += 1
    if _made[0] != STEPS:
        return
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    threading.Event().wait()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss, which hangs while training only: the server computes it too, and must not."""
    if torch.is_grad_enabled():
        hang_once()
    return nn.functional.cross_entropy(outputs, targets)


def build() -> paceline.Task:
    """A small classifier of made-up points."""
    points = torch.randn(800, 4, generator=torch.Generator().manual_seed(1))
    data = points, (points[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    return paceline.Task(model, loss, train=data, test=data)
