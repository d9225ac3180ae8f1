"""The start barrier of a run that resumes after a crash: a worker that was lost is not waited for without end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from paceline.runs.arrival_log import read_arrivals
from paceline.runtimes.server.admission import CEILING_SECONDS, REMIND_SECONDS, StartBarrier
from paceline.runtimes.server.remote_service import ForegroundChannel
from paceline.runtimes.server.runtime import TcpPeers
from paceline.runtimes.server.service import Dispatcher
from tests.support.recorded_runs import Record, RecordedRun


@contextlib.contextmanager
def barrier_of(run: RecordedRun, address: str = "127.0.0.1:1") -> Iterator[tuple[StartBarrier, list[str]]]:
    said: list[str] = []
    line = ForegroundChannel(lambda row: said.append(row["text"]))
    with line.connection, line._other:
        dispatcher = Dispatcher(run.host, line, {})
        yield StartBarrier(run.host, TcpPeers(), dispatcher, address), said


def test_after_a_crash_the_run_goes_on_without_who_does_not_come_back(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(5)
    run.leave(1)
    run.push_at_random(2)
    run.resume()
    with barrier_of(run) as (barrier, said):
        barrier.give_up_lost(100.0)
        barrier.give_up_lost(100.0 + 2 * CEILING_SECONDS)
        assert run.server.pending_workers == [0, 1], "while nobody is here nobody waits in vain"
        run.join(0)
        barrier.give_up_lost(300.0)
        barrier.give_up_lost(299.0 + CEILING_SECONDS)
        assert run.server.pending_workers == [1]
        barrier.give_up_lost(301.0 + CEILING_SECONDS)
        assert run.server.started and run.server.num_live == 1
        assert said == ["worker 1 did not come back within 60 s: the run goes on without it"]
        run.join(1)
        assert run.server.num_live == 2
        run.push_at_random(3)
        again = run.replay()
        run.close()
        again.feed(read_arrivals(run.folder.arrivals_file, run.config)[0])
        assert again.mismatch is None and again.server.version == run.server.version


def test_a_new_run_waits_for_all_that_it_was_promised(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join(0)
    with barrier_of(run) as (barrier, said):
        for now in (1.0, 1000.0):
            barrier.give_up_lost(now)
    assert run.server.pending_workers == [1] and not said


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("127.0.0.1:1", "'paceline worker --run {run} --threads 1'"),
        ("10.0.0.1:9", "'PACELINE_TOKEN=... paceline worker --connect 10.0.0.1:9' (the token is in {run}/token)"),
    ],
)
def test_the_reminder_names_a_command_that_a_worker_can_join_with(
    record: Record, address: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.transports.auth.cores", lambda: 2)
    run = record(strategy="async", workers=2)
    with barrier_of(run, address) as (barrier, said):
        barrier.check(time.monotonic() + REMIND_SECONDS + 1.0)
    (line,) = said
    assert line.endswith(f"start the others with {command.format(run=run.folder.path)}")
