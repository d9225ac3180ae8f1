"""The starting line of a run that goes on after a crash: who was lost before it is not waited for without end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from recorded_runs import Record, RecordedRun

from paceline.assembly.run import sizes_of
from paceline.assembly.task import identity_of
from paceline.runs.arrival_log import read_arrivals
from paceline.runtimes.server.remote_service import CEILING_SECONDS, ClusterService, OwnLine
from paceline.transports.listener import Listener


@contextlib.contextmanager
def service_of(run: RecordedRun) -> Iterator[tuple[ClusterService, list[str]]]:
    said: list[str] = []
    line, listener = OwnLine(lambda row: said.append(row["text"])), Listener("127.0.0.1:0", b"")
    expected, largest = identity_of(run.task), sizes_of(run.config, run.task, run.work)
    with contextlib.closing(listener), line.connection, line._other:
        yield ClusterService(run.host, line, expected, largest, listener), said


def test_after_a_crash_the_run_goes_on_without_who_does_not_come_back(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join_all()
    run.push_at_random(5)
    run.leave(1)
    run.push_at_random(2)
    run.resume()
    with service_of(run) as (service, said):
        service._begin_without_the_lost(100.0)
        service._begin_without_the_lost(100.0 + 2 * CEILING_SECONDS)
        assert run.server.awaited == [0, 1], "while nobody is here nobody waits in vain"
        run.join(0)
        service._begin_without_the_lost(300.0)
        service._begin_without_the_lost(299.0 + CEILING_SECONDS)
        assert run.server.awaited == [1]
        service._begin_without_the_lost(301.0 + CEILING_SECONDS)
        assert run.server.started and run.server.num_live == 1
        assert said == ["worker 1 did not come back within 60 s: the run goes on without it"]
        run.join(1)
        assert run.server.num_live == 2
        run.host.send = run.deliver
        run.push_at_random(3)
        again = run.replay()
        run.close()
        again.feed(read_arrivals(run.folder.arrivals_file, run.config)[0])
        assert again.mismatch is None and again.server.version == run.server.version


def test_a_new_run_waits_for_all_that_it_was_promised(record: Record) -> None:
    run = record(strategy="async", workers=2)
    run.join(0)
    with service_of(run) as (service, said):
        for now in (1.0, 1000.0):
            service._begin_without_the_lost(now)
    assert run.server.awaited == [1] and not said
