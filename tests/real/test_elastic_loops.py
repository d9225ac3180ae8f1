"""Own loops on processes that join a run and are drained from it: the data is divided again, and the run replays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paceline.runs.events import read_events
from tests.support.commands import Command, result_of, run
from tests.support.waiting import until

LOOP = """
import os, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

def wait_for(name):
    for _ in iter(lambda: os.path.exists(name), True):
        time.sleep(0.01)

torch.manual_seed(1)
x = torch.randn(120, 6)
net = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
session = paceline.join()
data = TensorDataset(x, torch.arange(120))
net, optimizer, loader = session.prepare(net, optimizer, DataLoader(data, 5, shuffle=True))
if session.worker == 2:
    open("two", "w").close()
seen = open(f"seen-{session.worker}" if not os.path.exists("runs/it/result.json") else os.devnull, "a")
for number in range(9 if session.worker != 1 else 10**6):
    if number == 3:
        wait_for("two")
    if number == 6 and session.worker != 1:
        wait_for("drained")
    for a, samples in loader:
        optimizer.zero_grad()
        (net(a) - a.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        print(number, *samples.tolist(), file=seen, flush=True)
session.finish()
session.report(steps=session.iteration)
"""


def seen_samples(cwd: Path) -> Counter[tuple[int, int]]:
    """How often each sample was trained on in each pass."""
    seen = Counter[tuple[int, int]]()
    for line in (line for path in cwd.glob("seen-*") for line in path.read_text().splitlines()):
        number, *samples = map(int, line.split())
        seen.update((number, sample) for sample in samples)
    return seen


def replay(cwd: Path) -> None:
    again = run("replay", "runs/it", cwd=cwd)
    assert again.process.returncode == 0 and "identical to the run" in again.out, again.out + again.err


def test_workers_join_and_are_drained_and_the_run_replays(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "join"\nat = 0.05\nworker = 2\n')
    flags = ("-n", "2", "--max-workers", "3", "--strategy", "async", "--faults", "faults.toml", "--name", "it")
    with Command("run", *flags, "--codec", "int8", "--pull-codec", "int8", "loop.py", cwd=tmp_path) as command:
        until((tmp_path / "two").exists, "the third worker")
        drained = run("drain", "runs/it", "1", cwd=tmp_path)
        (tmp_path / "drained").touch()
        assert drained.process.returncode == 0 and "worker 1: drained; it has left the run" in drained.out, drained.err
        assert command.finish() == 0, command.err
    assert "worker 1 was drained: its loop ends, and its script at session.finish()" in command.err
    result = result_of(tmp_path / "runs/it")
    assert result["status"] == "finished" and result["lost_workers"] == []
    assert sorted(result["reported"]) == ["0", "2"], "the drained script ends in session.finish()"
    joined, left, *_ = [row for row in read_events(tmp_path / "runs/it/events.jsonl") if row["kind"] == "deal"]
    assert (joined["members"], left["members"]) == ([0, 1, 2], [0, 2])
    assert f"from pass {left['first_pass'] + 1} on, the data is divided over workers 0, 2" in command.err
    seen = seen_samples(tmp_path)
    assert set(seen.values()) == {1}, "no sample is trained on twice in a pass"
    for number in (*range(joined["first_pass"]), *range(left["first_pass"], 9)):
        assert sum(place == number for place, _ in seen) == 120, number
    replay(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sync", "bounded:2", "backup:1", "local:3"])
def test_a_table_lets_workers_join_and_leave_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    """When they come is not known, so only what holds at any time is."""
    (tmp_path / "loop.py").write_text(LOOP.replace("10**6", "40").replace("range(9", "range(40"))
    (tmp_path / "two").touch()
    (tmp_path / "drained").touch()
    rows = ("join", 0.05, 2), ("crash", 1.5, 0), ("drain", 3.0, 1)
    table = [f'[[fault]]\nkind = "{kind}"\nat = {at}\nworker = {worker}\n' for kind, at, worker in rows]
    (tmp_path / "faults.toml").write_text("\n".join([*table[:1], table[1] + "restart_after = 0.5\n", *table[2:]]))
    flags = ("-n", "2", "--max-workers", "3", "--strategy", strategy, "--faults", "faults.toml", "--name", "it")
    command = run("run", *flags, "--delay", "10ms", "loop.py", cwd=tmp_path)
    assert command.process.returncode == 0, command.err
    replay(tmp_path)
