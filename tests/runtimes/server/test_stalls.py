"""A server that checks its workers' progress: it names one that computes without end, and drops it if asked to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runs import control_files
from paceline.runs.control_files import DrainAnswer, request_drain
from paceline.runs.events import read_events
from paceline.runtimes.server.service import Dispatcher
from paceline.settings.resolve import resolve
from tests.support.recorded_runs import RecordedRun, assert_same, records_of, small_config


class Notes:
    """The user of a server: its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def send(self, row: dict[str, Any]) -> None:
        assert row["kind"] == "clock"


class Watched:
    """A run whose clock the test moves, checked as a service checks it twice a second."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.run = RecordedRun(small_config(folder, workers=2, epochs=8.0, **settings))
        self.now = 0.0
        self.run.host.clock.source = lambda: self.now
        self.user = Notes()
        self.dropped: list[tuple[int, str]] = []
        self.dispatcher = Dispatcher(self.run.host, self.user, {})  # type: ignore[arg-type]
        self.run.join_all()

    def drop(self, worker: int, why: str) -> None:
        self.dropped.append((worker, why))
        self.run.leave(worker)

    def round(self) -> None:
        """Both workers push, after 20 ms."""
        self.now += 0.02
        for worker in sorted(self.run.instances):
            self.run.push(worker)
        self.dispatcher.check(self.drop)

    def wait(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.dispatcher.check(self.drop)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_events(self.run.folder.events_file) if row["kind"] == kind]

    def status(self) -> str:
        self.run.host.housekeep()
        return str(self.run.folder.path)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path, strategy="sync")
    yield one
    one.run.close()


def hang(one: Watched) -> None:
    """Ten rounds, then worker 0 waits at the barrier for worker 1."""
    for _ in range(10):
        one.round()
    one.now += 0.02
    one.run.push(0)


@contextlib.contextmanager
def checking(one: Watched) -> Iterator[None]:
    """Let the server look for requests meanwhile, in a thread."""
    ended = threading.Event()

    def check() -> None:
        while not ended.wait(0.01):
            one.dispatcher.check(one.drop)

    thread = threading.Thread(target=check)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_a_hung_worker_is_named_once_and_the_one_that_waits_for_it_is_not(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    hang(watched)
    watched.wait(19.0)
    assert watched.user.lines == []
    watched.wait(21.0)
    (line,) = watched.user.lines
    assert line.startswith("worker 1 has made no step for 20 s; its usual step takes 20 ms: 'paceline drain")
    (row,) = watched.events("stalled")
    assert (row["worker"], row["usual"]) == (1, pytest.approx(0.02)) and 20.0 < row["seconds"] < 21.0
    assert watched.dropped == []
    assert main(["status", watched.status()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "worker 1 has made no step for 40 s; its usual step takes 20 ms" in said and "no stragglers" not in said
    watched.run.push(1)
    watched.round()
    assert watched.user.lines[1:] == ["worker 1 makes steps again"]
    assert watched.events("workers")[-1]["state"] == ["held", "stalled"]


def test_evaluations_and_stops_of_the_server_count_against_nobody(watched: Watched) -> None:
    hang(watched)
    watched.now += 500.0  # no check came: the server was busy or stopped
    watched.wait(1.0)
    watched.now += 500.0
    watched.run.host.accounting.extend(500.0)  # as after an evaluation
    watched.wait(17.0)
    assert watched.user.lines == []


def test_a_stalled_worker_is_dropped_by_its_limit_and_the_round_goes_on(tmp_path: Path) -> None:
    one = Watched(tmp_path, strategy="sync", stall=3.0)
    hang(one)
    version = one.run.server.version
    one.wait(5.0)
    why = "worker 1 has made no step for 3 s; its usual step takes 20 ms: it is dropped (--stall 3)"
    assert one.dropped == [(1, why)] and one.run.host.lost == [1]
    assert one.run.server.version == version + 1, "the round closed without it"
    one.run.run_to_the_end()
    again = one.run.replay()
    again.feed(records_of(one.run))
    assert again.mismatch is None
    assert_same(again.server, one.run.server)


def test_a_drain_of_a_hung_worker_claims_nothing_and_now_drops_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control_files, "LEAVE_SECONDS", 0.2)
    hang(watched)
    folder = watched.run.folder.path

    def ask(*words: str) -> tuple[int, str]:
        with checking(watched):
            code = main(["drain", str(folder), *words])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    with watched.run.folder.locked():
        code, said = ask("1")
        assert code == 1 and "worker 1 has not answered (it has not left after" in said
        assert f"'paceline drain {folder} 1 --now' drops it without its push" in said and "drained" not in said
        watched.wait(21.0)
        monkeypatch.setattr(control_files, "LEAVE_SECONDS", 60.0)
        assert "cannot be drained: it is being drained already" in ask("1")[1]
        assert watched.dropped == []
        code, said = ask("1", "--now")
    assert code == 0 and said == "worker 1: dropped; it has left the run"
    assert watched.dropped == [(1, "worker 1 is dropped, as 'paceline drain --now' asked")]
    watched.run.join(1)  # its process comes out of its step, and asks to join again
    assert watched.run.server.members[1].released, "it is told to end"


def test_a_named_worker_is_not_waited_for(watched: Watched) -> None:
    hang(watched)
    watched.wait(25.0)
    with watched.run.folder.locked(), checking(watched):
        answer = request_drain(watched.run.folder, (1,))
    assert answer == DrainAnswer({}, {1: "no step for 25 s; its usual step takes 20 ms"})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"strategy": "allreduce"}, "--stall 5: strategy allreduce is a ring, which no worker can leave"),
        ({"strategy": "classic"}, "--stall 5: strategy classic is one worker: stop the run, or let it finish"),
        ({"strategy": "sync", "stall": -1.0}, "--stall must be a positive number"),
    ],
)
def test_a_run_that_can_drop_nobody_refuses_a_limit(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        resolve(RunConfig(**{"dataset": "fashion-mnist-sample", "stall": 5.0, **settings}))
