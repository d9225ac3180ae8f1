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

from tests.support.commands import PATIENCE, Command, result_of, run, wait_for_records
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
cluster.add_node(num_cpus=3)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
RUN = ("--engine", "ray", "--dataset", "fashion-mnist-sample", "--workers", "4", "--name", "it", "--seed", "3")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with three CPUs each."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", TWO_NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
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
