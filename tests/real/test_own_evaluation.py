"""Own loops on real workers end with the weights that are saved, evaluate on the way, and replay all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.commands import Command, result_of, run

LOOP = """
import os, sys, torch, paceline
from torch import nn

generator = torch.Generator().manual_seed(3)
x = 2.0 * torch.randn(600, 4, generator=generator) + 1.0
y = (x[:, 0] > 1.0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10, shuffle=True)
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
with paceline.join() as session:
    net, optimizer, schedule, loader = session.prepare(net, optimizer, schedule, loader, epochs=4)
    steps = 0
    for epoch in range(4):
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(a), b).backward()
            optimizer.step()
            steps += 1
            {inside}
        with session.eval_weights(), torch.no_grad():
            net.eval()
            schedule.step(nn.functional.cross_entropy(net(x), y))
        if session.finished:
            break
    session.finish()
    if not os.environ.get("REPLAYED"):
        torch.save(net.state_dict(), f"worker{{session.worker}}.pt")
"""
DIED = "session.worker == 1 and steps == 10 and os._exit(1)"
BROKE_OFF = "if steps >= 20: session.finish(); break"


def trained(cwd: Path, *arguments: str, inside: str = "pass") -> dict[str, Any]:
    """Run the loop on three workers and replay it; returns the result."""
    (cwd / "loop.py").write_text(LOOP.format(inside=inside))
    flags = ("run", "-n", "3", "--name", "it", *arguments, "loop.py")
    with Command(*flags, cwd=cwd) as command:
        assert command.finish() == 0, command.err
    assert "Traceback" not in command.err, command.err
    again = run("replay", "runs/it", "--json", cwd=cwd, environment={"REPLAYED": "yes"})
    assert json.loads(again.out)["identical"] is True, again.out + again.err
    return result_of(cwd / "runs/it")


def assert_saved(cwd: Path, *workers: int) -> dict[str, torch.Tensor]:
    """Every worker's model holds what was saved, bit for bit."""
    saved = load_file(cwd / "runs/it/weights.safetensors")
    for worker in workers:
        own = torch.load(cwd / f"worker{worker}.pt", weights_only=True)
        assert own.keys() == saved.keys()
        for name in saved:
            assert name.endswith("num_batches_tracked") or torch.equal(own[name], saved[name]), (worker, name)
    return saved


def test_every_worker_ends_with_the_weights_that_are_saved(tmp_path: Path) -> None:
    result = trained(tmp_path, "--strategy", "bounded:2", "--average", "on")
    assert result["status"] == "finished" and not result["lost_workers"]
    saved = assert_saved(tmp_path, 0, 1, 2)
    live = load_file(tmp_path / "runs/it/live.safetensors")
    assert not torch.equal(saved["1.running_var"], live["1.running_var"]), "each has statistics of its own"


def test_a_worker_that_died_has_no_part_in_the_statistics(tmp_path: Path) -> None:
    result = trained(tmp_path, "--strategy", "async", inside=DIED)
    assert (result["status"], result["lost_workers"]) == ("finished", [1])
    assert_saved(tmp_path, 0, 2)


def test_loops_that_all_end_early_finish_the_run_with_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.format(inside=BROKE_OFF))
    with Command("run", "-n", "3", "--strategy", "sync", "--name", "it", "loop.py", cwd=tmp_path) as command:
        command.finish()
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["reason"]) == ("finished", "every worker ended its loop"), command.err
    assert_saved(tmp_path, 0, 1, 2)
