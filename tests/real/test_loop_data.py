"""The data of scripts on several workers: a sampler's draw is shared, replayed, and taken up again in mid-pass."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.commands import Command, result_of, run, wait_for_records

LOOP = """
import json, numpy, torch, paceline
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

x = torch.arange(200.0)[:, None] / 200
data = TensorDataset(x, 2 * x)
kept = numpy.random.default_rng(1).permutation(200)[:160].tolist()
loader = DataLoader(data, batch_size=9, sampler=SubsetRandomSampler(kept))
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
seen = []
with paceline.join() as session:
    net, optimizer, loader = session.prepare(net, optimizer, loader, epochs=4)
    for epoch in range(4):
        for x, y in loader:
            seen.append([epoch, (200 * x).round().int().flatten().tolist()])
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
with open(f"seen-{session.worker}.json", "w") as file:
    json.dump([seen, kept], file)
"""


def seen_by(cwd: Path, worker: int) -> tuple[list[Any], list[int]]:
    batches, kept = json.loads((cwd / f"seen-{worker}.json").read_text())
    return batches, kept


def test_a_sampler_is_shared_replayed_and_taken_up_in_mid_pass(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    flags = ("run", "-n", "2", "--strategy", "sync")
    whole = run(*flags, "--name", "whole", "loop.py", cwd=tmp_path)
    assert whole.process.returncode == 0, whole.err
    (first, kept), (second, _) = seen_by(tmp_path, 0), seen_by(tmp_path, 1)
    for epoch in range(4):
        numbers = [number for at, batch in first + second if at == epoch for number in batch]
        assert Counter(numbers) == Counter(kept), "each sample once a pass, by one worker"
    assert len(first) == len(second) == 36
    replayed = run("replay", "runs/whole", cwd=tmp_path)
    assert replayed.process.returncode == 0 and "identical to the run" in replayed.out, replayed.err
    with Command(*flags, "--delay", "20ms", "--name", "cut", "loop.py", cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/cut", 30)  # in the second pass of four, 18 pushes each
        os.kill(command.process.pid, signal.SIGINT)
        assert command.finish() == 130, command.err
    assert 10 < result_of(tmp_path / "runs/cut")["updates"] < 36
    resumed = run("resume", "runs/cut", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert result_of(tmp_path / "runs/cut")["weights_sha256"] == result_of(tmp_path / "runs/whole")["weights_sha256"]


DRAWN_BY_NEXT = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

x = torch.arange(64.0)[:, None] / 64
loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8, shuffle=True)
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session = paceline.join()
net, optimizer, loader = session.prepare(net, optimizer, loader, steps=20)

def train(batches):
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        yield

for _ in train(iter(loader)):
    pass
"""


def test_a_loop_that_calls_next_ends_with_the_training_and_no_worker_is_lost(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(DRAWN_BY_NEXT)
    command = run("run", "-n", "2", "--strategy", "sync", "--name", "run", "loop.py", cwd=tmp_path)
    assert command.process.returncode == 0 and "Traceback" not in command.err and "was lost" not in command.err
    assert "training is over, and the loop goes on" in command.err
    assert result_of(tmp_path / "runs/run")["updates"] == 10
