"""Several steps on one batch: its samples count once, and every step weighs as much in the mean of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.core.policies import Barrier
from paceline.runtimes.scripts.session import Session
from tests.support.loop_servers import push, served, values
from tests.support.own_loops import OneServer


def train(session: Session, times: int, **length: Any) -> int:
    """Two passes over 10 samples in batches of 4, and so many steps for each batch; return the steps that are made."""
    torch.manual_seed(1)
    data, model = TensorDataset(torch.rand(10, 3), torch.rand(10, 1)), torch.nn.Linear(3, 1)
    model, optimizer, loader = session.prepare(model, SGD(model.parameters(), 0.1), DataLoader(data, 4), **length)
    made = 0
    for _ in range(2):
        for inputs, targets in loader:
            for _ in range(times):
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
                made += 1
    return made


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("length", [{}, {"epochs": 2}], ids=["the loop's length", "epochs=2"])
@pytest.mark.parametrize("strategy", ["async", "local:3"])
def test_samples_count_once(strategy: str, length: dict[str, Any], steps: int, tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy=strategy, workers=1)
    with one.session(0) as session:
        made = train(session, steps, **length)
    assert one.server is not None and made == 6 * steps
    assert one.server.samples == 20


def test_the_end_of_training_among_the_steps_of_a_batch_does_not_end_the_script(tmp_path: Path) -> None:
    one = OneServer(tmp_path, strategy="async", workers=1)
    with one.session(0) as session:
        assert train(session, 4, steps=10) == 3 * 4  # two steps of the third batch reach the server
        assert session.finished and one.server is not None and one.server.version == 10


def test_a_second_step_weighs_as_much_as_the_first_in_a_mean() -> None:
    server = served(Barrier(), 2)
    push(server, 0, gradient=-1.0, samples=4)
    push(server, 1, gradient=-3.0, samples=12)
    assert values(server)[0] == 2.5 and server.samples == 16
    push(server, 0, gradient=-1.0, samples=0, weight=4.0)
    push(server, 1, gradient=-3.0, samples=12)
    assert values(server)[0] == 5.0 and server.samples == 28
