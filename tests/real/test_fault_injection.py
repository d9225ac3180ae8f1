"""Faults injected into real processes: the run goes on as its table says, and leaves no process behind."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.core.messages import Disposition
from paceline.runs.arrival_log import Record, read_arrivals
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.settings.fault_table import Fault, faults_toml
from tests.support.commands import Command, replays, result_of, run, wait_until_gone
from tests.support.waiting import until

SAMPLE = ("--dataset", "fashion-mnist-sample", "--name", "it", "--seed", "3", "--score", "none")
STEADY = ("--strategy", "async", "--workers", "2", "--threads", "1", "--delay", "8ms")
FAULTS = ("--faults", "faults.toml")


def train(cwd: Path, *arguments: str, faults: list[Fault]) -> Command:
    (cwd / "faults.toml").write_text(faults_toml(faults))
    return Command("train", *SAMPLE, *FAULTS, *STEADY, *arguments, cwd=cwd)


def arrivals(cwd: Path) -> list[Record]:
    folder = RunFolder.open(cwd / "runs/it")
    return read_arrivals(folder.arrivals_file, folder.config())[0]


def pushes_of(cwd: Path) -> list[Record]:
    return [record for record in arrivals(cwd) if record.kind == "push"]


def longest_gap(records: list[Record], worker: int) -> float:
    """The longest time without a push, from its join on."""
    times = [record.now for record in records if record.worker == worker]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def fault_rows(cwd: Path) -> list[dict[str, Any]]:
    events = cwd / "runs/it/events.jsonl"
    return [row for row in read_events(events) if row["kind"] == "fault"] if events.exists() else []


def wait_for_faults(cwd: Path, count: int) -> None:
    until(lambda: len(fault_rows(cwd)) >= count)


def test_workers_are_killed_restarted_stopped_and_slowed_and_the_run_can_be_replayed(tmp_path: Path) -> None:
    faults = [
        Fault("slow", 0.0, 1, lasts=60.0, factor=5.0),
        Fault("pause", 0.1, 0, lasts=0.4),
        Fault("crash", 0.2, 2, restart_after=0.1),
    ]
    with train(tmp_path, "--workers", "4", "--steps", "100000", faults=faults) as command:
        wait_for_faults(tmp_path, 3)
        until(lambda: (2, 1) in {(one.worker, one.incarnation) for one in pushes_of(tmp_path)})
        until(lambda: longest_gap(arrivals(tmp_path), 0) > 0.38)
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.finish() == 130, command.err
        assert not command.family()
    assert "fault at 0.2 s: worker 2 is killed, to come back 0.1 s later" in command.err
    assert "worker 2 was lost (killed by SIGKILL, by the table of faults, to come back)" in command.err
    result, records = result_of(tmp_path / "runs/it"), arrivals(tmp_path)

    its = [record for record in records if record.worker == 2]
    joined_and_left = [(record.kind, record.incarnation) for record in its if record.kind != "push"]
    assert joined_and_left[:3] == [("join", 0), ("leave", 0), ("join", 1)]
    assert next(record.now for record in its if record.kind == "leave") > 0.19
    assert any(
        record.kind == "push" and record.incarnation == 1 and record.disposition == Disposition.TAKEN for record in its
    )

    order = [record.worker for record in records if record.kind == "push" and record.disposition == Disposition.TAKEN]
    its_places = [-1, *(place for place, worker in enumerate(order) if worker == 0)]
    missed = max(after - before - 1 for before, after in itertools.pairwise(its_places))
    assert result["staleness"]["max"] >= missed > 0, "who stood still computed from old weights"

    rows = fault_rows(tmp_path)
    assert [(row["fault"], row["worker"], row["at"]) for row in rows] == [(f.kind, f.worker, f.at) for f in faults]
    assert (tmp_path / "runs/it/faults.toml").read_text() == faults_toml(faults)
    assert replays(tmp_path / "runs/it")


def test_a_round_waits_for_workers_who_are_all_to_come_back(tmp_path: Path) -> None:
    faults = [Fault("crash", 0.1, 0, restart_after=0.0), Fault("crash", 0.1, 1, restart_after=0.1)]
    with train(tmp_path, "--strategy", "sync", "--steps", "60", faults=faults) as command:
        assert command.finish() == 0, command.err
    assert result_of(tmp_path / "runs/it")["updates"] == 60
    joins = [(record.worker, record.incarnation) for record in arrivals(tmp_path) if record.kind == "join"]
    assert sorted(joins) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("end", ["server killed", "supervisor killed", "interrupted"])
def test_nobody_is_left_standing_still_when_the_run_fails(tmp_path: Path, end: str) -> None:
    faults = [Fault("slow", 0.0, 1, lasts=600.0, factor=3.0), *(Fault("pause", 0.1, w, lasts=600.0) for w in (0, 1))]
    with train(tmp_path, "--steps", "100000", faults=faults) as command:
        wait_for_faults(tmp_path, 3)
        if end == "interrupted":
            os.killpg(command.process.pid, signal.SIGINT)
        else:
            os.kill(command.process.pid if end == "supervisor killed" else command.forked()[0], signal.SIGKILL)
        wait_until_gone(command)
        command.finish()


def test_a_resumed_run_is_left_in_peace(tmp_path: Path) -> None:
    faults = [Fault("crash", 0.1, worker) for worker in (0, 1)]
    with train(tmp_path, "--steps", "60", faults=faults) as command:
        assert command.finish() == 1
        assert "all workers are gone at update" in command.err.splitlines()[-1]
    (tmp_path / "faults.toml").unlink()
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert "fault" not in resumed.err and result_of(tmp_path / "runs/it")["updates"] == 60


def test_a_script_can_be_killed_and_stopped_and_is_woken_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(
        faults_toml([Fault("crash", 0.1, 1), Fault("pause", 0.15, 0, lasts=0.2), Fault("pause", 0.5, 0, lasts=600.0)])
    )
    (tmp_path / "loop.py").write_text(
        "import time, torch, paceline\n"
        "x = torch.randn(64, 4)\n"
        "with paceline.join() as session:\n"
        "    model, batches = session.prepare(torch.nn.Linear(4, 1), (x, x[:, :1]), batch_size=8)\n"
        "    for a, b in batches:\n"
        "        time.sleep(0.01)\n"
        "        ((model(a) - b) ** 2).mean().backward()\n"
        "        session.step()\n"
    )
    flags = ("--steps", "100", "--name", "it", "--faults", "faults.toml", "--lr", "0.01")
    with Command("run", "-n", "3", *flags, "loop.py", cwd=tmp_path) as command:
        assert command.finish() == 0, command.err
        assert not command.family()
    assert "worker 1 was lost (killed by SIGKILL, by the table of faults): the run goes on with 2" in command.err
    assert result_of(tmp_path / "runs/it")["staleness"]["max"] > 8
