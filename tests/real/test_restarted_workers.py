"""Killed workers that are started again: they go on with their share, and the run replays bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.runs.events import read_events
from tests.support.commands import Command, replays, result_of, run, wait_for_records

LOOP = """
import os, sys, torch, paceline
from pathlib import Path

def die(name):
    marker = Path(__file__).with_name(name)
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)

x = torch.randn(1600, 4); y = (x[:, 0] > 0).long()
with paceline.join() as session:
    if "early" in sys.argv and session.worker == 1:
        die("early")
    layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2)
    net = torch.nn.Sequential(*layers)
    net, batches = session.prepare(net, (x, y), batch_size=16, epochs=2)
    last = session.num_workers - 1
    for epoch in range(2):
        for a, b in batches:
            loss = torch.nn.functional.cross_entropy(net(a), b)
            loss.backward()
            for place in (word for word in sys.argv if word.isdecimal()):
                if session.worker == last and session.iteration == int(place):
                    die(place)
            session.step(loss)
"""


def start(cwd: Path, *flags: str, deaths: tuple[str, ...]) -> Command:
    (cwd / "loop.py").write_text(LOOP)
    flags = ("--lr", "0.05", "--name", "it", *flags)
    return run("run", *flags, "loop.py", *deaths, cwd=cwd)


def replay(cwd: Path) -> None:
    command = run("replay", "runs/it", cwd=cwd)
    assert command.process.returncode == 0 and "identical to the run" in command.out, command.out + command.err


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_killed_script_is_started_again_and_the_run_replays_identically(tmp_path: Path, strategy: str) -> None:
    command = start(tmp_path, "-n", "2", "--strategy", strategy, "--restart-workers", "1", deaths=("20",))
    assert command.process.returncode == 0, command.err
    assert "worker 1 was lost (killed by SIGKILL): it is started again (1 of 1)" in command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["lost_workers"], result["samples"]) == ("finished", [1], 3200)
    joined = [row["worker"] for row in read_events(tmp_path / "runs/it/events.jsonl") if row["kind"] == "worker_joined"]
    assert sorted(joined) == [0, 1, 1]
    replay(tmp_path)


def test_the_server_waits_for_its_only_worker_and_no_longer_than_it_may_return(tmp_path: Path) -> None:
    command = start(tmp_path, "-n", "1", "--strategy", "async", "--restart-workers", "1", deaths=("5", "9"))
    assert command.process.returncode == 1, command.err
    assert "worker 0 was lost (killed by SIGKILL): it is started again (1 of 1)" in command.err
    assert "worker 0 was lost (killed by SIGKILL): no worker is left" in command.err
    assert "all workers are gone at update 9" in command.err
    resumed = run("resume", "runs/it", "--restart-workers", "1", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert result_of(tmp_path / "runs/it")["samples"] == 3200
    replay(tmp_path)


def test_a_script_that_is_killed_before_it_has_joined_is_waited_for(tmp_path: Path) -> None:
    command = start(tmp_path, "-n", "2", "--strategy", "sync", "--restart-workers", "1", deaths=("early",))
    assert command.process.returncode == 0, command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["lost_workers"], result["samples"]) == ("finished", [], 3200)
    replay(tmp_path)


def test_a_killed_worker_of_paceline_train_is_started_again(tmp_path: Path) -> None:
    flags = ("--dataset", "fashion-mnist-sample", "--name", "it", "--score", "none", "--strategy", "async")
    flags = (*flags, "--workers", "2", "--steps", "300", "--restart-workers", "2")
    with Command("train", *flags, cwd=tmp_path) as command:
        wait_for_records(tmp_path / "runs/it", 30)
        for pid in command.forked()[1:]:
            os.kill(pid, signal.SIGKILL)
        assert command.finish() == 0, command.err
        assert "it is started again (2 of 2)" in command.err
    result = result_of(tmp_path / "runs/it")
    assert (result["status"], result["updates"], sorted(result["lost_workers"])) == ("finished", 300, [0, 1])
    assert replays(tmp_path / "runs/it")


STREAM = """
import os, torch, paceline
from pathlib import Path
from paceline.runtimes.scripts.loading import kept_states
from torch.utils.data import DataLoader, IterableDataset

kept_states.SECONDS_BETWEEN_STATES = 0.0

class Lines(IterableDataset):
    place = reads = 0
    def __iter__(self):
        while self.place < 400:
            self.place += 1
            self.reads += 1
            yield torch.cat([torch.tensor([float(self.place)]), torch.rand(3)])
        self.place = 0
    def state_dict(self):
        return {"place": torch.tensor(self.place)}
    def load_state_dict(self, state):
        self.place = int(state["place"])

with paceline.join() as session:
    lines, net = Lines(), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    net, optimizer, loader = session.prepare(net, optimizer, DataLoader(lines, 4))
    marker = Path(__file__).with_name("died")
    for batch in loader:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        if session.worker == 1 and session.iteration == 30 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)
        optimizer.step()
    print("worker", session.worker, "has read", lines.reads)
"""


def test_a_killed_worker_does_not_read_its_stream_again_and_the_run_replays_identically(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(STREAM)
    command = run("run", "-n", "2", "--restart-workers", "1", "--name", "it", "loop.py", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    text = command.out + command.err
    # The newest state is that of batch 29 of this worker; of the stream's 100 batches, 58 were read then.
    assert "worker 0 has read 400" in text and f"worker 1 has read {4 * (100 - 58)}" in text, text
    assert len(list((tmp_path / "runs/it/streams").iterdir())) == 32
    replay(tmp_path)
