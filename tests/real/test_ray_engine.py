"""Server and workers as Ray actors on two nodes of one machine; skipped where there is no ray."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import PATIENCE, Command, result_of, run, wait_for_records
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

START = """
import json, sys
from ray.cluster_utils import Cluster
first, *more = json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args=first)
for node in more:
    cluster.add_node(**node)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
LOOP = """
import sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(640, 4); y = (x[:, 0] > 0).long()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
batches = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
session = paceline.join()
net, optimizer, batches = session.prepare(net, optimizer, batches)
for epoch in range(int(open("epochs").read())):
    for a, b in batches:
        time.sleep(float(sys.argv[1]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(a), b).backward()
        optimizer.step()
    if sys.argv[2:] == ["fails"]:
        raise ValueError("wrong on purpose")
session.finish()
time.sleep(1.0)
print("the script of worker", session.worker, "ends")
"""
LIKE_THERE = ("-n", "2", "--threads", "1", "--seed", "3")
SCRIPT = ("run", "--engine", "ray", *LIKE_THERE)
RUN = ("--engine", "ray", "--dataset", "fashion-mnist-sample", "--workers", "4", "--name", "it", "--seed", "3")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a cluster with these nodes, all on this machine."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", START, json.dumps(request.param)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(PATIENCE)


def actors(kind: str) -> list[int]:
    """The processes of actors of this class, as Ray names them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "cmdline").read_text().startswith(f"ray::{kind}"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def joins(folder: Path) -> int:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return sum(row["kind"] == "worker_joined" for row in rows)


def wait_for_joins(folder: Path, count: int) -> None:
    until(lambda: joins(folder) >= count, lambda: f"{count} joins, only {joins(folder)}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", [[{"num_cpus": 3}, {"num_cpus": 1}]], indirect=True)
def test_killed_actors_come_back_and_nothing_is_lost(tmp_path: Path, cluster: str) -> None:
    folder = tmp_path / "runs/it"
    arguments = ("train", *RUN, "--strategy", "async", "--epochs", "8", "--batch-size", "32")
    with Command(*arguments, cwd=tmp_path, environment={"RAY_ADDRESS": cluster}) as command:
        wait_for_records(folder, 200, seconds=240)
        workers = actors("WorkerActor")
        assert len(workers) == 4 and len({parent(pid) for pid in workers}) == 2  # each node's raylet has some
        os.kill(workers[0], signal.SIGKILL)
        wait_for_joins(folder, 5)
        (server,) = actors("ServerActor")
        os.kill(server, signal.SIGKILL)
        wait_for_joins(folder, 9)
        assert command.finish(200) == 0, command.err
    result = result_of(folder)
    assert (result["status"], result["workers"]) == ("finished", 4)
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds.count("run_resumed") == 1
    again = run("replay", "runs/it", cwd=tmp_path, seconds=120)
    assert "identical to the run" in again.out, again.out + again.err


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", [[{"num_cpus": 2}]], indirect=True)
def test_own_loops_on_ray(tmp_path: Path, cluster: str) -> None:
    """The bits of one machine; a killed script and a killed server come back; the user sees what scripts write."""
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "epochs").write_text("2")
    environment = {"RAY_ADDRESS": cluster}
    there = run(
        *SCRIPT,
        "--strategy",
        "sync",
        "--name",
        "there",
        "loop.py",
        "0",
        cwd=tmp_path,
        environment=environment,
        seconds=200,
    )
    assert there.process.returncode == 0, there.err
    assert {f"[worker {n}] the script of worker {n} ends" for n in (0, 1)} <= set(there.err.splitlines()), there.err
    assert "will be retried" not in there.out + there.err  # no worker was ended before its script
    here = run("run", *LIKE_THERE, "--strategy", "sync", "--name", "here", "loop.py", "0", cwd=tmp_path)
    assert here.process.returncode == 0, here.err
    assert result_of(tmp_path / "runs/there")["weights_sha256"] == result_of(tmp_path / "runs/here")["weights_sha256"]

    fails = run(*SCRIPT, "--name", "no", "loop.py", "0", "fails", cwd=tmp_path, environment=environment, seconds=200)
    assert fails.process.returncode == 1
    assert "worker 0 ended: its script failed (exit code 1): ValueError: wrong on purpose" in fails.err, fails.err
    assert "[worker 0] Traceback (most recent call last):" in fails.err

    (tmp_path / "epochs").write_text("20")
    folder = tmp_path / "runs/it"
    arguments = (*SCRIPT, "--name", "it", "--strategy", "async", "--durable", "--checkpoint-every", "1")
    with Command(*arguments, "loop.py", "0.05", cwd=tmp_path, environment=environment) as command:
        wait_for_records(folder, 60, seconds=240)
        (script,) = children(actors("WorkerActor")[0])
        os.kill(script, signal.SIGKILL)
        wait_for_joins(folder, 3)
        (server,) = actors("ServerActor")
        os.kill(server, signal.SIGKILL)
        wait_for_joins(folder, 5)
        assert command.finish(240) == 0, command.err
    result = result_of(folder)
    assert (result["status"], result["samples"], result["lost_pushes"]) == ("finished", 20 * 640, 0)
    again = run("replay", "runs/it", cwd=tmp_path, seconds=120)
    assert "identical to the run" in again.out, again.out + again.err


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", [[{"num_cpus": 2, "num_gpus": 1}]], indirect=True)
def test_two_workers_fit_on_two_cpus_and_one_gpu(tmp_path: Path, cluster: str) -> None:
    """If the cluster only claims to have a GPU, that torch sees none shows that the workers were placed to use it."""
    environment = {"RAY_ADDRESS": cluster}
    two = ("train", *RUN, "--workers", "2", "--epochs", "1")
    done = run(*two, cwd=tmp_path, environment=environment, seconds=200)
    assert done.process.returncode == 0, done.err
    assert result_of(tmp_path / "runs/it")["workers"] == 2
    gpus = ("--recovery", "checkpoint", "--gpus-per-worker")
    done = run(*two, "--name", "gpus", *gpus, "0.5", cwd=tmp_path, environment=environment, seconds=200)
    missing = not torch.cuda.is_available()
    assert done.process.returncode == missing, done.err
    assert ("worker 0 ended: --device cuda: this machine has no CUDA devices" in done.err) == missing
    done = run(*two, "--name", "more", *gpus, "0.6", cwd=tmp_path, environment=environment, seconds=50)  # not 60
    found = "the Ray cluster (nodes: 1, CPUs: 2, GPUs: 1) has room for 1"
    assert f"paceline: --workers 2 of 1 CPU and 0.6 GPU each, but {found}" in done.err
    assert done.process.returncode == 2
