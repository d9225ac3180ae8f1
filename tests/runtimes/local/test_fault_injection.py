"""The fault injector on a clock that the test moves, and the tables that a command refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.runtimes.local.fault_injection import PERIOD, FaultInjector
from paceline.settings.fault_table import Fault, faults_toml

SAMPLE = ("--dataset", "fashion-mnist-sample", "--name", "it", "--faults", "faults.toml")


class Stage:
    """An injector on a clock that a test moves; keeps what it signals and tells, each with its time."""

    def __init__(self, *faults: Fault) -> None:
        self.now = 100.0
        self.signals: list[tuple[float, int, int]] = []
        self.told: list[tuple[float, str, bool]] = []
        self.restarted: list[tuple[float, int]] = []
        self.injector = FaultInjector(
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
    "lose": (Fault("lose", 1.0, 0), (), "lose at 1 s: processes of one machine cannot have the fault 'lose'"),
    "duplicate": (Fault("duplicate", 1.0, 0), (), "cannot have the fault 'duplicate'; try it in 'paceline simulate'"),
    "reorder": (
        Fault("reorder", 1.0, 0, lasts=1.0),
        (),
        "cannot have the fault 'reorder'; try it in 'paceline simulate'",
    ),
    "cut": (Fault("cut", 1.0, 0, lasts=1.0), (), "cannot have the fault 'cut'; try it in 'paceline simulate'"),
    "server": (Fault("server", 1.0), (), "cannot have the fault 'server'; try it in 'paceline simulate'"),
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


def test_a_script_joins_only_a_run_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import paceline\n")
    (tmp_path / "faults.toml").write_text(faults_toml([Fault("join", 1.0, 2)]))
    assert main(["run", "-n", "2", "--faults", "faults.toml", "script.py"]) == 2
    assert "no worker 2, there are 0 to 1, --max-workers makes room" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
