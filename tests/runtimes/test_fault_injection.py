"""Faults done to real processes: the injector by itself on a clock of ours, then runs that suffer from a table."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from commands import PATIENCE, Command, replays, result_of, run, wait_until_gone

from paceline.cli.main import main
from paceline.core.messages import Verdict
from paceline.runs.arrival_log import Record, read_arrivals
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.runtimes.local.fault_injection import PERIOD, Injector
from paceline.runtimes.server.service import GRACE_SECONDS
from paceline.settings.fault_table import Fault, faults_toml

SAMPLE = (
    "--dataset",
    "fashion-mnist-sample",
    "--name",
    "it",
    "--seed",
    "3",
    "--score",
    "none",
    "--faults",
    "faults.toml",
)
STEADY = ("--strategy", "async", "--workers", "2", "--threads", "1", "--delay", "8ms")


class Stage:
    """An injector on a clock that a test moves; keeps what it signals and tells, each with its time."""

    def __init__(self, *faults: Fault) -> None:
        self.now = 100.0
        self.signals: list[tuple[float, int, int]] = []
        self.told: list[tuple[float, str, bool]] = []
        self.restarted: list[tuple[float, int]] = []
        self.injector = Injector(
            faults,
            lambda fault, text, returns: self.told.append((self.now, text, returns)),
            lambda worker: self.restarted.append((self.now, worker)),
            lambda: self.now,
            lambda pid, number: self.signals.append((self.now, pid, number)),
        )
        self.injector.started(0, 10)
        self.injector.started(1, 11)

    def pass_until(self, end: float) -> None:
        """Let the injector act whenever it asked to, as the supervisor does."""
        self.injector.act()
        while (wait := self.injector.timeout()) is not None and self.now + wait <= end:
            self.now += max(wait, 1e-9)
            self.injector.act()
        self.now = end

    def stopped_seconds(self, pid: int) -> float:
        """How long the process stood still; every stop must have been followed by a waking."""
        times = [(when, number) for when, its, number in self.signals if its == pid]
        assert [number for _, number in times] == [signal.SIGSTOP, signal.SIGCONT] * (len(times) // 2)
        return sum(wake - stop for (stop, _), (wake, _) in zip(times[::2], times[1::2], strict=True))


def test_who_joins_is_started_unless_it_is_here_and_who_is_drained_is_told_of() -> None:
    stage = Stage(Fault("join", 1.0, 2), Fault("join", 2.0, 1), Fault("drain", 3.0, 0))
    stage.injector.set_clock(0.0, True)
    stage.pass_until(110.0)
    assert stage.restarted == [(101.0, 2)] and stage.signals == []
    assert stage.told == [
        (101.0, "fault at 1 s: worker 2 joins", True),
        (102.0, "fault at 2 s: worker 1 is here already", False),
        (103.0, "fault at 3 s: worker 0 is to be drained", False),
    ]


def test_nothing_happens_before_the_runs_clock_runs() -> None:
    stage = Stage(Fault("pause", 0.0, 1, lasts=1.0))
    assert stage.injector.timeout() is None
    stage.pass_until(200.0)
    assert not stage.signals and not stage.told
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(200.5)
    assert stage.signals == [(200.0, 11, signal.SIGSTOP)]


def test_a_pause_stops_its_worker_for_its_time() -> None:
    stage = Stage(Fault("pause", 0.5, 1, lasts=2.0))
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(110.0)
    assert stage.signals == [(100.5, 11, signal.SIGSTOP), (102.5, 11, signal.SIGCONT)]
    assert stage.told == [(100.5, "fault at 0.5 s: worker 1 stands still for 2 s", False)]
    assert stage.injector.timeout() is None


@pytest.mark.parametrize("factor", [1.5, 4.0, 20.0])
def test_a_slowed_worker_runs_for_its_share_of_the_time(factor: float) -> None:
    stage = Stage(Fault("slow", 0.0, 0, lasts=1.0, factor=factor))
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(101.0)
    assert stage.stopped_seconds(10) == pytest.approx(1 - 1 / factor, abs=1e-3)
    assert len(stage.signals) == pytest.approx(2 / PERIOD, abs=2)
    assert not stage.injector.timeout()


def test_a_pause_within_a_slow_time_is_a_pause() -> None:
    stage = Stage(Fault("slow", 0.0, 0, lasts=2.0, factor=2.0), Fault("pause", 0.5, 0, lasts=1.0))
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(103.0)
    assert stage.stopped_seconds(10) == pytest.approx(1.5, abs=PERIOD)


def test_a_crash_is_followed_by_a_restart_only_once_the_process_is_gone() -> None:
    stage = Stage(Fault("crash", 1.0, 1, restart_after=0.5), Fault("crash", 1.2, 1), Fault("crash", 3.0, 1))
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(101.8)
    assert stage.signals == [(101.0, 11, signal.SIGKILL)] and not stage.restarted
    assert stage.injector.ended(11) == ("by the table of faults", "to come back")
    stage.pass_until(102.0)
    assert stage.restarted == [(101.8, 1)]
    stage.injector.started(1, 12)
    stage.pass_until(104.0)
    assert stage.signals[1:] == [(103.0, 12, signal.SIGKILL)]
    assert stage.injector.ended(12) == ("by the table of faults",)
    assert [returns for _, _, returns in stage.told] == [True, False, False]
    assert "is not there to be killed" in stage.told[1][1]


def test_a_process_that_ends_by_itself_is_none_of_ours() -> None:
    stage = Stage(Fault("pause", 0.0, 1, lasts=9.0))
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(101.0)
    assert stage.injector.ended(11) == ()
    stage.pass_until(120.0)
    assert [number for _, _, number in stage.signals] == [signal.SIGSTOP], "a number that is gone gets no signal"


def test_the_clock_that_stood_still_is_followed() -> None:
    stage = Stage(Fault("pause", 2.0, 1, lasts=1.0))
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(101.0)
    stage.injector.correct(0.25)
    stage.pass_until(110.0)
    assert stage.signals[0] == (102.75, 11, signal.SIGSTOP)


@pytest.mark.parametrize("told", ["before", "after"])
@pytest.mark.parametrize("how", ["over", "closed"])
def test_at_the_end_everybody_is_woken_and_nothing_more_happens(how: str, told: str) -> None:
    stage = Stage(
        Fault("crash", 0.0, 0, restart_after=5.0), Fault("pause", 0.5, 1, lasts=9.0), Fault("pause", 3.0, 1, lasts=9.0)
    )
    stage.injector.set_clock(0.0, runs=True)
    stage.pass_until(101.0)
    if told == "before":
        stage.injector.ended(10)
    if how == "over":
        stage.injector.set_clock(1.0, runs=False)
    else:
        stage.injector.close()
    if told == "after":
        assert stage.injector.ended(10) == ("by the table of faults",)
    assert stage.signals[-1] == (101.0, 11, signal.SIGCONT)
    before = len(stage.signals)
    stage.pass_until(120.0)
    assert len(stage.signals) == before and not stage.restarted


REFUSED = {
    "lose": (Fault("lose", 1.0, 0), (), "lose at 1 s: processes of one machine cannot suffer 'lose'"),
    "duplicate": (Fault("duplicate", 1.0, 0), (), "cannot suffer 'duplicate'; try it in 'paceline simulate'"),
    "reorder": (Fault("reorder", 1.0, 0, lasts=1.0), (), "cannot suffer 'reorder'; try it in 'paceline simulate'"),
    "cut": (Fault("cut", 1.0, 0, lasts=1.0), (), "cannot suffer 'cut'; try it in 'paceline simulate'"),
    "server": (Fault("server", 1.0), (), "cannot suffer 'server'; try it in 'paceline simulate'"),
    "faster": (Fault("slow", 1.0, 0, lasts=1.0, factor=0.5), (), "cannot be made faster (factor 0.5)"),
    "late notice": (Fault("crash", 1.0, 0, noticed_after=1.0), (), "a killed process is noticed at once"),
    "no worker": (Fault("crash", 1.0, 7), (), "fault 1 (crash): no worker 7, there are 0 to 1"),
    "classic": (Fault("crash", 1.0, 0), ("--strategy", "classic"), "strategy classic has no worker processes"),
    "cuda": (Fault("crash", 1.0, 0), ("--device", "cuda"), "with --device cuda all workers are in this process"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_processes_cannot_suffer_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fault, flags, expected = REFUSED[name]
    (tmp_path / "faults.toml").write_text(faults_toml([fault]))
    assert main(["train", *SAMPLE, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: ") and "faults.toml" in line and expected in line
    assert not (tmp_path / "runs").exists()


def test_a_script_cannot_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "faults.toml").write_text(faults_toml([Fault("crash", 1.0, 0, restart_after=1.0)]))
    assert main(["run", "-n", "2", "--faults", "faults.toml", "script.py"]) == 2
    assert "a script cannot come back in the middle of its run; leave restart_after out" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def train(cwd: Path, *arguments: str, faults: list[Fault]) -> Command:
    (cwd / "faults.toml").write_text(faults_toml(faults))
    return Command("train", *SAMPLE, *STEADY, *arguments, cwd=cwd)


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


def until(happened: Callable[[], bool]) -> None:
    """Wait for something, however slow the machine."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_faults(cwd: Path, count: int) -> None:
    until(lambda: len(fault_rows(cwd)) >= count)


@pytest.mark.real
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
    assert any(record.kind == "push" and record.incarnation == 1 and record.verdict == Verdict.TAKEN for record in its)

    order = [record.worker for record in records if record.kind == "push" and record.verdict == Verdict.TAKEN]
    its_places = [-1, *(place for place, worker in enumerate(order) if worker == 0)]
    missed = max(after - before - 1 for before, after in itertools.pairwise(its_places))
    assert result["staleness"]["max"] >= missed > 0, "who stood still computed from old weights"

    rows = fault_rows(tmp_path)
    assert [(row["fault"], row["worker"], row["at"]) for row in rows] == [(f.kind, f.worker, f.at) for f in faults]
    assert (tmp_path / "runs/it/faults.toml").read_text() == faults_toml(faults)
    assert replays(tmp_path / "runs/it")


@pytest.mark.real
def test_a_round_waits_for_workers_who_are_all_to_come_back(tmp_path: Path) -> None:
    faults = [Fault("crash", 0.1, 0, restart_after=0.0), Fault("crash", 0.1, 1, restart_after=0.1)]
    with train(tmp_path, "--strategy", "sync", "--steps", "60", faults=faults) as command:
        assert command.finish() == 0, command.err
    assert result_of(tmp_path / "runs/it")["updates"] == 60
    joins = [(record.worker, record.incarnation) for record in arrivals(tmp_path) if record.kind == "join"]
    assert sorted(joins) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.real
@pytest.mark.parametrize("end", ["server killed", "supervisor killed", "interrupted"])
def test_nobody_is_left_standing_still_when_the_run_fails(tmp_path: Path, end: str) -> None:
    faults = [Fault("slow", 0.0, 1, lasts=600.0, factor=3.0), *(Fault("pause", 0.1, w, lasts=600.0) for w in (0, 1))]
    with train(tmp_path, "--steps", "100000", faults=faults) as command:
        wait_for_faults(tmp_path, 3)
        if end == "interrupted":
            os.killpg(command.process.pid, signal.SIGINT)
        else:
            os.kill(command.process.pid if end == "supervisor killed" else command.forked()[0], signal.SIGKILL)
        wait_until_gone(command, GRACE_SECONDS)
        command.finish()


@pytest.mark.real
def test_a_resumed_run_is_left_in_peace(tmp_path: Path) -> None:
    faults = [Fault("crash", 0.1, worker) for worker in (0, 1)]
    with train(tmp_path, "--steps", "60", faults=faults) as command:
        assert command.finish() == 1
        assert "all workers are gone at update" in command.err.splitlines()[-1]
    (tmp_path / "faults.toml").unlink()
    resumed = run("resume", "runs/it", cwd=tmp_path)
    assert resumed.process.returncode == 0, resumed.err
    assert "fault" not in resumed.err and result_of(tmp_path / "runs/it")["updates"] == 60


@pytest.mark.real
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
        assert command.finish(30.0) == 0, command.err
        assert not command.family()
    assert "worker 1 was lost (killed by SIGKILL, by the table of faults): the run goes on with 2" in command.err
    assert result_of(tmp_path / "runs/it")["staleness"]["max"] > 8
