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
