"""Tasks with one mistake each, which the processes of a run find."""

from __future__ import annotations

import torch
from torch import nn

import paceline

X, Y = torch.zeros(64, 4), torch.arange(64) % 3


def not_scalar() -> paceline.Task:
    return paceline.Task(nn.Linear(4, 3), nn.CrossEntropyLoss(reduction="none"), (X, Y))


def uneven() -> paceline.Task:
    return paceline.Task(nn.Linear(4, 3), nn.CrossEntropyLoss(), (X, Y[:9]))


def nothing() -> None:
    """Return no task, as a function without `return` does."""
