"""Codecs in own loops on processes: killed workers and servers, all strategies, replayed bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.commands import Command, result_of, run, wait_for_records

LOOP = """
import os, sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(960, 20); y = (x[:, 0] > 0).long()
net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
session = paceline.join()
net, optimizer, loader = session.prepare(net, optimizer, DataLoader(TensorDataset(x, y), 16, shuffle=True))
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(a), b).backward()
        if "die" in sys.argv and session.worker and session.iteration == 12 and not os.path.exists("died"):
            open("died", "w"); os.kill(os.getpid(), 9)
        optimizer.step()
    with session.eval_weights():
        net(x)
session.finish()
"""
CODECS = ("--codec", "topk:0.05", "--pull-codec", "int8")
DENSE = 4 * (20 * 40 + 40 + 80 + 80 + 2)  # bytes of a gradient, at least


def replay(cwd: Path) -> None:
    command = run("replay", "runs/it", cwd=cwd)
    assert command.process.returncode == 0 and "identical to the run" in command.out, command.out + command.err


@pytest.mark.parametrize("strategy", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_a_killed_loop_comes_back_with_a_new_memory_and_the_run_replays(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    flags = ("-n", "2", "--strategy", strategy, "--restart-workers", "1", "--name", "it")
    command = run("run", *flags, *CODECS, "loop.py", "die", cwd=tmp_path)
    assert command.process.returncode == 0 and "it is started again (1 of 1)" in command.err, command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["samples"]) == ("finished", 1920)
    assert 0 < result["bytes_pushed"] < 120 * DENSE / 4 and 0 < result["bytes_pulled"] < 123 * DENSE / 2
    replay(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allreduce", "local:3", "diloco:3", "async-local:3"])
def test_strategies_that_are_a_ring_elsewhere_encode_what_they_send_to_the_server(
    tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = run("run", "-n", "2", "--strategy", strategy, "--name", "it", *CODECS, "loop.py", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    result = result_of(tmp_path / "runs/it")
    assert result["status"] == "finished" and 0 < result["bytes_pushed"] < 120 * DENSE / 4
    replay(tmp_path)


@pytest.mark.long
def test_a_killed_server_reads_the_encoded_pushes_again(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    flags = ("-n", "2", "--strategy", "async", "--durable", "--checkpoint-every", "0.2", "--delay", "10ms")
    with Command("run", *flags, "--name", "it", *CODECS, "loop.py", cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 70)
        os.kill(command.forked()[0], signal.SIGKILL)
        assert command.finish() == 1, command.err
    assert list((tmp_path / "runs/it/checkpoints").glob("[0-9]*"))
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0 and "logged pushes since" in resumed.err, resumed.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["resumes"], result["lost_pushes"], result["samples"]) == ("finished", 1, 0, 1920)
    replay(tmp_path)
