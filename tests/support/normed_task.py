"""A task with all kinds of tensors: trained, frozen, running statistics and counts; and a file to begin it from."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import paceline


def make_model() -> nn.Module:
    """A frozen layer below a trained one with batch norm."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def build() -> paceline.Task:
    """The task, with weights of the run's seed."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(240, 6, generator=generator)
    return paceline.Task(make_model(), F.cross_entropy, train=(inputs, inputs[:, :3].argmax(1)))


def plain() -> paceline.Task:
    """A task whose tensors are all trained."""
    data = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    return paceline.Task(nn.Linear(3, 2), F.cross_entropy, train=data)


def save_other(path: Path) -> dict[str, torch.Tensor]:
    """Write weights that no seed of a run would draw, with statistics of their own."""
    torch.manual_seed(77)
    model = make_model()
    torch.nn.init.normal_(model[1].bias)
    for _ in range(3):
        model(torch.randn(16, 6) * 2 + 1)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path)
    return tensors
