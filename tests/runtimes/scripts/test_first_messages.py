"""What the server of a script run learns from the first messages of its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from paceline.assembly.work import divide_work
from paceline.config import RunConfig
from paceline.core.buffers import BufferSizes
from paceline.core.messages import Join
from paceline.interfaces import pack
from paceline.runs.folder import RunFolder
from paceline.runtimes.scripts.adopt import sort_out
from paceline.runtimes.scripts.sampler import share_data
from paceline.runtimes.scripts.server import _expected, learn
from paceline.settings.resolve import resolve
from paceline.transports.protocol import Hello
from paceline.transports.shared_memory import SharedBuffers

DATA = TensorDataset(torch.zeros(500, 1), torch.arange(500) % 5)
LAYOUT = pack([("weight", (1, 1), True)])


def hello(loader: DataLoader[Any], config: RunConfig, worker: int) -> Hello:
    """A worker's first message about its share of the data."""
    share = share_data(sort_out(nn.Linear(1, 1), (loader,), None), config, worker, 1)
    sizes = {
        "num_samples": share.epoch_samples,
        "quota_samples": share.quota_samples,
        "order": share.order,
        "skew": share.skew,
    }
    facts = {"layout": LAYOUT.to_rows(), "state_layout": [], "sources": None, "settings": {}, "batch_size": 8, **sizes}
    return Hello(Join(worker, 0, share.quota), SharedBuffers.create(BufferSizes(LAYOUT.size, 0)), facts)


@pytest.mark.parametrize("split", ["iid", "full", "labels", "dirichlet:0.3"])
@pytest.mark.parametrize("epochs", [2.0, 2.5])
def test_the_budget_is_what_all_workers_train_on(split: str, epochs: float, tmp_path: Path) -> None:
    """So a cosine schedule ends at 0, however unequal the shards are."""
    settings = {"epochs": epochs, "epoch_mode": "own", "split": split, "schedule": "cosine", "batch_size": 8}
    config = resolve(RunConfig(workers=3, task="a:b", strategy="async", **settings))  # type: ignore[arg-type]
    hellos = [hello(DataLoader(DATA, 8, shuffle=True), config, worker) for worker in range(3)]
    threads = torch.get_num_threads()
    _, _, server = learn(config, hellos, RunFolder(tmp_path))
    torch.set_num_threads(threads)
    expected = divide_work(DATA.tensors[1].numpy(), config).budget
    assert server.budget == expected
    assert server.training.lr(expected.samples, 1) == 0.0


def test_workers_must_draw_the_same_samples() -> None:
    """With other numbers of their own, two workers would train on what each other holds out."""
    config = resolve(RunConfig(workers=2, task="a:b", epoch_mode="own"))
    loaders = [DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(start, start + 400))) for start in (0, 100, 0)]
    first, other, same = (
        _expected(hello(loader, config, worker)) for worker, loader in zip((0, 1, 1), loaders, strict=True)
    )
    assert first == same and first != other
