"""A worker process that sends NaNs is expelled, and the others finish the run; a replay has the same weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster_commands import serve, workers
from tests.support.commands import replays, result_of, run

TASK = """
import os
from pathlib import Path
import torch
import torch.nn.functional as F
import paceline

calls, BAD = 0, Path(__file__).with_name("bad")

def is_bad():
    try:
        with BAD.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return BAD.read_text() == str(os.getpid())
    return True

def loss(outputs, targets):
    global calls
    calls += 1
    return F.cross_entropy(outputs, targets) * (torch.nan if calls > 20 and is_bad() else 1.0)

def build():
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    return paceline.Task(torch.nn.Linear(4, 2), loss, train=(x, (x[:, 0] > 0).long()))
"""
RUN = ("--task", "own.py:build", "--threads", "1", "--name", "it", "--score", "none", "--batch-size", "4")


def check(folder: Path, said: str) -> None:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["kind"] == "expelled"]
    result = result_of(folder)
    assert (result["status"], result["lost_workers"]) == ("finished", [row["worker"]])
    assert said.count(f"worker {row['worker']} is expelled: its push holds a NaN") == 1
    assert "Traceback" not in said
    assert replays(folder)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_on_one_machine(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "own.py").write_text(TASK)
    trained = run("train", *RUN, "--strategy", strategy, "--workers", "3", "--steps", "150", cwd=tmp_path)
    assert trained.process.returncode == 0, trained.err
    check(tmp_path / "runs/it", trained.err)


def test_over_tcp_with_tls(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    with ExitStack() as stack:
        server = serve(stack, tmp_path, *RUN, "--strategy", "async", "--workers", "3", "--steps", "250", "--tls")
        there = workers(stack, tmp_path, 3, "--tls")
        assert server.finish() == 0, server.err
        assert sum(worker.finish() == 0 for worker in there) == 2
    check(tmp_path / "runs/it", server.err)
