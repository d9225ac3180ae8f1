"""A computation that hangs in one worker while its heartbeats go on: the run names it, drops it and ends as it should.

A stopped process would be another matter: it sends no heartbeats, and is lost.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.status import read_status
from paceline.runs.events import read_events
from paceline.system.terminal import seconds_text
from tests.support import hanging_task
from tests.support.cluster_commands import serve, workers
from tests.support.commands import Command, replays, result_of, run
from tests.support.waiting import until

RUN = ("--strategy", "sync", "--workers", "2", "--threads", "1", "--name", "it", "--score", "none")
TASK = ("--task", "task.py:build", "--batch-size", "8", "--delay", "5ms")


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the task in it."""
    shutil.copy(hanging_task.__file__, tmp_path / "task.py")
    monkeypatch.chdir(tmp_path)  # a replay builds the task here, where the mark keeps it from hanging
    return tmp_path


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_events(folder / "events.jsonl") if row["kind"] == kind]


def assert_one_was_dropped(folder: Path, updates: int, said: str) -> int:
    """The run named one worker, went on without it, and replays."""
    (stalled,) = rows(folder, "stalled")
    worker = int(stalled["worker"])
    result = result_of(folder)
    assert (result["status"], result["updates"], result["lost_workers"]) == ("finished", updates, [worker])
    line = f"worker {worker} has made no step for {seconds_text(stalled['seconds'])}; its usual step takes"
    assert line in said and "it is dropped (--stall 1)" in said
    assert replays(folder)
    return worker


def test_a_hung_process_is_named_and_killed_and_its_round_goes_on(cwd: Path) -> None:
    with Command("train", *RUN, *TASK, "--steps", "100", "--stall", "1", cwd=cwd) as command:
        assert command.finish() == 0, command.err
        assert not command.family()
    worker = assert_one_was_dropped(cwd / "runs/it", 100, command.out + command.err)
    assert f"worker {worker} was lost (killed by SIGKILL): the run goes on with 1" in command.out + command.err


def test_a_hung_worker_of_a_served_run_is_dropped_although_it_sends_heartbeats(cwd: Path) -> None:
    with ExitStack() as stack:
        server = serve(stack, cwd, *RUN, *TASK, "--steps", "500", "--stall", "1", "--tls")
        both = workers(stack, cwd, 2, "--tls")
        assert server.finish() == 0, server.err
        until(lambda: any(one.process.poll() is not None for one in both), "the end of the other worker")
        (hung,) = (one for one in both if one.process.poll() is None)
        (other,) = (one for one in both if one is not hung)
        assert other.finish() == 0 and "has finished: the server needs no more steps of it" in other.err
        hung.process.kill()
        hung.finish()
    worker = assert_one_was_dropped(cwd / "runs/it", 500, server.out + server.err)
    assert f"goes on without this worker: worker {worker} has made no step for" in hung.err


def test_a_hung_script_is_dropped_by_hand(cwd: Path) -> None:
    """Its loop waits for ever; the other waits at the barrier, which is no stall."""
    (cwd / "loop.py").write_text(hanging_task.OWN_LOOP)
    folder = cwd / "runs/it"
    with Command("run", "-n", "2", "--strategy", "sync", "--lr", "0.05", "--name", "it", "loop.py", cwd=cwd) as command:

        def paused() -> list[int]:
            found = read_status(folder).workers if (folder / "events.jsonl").exists() else ()
            return [one.worker for one in found if one.state == "paused"]

        until(hanging_task.MARK.exists, "a worker that hangs")
        (worker,) = until(paused, "a worker that is silent on its turn")
        dropped = run("drain", "runs/it", str(worker), "--now", cwd=cwd)
        assert dropped.process.returncode == 0 and "dropped; it has left the run" in dropped.out
        assert command.finish() == 0, command.err
    result = result_of(folder)
    assert (result["status"], result["lost_workers"]) == ("finished", [worker])
