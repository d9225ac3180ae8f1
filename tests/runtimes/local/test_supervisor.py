"""What the supervisor does when a worker's process ends: start it again, or tell the server that it is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.errors import SERVER_GONE, Interrupted, RunFailed, UserError
from paceline.runs.folder import RunFolder
from paceline.runtimes.local.failures import WorkerFailures
from paceline.runtimes.local.restart import WorkerRestarts
from paceline.runtimes.local.supervisor import ProcessPlan, Supervisor
from paceline.system.strict_json import to_json

GOES_ON = "the run goes on with 1, without its part of the data"
EXITED, KILLED = 1 << 8, int(signal.SIGKILL)


class Bench:
    """A supervisor without processes: the test plays the fork server and the server."""

    def __init__(self, folder: Path, limit: int, restarts: WorkerRestarts | None = None, **settings: Any) -> None:
        self.forks, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.rows: list[dict[str, Any]] = []
        config = RunConfig(strategy="async", workers=2, restart_workers=limit, **settings)
        forks: Any = SimpleNamespace(socket=ours, notice=lambda: json.loads(ours.recv(1 << 16)))
        report, allowed = self.rows.append, restarts or WorkerRestarts(limit)
        self.supervisor = Supervisor(forks, config, RunFolder(folder), ProcessPlan({}, []), report, allowed)
        self.server = self.supervisor._server_end.dup()
        self.server.setblocking(False)
        self.supervisor.start()
        self._sockets = ours, self.forks, self.server, self.supervisor._control
        for pid, name in ((10, "server"), (20, "worker 0"), (21, "worker 1")):
            self.started(pid, name)
        self.server.send(to_json({"kind": "serving"}).encode())
        self.supervisor._hear_server_out()
        self.orders()

    def started(self, pid: int, name: str) -> None:
        self.hear({"kind": "started", "pid": pid, "name": name})

    def hear(self, notice: dict[str, Any]) -> None:
        self.forks.send(to_json(notice).encode())
        self.supervisor._hear_forks()

    def end(self, pid: int, status: int) -> list[tuple[str, int, int]]:
        """Let a process end; return the orders that the server gets: kind, worker, incarnation."""
        if not status:
            self.hear({"kind": "returned", "pid": pid})
        self.hear({"kind": "ended", "pid": pid, "status": status, "how": "as the test says"})
        return self.orders()

    def orders(self) -> list[tuple[str, int, int]]:
        found = []
        try:
            while True:
                packet, fds, _, _ = socket.recv_fds(self.server, 1 << 16, 1)
                for fd in fds:
                    os.close(fd)
                order = json.loads(packet)
                found.append((order["kind"], order.get("worker", -1), order.get("incarnation", -1)))
        except BlockingIOError:
            return found

    def notes(self) -> list[str]:
        return [row["text"] for row in self.rows if row["kind"] == "note"]

    def close(self) -> None:
        for end in self._sockets:
            end.close()


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


def make(
    benches: list[Bench], folder: Path, limit: int, restarts: WorkerRestarts | None = None, **settings: Any
) -> Bench:
    benches.append(Bench(folder, limit, restarts, **settings))
    return benches[-1]


def test_a_killed_worker_is_started_again_as_often_as_the_flag_says(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 2)
    assert bench.end(21, KILLED) == [("worker", 1, 1)]
    bench.started(22, "worker 1")
    assert bench.end(20, KILLED) == [("worker", 0, 1)]
    assert bench.end(22, KILLED) == [("gone", 1, 1)]
    again = [
        f"worker {worker} was lost (as the test says): it is started again ({n} of 2)" for n, worker in ((1, 1), (2, 0))
    ]
    assert bench.notes() == [*again, "worker 1 was lost (as the test says): no worker is left"]


def test_restarts_of_workers_are_counted_over_restarts_of_the_server(benches: list[Bench], tmp_path: Path) -> None:
    restarts = WorkerRestarts(1)
    assert make(benches, tmp_path, 1, restarts).end(21, KILLED) == [("worker", 1, 1)]
    assert make(benches, tmp_path, 1, restarts).end(21, KILLED) == [("gone", 1, 0)]


@pytest.mark.parametrize("status", [0, EXITED])
def test_a_worker_that_exits_by_itself_is_gone(benches: list[Bench], tmp_path: Path, status: int) -> None:
    bench = make(benches, tmp_path, 5)
    assert bench.end(21, status) == [("gone", 1, 0)]
    assert len(bench.notes()) == (status != 0)


def test_the_exception_that_ended_a_worker_is_named(benches: list[Bench], tmp_path: Path) -> None:
    benches.append(bench := Bench(tmp_path, 0, keep_going=True))
    bench.hear({"kind": "raised", "pid": 21, "text": "ValueError: no", "traceback": "..."})
    assert bench.end(21, EXITED) == []
    assert bench.notes() == [f"worker 1 was lost (as the test says, ValueError: no): {GOES_ON}"]


def test_an_exception_in_a_worker_stops_the_server(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 5)
    for pid in (21, 20):
        bench.hear({"kind": "raised", "pid": pid, "text": "ValueError: no (a.py, line 1)", "traceback": "..."})
    assert bench.orders() == [("stop", -1, -1)]
    assert bench.end(21, EXITED) == [] and bench.notes() == []
    failures = bench.supervisor._failures
    assert failures.line == "worker 1 of 2: ValueError: no (a.py, line 1); and 1 other worker: the same"
    assert str(failures.error(RunFolder(tmp_path))).endswith(": the same: nothing was trained")


def test_two_interrupts_at_once_let_the_server_save_the_run(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0)
    with bench.supervisor._signals():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
    assert bench.orders() == [("stop", -1, -1)] and [row["kind"] for row in bench.rows] == ["stopping"]


def test_a_script_that_has_not_come_to_its_training_has_nothing_to_save(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0, task="script:loop")
    with bench.supervisor._signals():
        signal.raise_signal(signal.SIGINT)
    assert bench.orders() == [("stop", -1, -1)] and not bench.rows


def test_an_exception_after_an_interrupt_is_mentioned_and_no_failure(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0)
    with bench.supervisor._signals():
        signal.raise_signal(signal.SIGINT)
    for pid in (21, 20):
        bench.hear({"kind": "raised", "pid": pid, "text": "ValueError: no (a.py, line 1)", "traceback": "..."})
    assert bench.orders() == [("stop", -1, -1)], "of the interrupt"
    assert bench.end(21, EXITED) == [] and bench.notes() == [] and not bench.supervisor._failures
    bench.supervisor._failures.end(RunFolder(tmp_path), bench.rows.append)
    (line,) = bench.notes()
    what = "worker 1 of 2: ValueError: no (a.py, line 1); and 1 other worker: the same"
    assert line == f"{what}: the run had been told to stop, and is saved"


def test_an_exception_before_an_interrupt_stays_the_failure(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0)
    bench.hear({"kind": "raised", "pid": 21, "text": "ValueError: no (a.py, line 1)", "traceback": "..."})
    with bench.supervisor._signals():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(RunFailed, match=r"worker 1 of 2: ValueError: no"):
        bench.supervisor._failures.end(RunFolder(tmp_path), bench.rows.append)


def test_an_exception_in_the_server_is_a_failure_after_an_interrupt_too(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0)
    with bench.supervisor._signals():
        signal.raise_signal(signal.SIGINT)
    bench.hear({"kind": "raised", "pid": 10, "text": "OSError: no", "traceback": "..."})
    assert bench.supervisor._failures.line == "the server: OSError: no"


MISTAKE = {"kind": "complaint", "is_mistake": True, "code": 2, "text": "use no clamping"}


def test_a_mistake_in_a_script_stops_the_server_so_that_the_run_is_saved(benches: list[Bench], tmp_path: Path) -> None:
    benches.append(bench := Bench(tmp_path, 0, task="script:train"))
    for pid in (21, 20):
        bench.hear({**MISTAKE, "pid": pid})
    assert bench.orders() == [("stop", -1, -1)]
    assert bench.end(21, EXITED) == [] and bench.notes() == []
    error = bench.supervisor._failures.error(RunFolder(tmp_path))
    assert isinstance(error, UserError), "nothing was trained"
    assert str(error) == "worker 1 of 2: use no clamping; and 1 other worker: the same"


def test_a_mistake_of_a_run_that_has_trained_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(RunConfig(task="script:train", workers=2, runs=str(tmp_path), name="run"))
    monkeypatch.setattr(RunFolder, "is_unstarted", lambda self: False)
    failures = WorkerFailures()
    failures.add("worker 1 of 2", {**MISTAKE, "traceback": ""})
    error = failures.error(folder)
    assert isinstance(error, RunFailed) and error.exit_code == 1
    way_on = f"the run stopped; once the code is mended, 'paceline resume {folder.path}' continues from there"
    assert str(error) == f"worker 1 of 2: use no clamping: {way_on}"


def test_without_the_flag_the_server_is_told_nothing(benches: list[Bench], tmp_path: Path) -> None:
    assert make(benches, tmp_path, 0).end(21, KILLED) == []


def test_a_worker_that_the_server_dropped_is_not_started_again(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(pid))
    bench = make(benches, tmp_path, 5)
    bench.server.send(to_json({"kind": "drop", "worker": 1, "incarnation": 0}).encode())
    assert bench.end(20, KILLED) == [("worker", 0, 1)], "another one is"
    assert killed == [21] and bench.end(21, KILLED) == [("gone", 1, 0)]


def test_a_drop_of_an_earlier_incarnation_does_not_reach_the_next(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(pid))
    bench = make(benches, tmp_path, 5)
    bench.end(21, KILLED)
    bench.started(22, "worker 1")
    bench.server.send(to_json({"kind": "drop", "worker": 1, "incarnation": 0}).encode())
    bench.supervisor._hear_server_out()
    assert not killed


def test_nothing_is_started_again_once_training_is_over(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 5)
    bench.server.send(to_json({"kind": "clock", "now": 1.0, "runs": False}).encode())
    assert bench.end(21, KILLED) == [("gone", 1, 0)]


def test_a_complaint_of_a_worker_that_came_back_too_late_does_not_fail_the_run(
    benches: list[Bench], tmp_path: Path
) -> None:
    bench = make(benches, tmp_path, 5)
    bench.end(21, KILLED)
    bench.started(22, "worker 1")
    bench.server.send(to_json({"kind": "finished"}).encode())
    bench.hear(
        {"kind": "complaint", "is_mistake": False, "pid": 22, "code": 1, "text": "the server of this run is gone"}
    )
    with pytest.raises(Exception, match="worker 0: something else"):
        bench.hear({"kind": "complaint", "is_mistake": False, "pid": 20, "code": 1, "text": "something else"})


def test_a_complaint_before_the_connection_of_a_killed_server_ends_does_not_hide_that(
    benches: list[Bench], tmp_path: Path
) -> None:
    """The system closes the connections of a killed process one after another."""
    bench = make(benches, tmp_path, 0)
    closing = threading.Timer(0.2, lambda: setattr(bench.supervisor, "_server_is_silent", True))
    closing.start()
    bench.hear({"kind": "complaint", "is_mistake": False, "pid": 20, "code": 1, "text": SERVER_GONE})
    closing.join()
    with pytest.raises(Exception, match=r"the server process ended \(as the test says\)"):
        bench.end(10, KILLED)


def test_a_complaint_because_the_server_was_killed_does_not_hide_that(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0)
    bench.forks.send(to_json({"kind": "started", "pid": 30, "name": "worker 2"}).encode())
    bench.supervisor._hear_forks()
    bench.server.close()
    bench.supervisor._server_is_silent = True
    bench.hear(
        {"kind": "complaint", "is_mistake": False, "pid": 20, "code": 1, "text": "the server of this run is gone"}
    )
    with pytest.raises(Exception, match=r"the server process ended \(as the test says\)"):
        bench.end(10, KILLED)


def test_an_error_of_the_server_is_told_although_the_processes_end_before_it_is_heard(
    benches: list[Bench], tmp_path: Path
) -> None:
    bench = make(benches, tmp_path, 0)
    bench.server.send(to_json({"kind": "failed", "code": 2, "text": "two models"}).encode())
    gone = {"kind": "complaint", "is_mistake": False, "pid": 21, "code": 1, "text": SERVER_GONE}
    ended = {"status": EXITED, "how": "as the test says"}
    for notice in ({"kind": "ended", "pid": 20, **ended}, gone, {"kind": "ended", "pid": 10, **ended}):
        bench.forks.send(to_json(notice).encode())
    with pytest.raises(UserError, match=r"^two models$"):
        bench.supervisor._hear_server()
    assert not bench.notes(), "no worker was lost"


def test_words_of_the_server_that_were_read_at_the_end_of_a_worker_are_not_waited_for(
    benches: list[Bench], tmp_path: Path
) -> None:
    """Both say something. The end of a worker is heard first, and makes the supervisor read what the server says."""
    bench = make(benches, tmp_path, 0)
    bench.server.send(to_json({"kind": "note", "text": "a word"}).encode())
    bench.forks.send(to_json({"kind": "ended", "pid": 20, "status": KILLED, "how": "killed"}).encode())
    supervisor = bench.supervisor
    listening = threading.Thread(target=supervisor._listen, args=([supervisor._forks.socket, supervisor._control],))
    listening.daemon = True
    listening.start()
    listening.join(10.0)
    assert not listening.is_alive(), "it waits for words that it has read"
    assert "a word" in bench.notes()


def test_a_worker_whose_code_ends_its_process_without_an_error_is_named(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0)
    bench.hear({"kind": "ended", "pid": 21, "status": 0, "how": "exit code 0"})
    assert bench.notes() == [f"worker 1 was lost (exit code 0): {GOES_ON}"]


def test_a_script_that_crashes_after_its_training_fails_the_command(benches: list[Bench], tmp_path: Path) -> None:
    bench = make(benches, tmp_path, 0, task="script:loop")
    bench.server.send(to_json({"kind": "ending"}).encode())
    bench.hear({"kind": "ended", "pid": 20, "status": 0, "how": "exit code 0"})
    assert not bench.supervisor._failures, "a script may end by os._exit(0)"
    bench.hear({"kind": "ended", "pid": 21, "status": EXITED, "how": "exit code 1"})
    assert bench.supervisor._failures.line == "worker 1 of 2: exit code 1 after its training" and not bench.notes()


def test_an_interrupt_before_the_server_is_there_does_not_wait_for_it(benches: list[Bench], tmp_path: Path) -> None:
    """It may hang in the import of a task."""
    bench = make(benches, tmp_path, 0)
    bench.supervisor._stages.clear()
    with pytest.raises(Interrupted, match=r"^interrupted, before training began: nothing was trained$"):
        with bench.supervisor._signals():
            signal.raise_signal(signal.SIGINT)
    assert not bench.orders()


def test_a_server_that_is_not_there_in_time_is_named_once(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.runtimes.local.supervisor.ABSENT_SECONDS", 0.0)
    bench = make(benches, tmp_path, 0)
    bench.supervisor._stages.clear()
    for _ in range(2):
        bench.supervisor._wait(0.0)
    assert [text[:35] for text in bench.notes()] == ["the server is not ready after 0 s: "]
