"""LeNet5 on the sample data, in processes that hang or compute a NaN when a file tells them to: for chaos.py.

The folder in PACELINE_FAULTS holds `hang-PID` and `nan-PID`. Such a process computes for ever in its training step
while its heartbeats go on, or gives one loss that is not a number. The server, which has another PID, does neither.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.assembly.core import make_model
from paceline.config import RunConfig
from paceline.data.datasets import load, locate_data

FAULTS_VARIABLE = "PACELINE_FAULTS"


def order(folder: Path, fault: str, pid: int) -> None:
    """Tell a process to hang, or to give a NaN."""
    (folder / f"{fault}-{pid}").touch()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, unless a file tells this process otherwise."""
    found = cross_entropy(outputs, targets)
    folder = os.environ.get(FAULTS_VARIABLE)
    if folder is None or not torch.is_grad_enabled():
        return found
    while Path(folder, f"hang-{os.getpid()}").exists():
        time.sleep(0.2)
    nan = Path(folder, f"nan-{os.getpid()}")
    if nan.exists():
        nan.unlink()
        return found * torch.nan
    return found


def build() -> paceline.Task:
    """The task of chaos.py's runs."""
    location = locate_data(RunConfig(dataset="fashion-mnist-sample"))
    assert location is not None
    data = load(location)
    torch.manual_seed(0)
    model: nn.Module = make_model("lenet5", data.train_images.shape[1:])

    def as_floats(images: object) -> Tensor:
        return torch.as_tensor(images).float().div_(127.5).sub_(1.0)

    train = as_floats(data.train_images), torch.as_tensor(data.train_labels)
    test = as_floats(data.test_images), torch.as_tensor(data.test_labels)
    return paceline.Task(model, loss, train=train, test=test)
