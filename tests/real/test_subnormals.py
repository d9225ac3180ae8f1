"""Every runtime flushes subnormal floats to zero: steps below 1.2e-38 leave the weights where they are."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.cluster_commands import serve, workers
from tests.support.commands import run

pytestmark = pytest.mark.real

TINY = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(160))
    def forward(self, inputs):
        return self.weight.expand(len(inputs), 160)

def loss(outputs, targets):
    return (outputs * 3e-38).sum(1).mean()  # a normal gradient; times the learning rate it is subnormal

DATA = torch.zeros(24, 1), torch.zeros(24, 1)
"""
TASK = "import paceline\n" + TINY + "\ndef task():\n    return paceline.Task(Tiny(), loss, DATA)\n"
SCRIPT = (
    TINY
    + """
import paceline

with paceline.join() as session:
    model, batches = session.prepare(Tiny(), DATA, batch_size=4)
    for x, y in batches:
        loss(model(x), y).backward()
        session.step()
"""
)
SETTINGS = ("--lr", "0.1", "--momentum", "0.9", "--epochs", "1", "--name", "it")
FOR_TASK = ("--task", "tiny:task", "--batch-size", "4", "--threads", "1")


def moved(folder: Path) -> float:
    """The largest weight: without flushing it is about 1e-38."""
    return max(tensor.abs().max().item() for tensor in load_file(folder / "runs/it/weights.safetensors").values())


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", *FOR_TASK, "--strategy", "classic"),
        ("train", *FOR_TASK, "--strategy", "async", "--workers", "2", "--rule", "plain"),
        ("train", *FOR_TASK, "--strategy", "allreduce", "--workers", "2"),
        ("simulate", *FOR_TASK, "--strategy", "sync", "--workers", "2"),
        ("run", "-n", "2", "--strategy", "sync", "script.py"),
    ],
    ids=["in this process", "server and workers", "ring", "simulated", "script"],
)
def test_a_step_below_the_smallest_normal_float_is_zero(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "tiny.py").write_text(TASK)
    (tmp_path / "script.py").write_text(SCRIPT)
    first, *rest = arguments
    done = run(first, *SETTINGS, *rest, cwd=tmp_path)
    assert done.process.returncode == 0, done.err
    assert moved(tmp_path) == 0.0
    again = run("replay", "runs/it", cwd=tmp_path)
    assert "identical" in again.out, again.err


def test_a_server_and_workers_over_tcp_flush_too(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TASK)
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *SETTINGS, *FOR_TASK, "--strategy", "sync", "--workers", "2", "--servers", "2")
        there = workers(stack, tmp_path, 2)
        assert server.finish() == 0, server.err
        assert [worker.finish() for worker in there] == [0, 0]
    assert moved(tmp_path) == 0.0
