"""Workers on this machine that lie, each of which loses its place, and workers that the supervisor starts again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.run import make_join, sizes_of
from paceline.assembly.task import identity_of
from paceline.core.messages import Push
from paceline.core.worker import LocalWorker
from paceline.errors import UserError
from paceline.runs.events import read_events
from paceline.runs.folder import ALL_GONE
from paceline.runtimes.server.runtime import Peers, SupervisorChannel
from paceline.runtimes.server.service import Dispatcher, Service
from paceline.system.strict_json import to_json
from paceline.transports import shared_memory
from paceline.transports.protocol import Timing
from paceline.transports.shared_memory import SharedBuffers, SharedMemoryPeer, channel
from tests.support.recorded_runs import Record, RecordedRun

_SEQPACKET = socket.AF_UNIX, socket.SOCK_SEQPACKET


@dataclass
class Bench:
    """A service whose loop is turned by hand, and the ends of its workers."""

    run: RecordedRun
    peers: Peers[SharedMemoryPeer]
    service: Service
    ends: dict[int, socket.socket]
    supervisor: socket.socket

    def admit(self, worker: int, incarnation: int = 0) -> socket.socket:
        ours, theirs = channel()
        self.service.admit(SharedMemoryPeer(ours, worker, incarnation))
        self.ends[worker] = theirs
        return theirs

    def hang_up(self, worker: int) -> None:
        """Close a worker's connection, as its end would."""
        self.ends.pop(worker).close()
        self.turn()

    def order_gone(self, worker: int, incarnation: int) -> None:
        order = {"kind": "gone", "worker": worker, "incarnation": incarnation}
        self.supervisor.send(to_json(order).encode())
        self.turn()

    def greet(self, worker: int, incarnation: int = 0, **fields: Any) -> None:
        """Say a hello that is true except for these fields."""
        memory = SharedBuffers.create(self.service._sizes)
        join = make_join(self.run.config, self.run.work, worker, incarnation)
        words = {**join._asdict(), "sizes": memory.sizes, **identity_of(self.run.task), **fields}
        packet = bytes([shared_memory._HELLO]) + to_json(words).encode()
        socket.send_fds(self.ends[worker], [packet], [memory.segment.fd])
        memory.segment.close_descriptor()
        self.turn()

    def send(self, worker: int, packet: bytes) -> None:
        self.ends[worker].send(packet)
        self.turn()

    def turn(self) -> None:
        self.service._loop.poll(0.0)

    @property
    def expelled(self) -> list[str]:
        rows = read_events(self.run.folder.events_file)
        return [row["why"] for row in rows if row["kind"] == "expelled"]


@pytest.fixture
def bench(record: Record, request: pytest.FixtureRequest) -> Iterator[Bench]:
    peers: Peers[SharedMemoryPeer] = Peers()
    run = record(strategy="async", workers=2, runtime=peers, **getattr(request, "param", {}))
    line = socket.socketpair(*_SEQPACKET)
    before, wakeup = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    sizes = sizes_of(run.config, run.task, run.work)
    service = Service(run.host, peers, SupervisorChannel(line[0]), identity_of(run.task), sizes)
    found = Bench(run, peers, service, {}, line[1])
    with torch.inference_mode():
        yield found
    os.close(signal.set_wakeup_fd(wakeup))
    signal.signal(signal.SIGTERM, before)
    service._loop.close()
    service._wakeup.close()
    for end in (*line, *found.ends.values(), *(peer.connection for peer in peers.by_worker.values())):
        end.close()


def push(samples: int = 4, seq: int = 0, seconds: float = 0.1, weight: float = -1.0, optimizer: int = 0) -> bytes:
    return shared_memory._PUSH.pack(2, optimizer, seq, seq, samples, 512, 0.5, seconds, 0.1, 0.0, weight)


PACKETS = {
    "one sample more": push(5),
    "no samples": push(0),
    "2^32 - 1 samples": push(2**32 - 1),
    "seconds that are no number": push(seconds=math.nan),
    "negative seconds": push(seconds=-1.0),
    "an infinite weight": push(weight=math.inf),
    "a negative weight": push(weight=-2.0),
    "an optimizer that there is not": push(optimizer=1),
    "an answer to another reply": push(seq=9),
    "half a push": push()[:-1],
    "deep nesting": b"\4" + b"[" * 10_000,
    "a metric that is a list": b'\4{"accuracy": [1]}',
    "an unknown kind": bytes([99]),
}


@pytest.mark.parametrize("name", PACKETS)
def test_a_worker_that_lies_is_expelled_and_the_other_goes_on(bench: Bench, name: str) -> None:
    for worker in (0, 1):
        bench.admit(worker)
        bench.greet(worker)
    bench.send(0, PACKETS[name])
    assert len(bench.expelled) == 1 and bench.expelled[0].startswith("worker 0")
    assert sorted(bench.peers.by_worker) == [1] and bench.run.server.pushes == 0
    bench.send(1, push())
    assert bench.run.server.pushes == 1 and len(bench.expelled) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"threads": True},
        {"threads": 2**40},
        {"quota": "all"},
        {"quota": -1},
        {"quota": 3},
        {"own_loop": True},
        {"sizes": [128, 2, None, None, 0, 0]},
        {"sizes": [128, None, None, None, 0, 0]},
        {"sizes": [-128, 0, None, None, 0, 0]},
        {"sizes": [128, 0, None, None, 0]},
        {"sizes": [128, 0, None, None, 0, 9]},
        {"layout": 0},
    ],
    ids=str,
)
def test_a_hello_that_lies_is_refused(bench: Bench, fields: dict[str, Any]) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    bench.admit(0)
    bench.greet(0, **fields)
    assert len(bench.expelled) == 1 and not bench.run.server.members
    bench.ends.pop(0).close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    bench.admit(0)


def test_a_build_function_that_returns_other_data_ends_the_run(bench: Bench) -> None:
    """Every worker would be refused: the user has to seed it."""
    bench.admit(0)
    bench.run.host.config = dataclasses.replace(bench.run.host.config, task="task.py:build")
    with pytest.raises(
        UserError, match=r"^build\(\) returns other data in each process \(different targets\): give its"
    ):
        bench.greet(0, targets=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "async"},
        {"strategy": "sync", "batch_size": 5},
        {"strategy": "backup:1", "workers": 3},
        {"strategy": "local:3"},
        {"strategy": "async", "epoch_mode": "own", "epochs": 1.0},
        {"strategy": "async", "max_workers": 4, "split": "iid"},
    ],
    ids=str,
)
def test_the_server_knows_how_many_samples_it_asked_for(record: Record, settings: dict[str, Any]) -> None:
    """Every push of honest workers passes, whatever the strategy, short batches and departures included."""
    run = record(**{"workers": 2, **settings})
    with contextlib.ExitStack() as stack:
        line = [stack.enter_context(end) for end in socket.socketpair(*_SEQPACKET)]
        dispatcher = Dispatcher(run.host, SupervisorChannel(line[0]), {})
        seen = set[int]()

        def push_by(worker: int) -> None:
            instance: LocalWorker = run.instances[worker]
            found = instance.push()
            if found is not None:
                seen.add(found.samples)
                dispatcher.push(_Timed(), found)

        run.push = push_by  # type: ignore[method-assign]
        run.join_all()
        run.push_at_random(12)
        if settings.get("max_workers"):
            run.incarnations[2] = 0
            run.join(2)
            run.push_at_random(12)
            run.leave(0)
        run.push_at_random(10_000)
    assert run.server.finished and len(seen) > 1


class _Timed:
    timing = Timing(0.1, 0.1, 0.0)


def test_an_own_loop_is_bound_by_the_batch_that_it_declared(record: Record) -> None:
    run = record(strategy="async", workers=1)
    run.host.work = None
    run.join_all()
    with contextlib.ExitStack() as stack:
        line = [stack.enter_context(end) for end in socket.socketpair(*_SEQPACKET)]
        dispatcher = Dispatcher(run.host, SupervisorChannel(line[0]), {})
        dispatcher._loop_samples[0] = 4
        found = run.instances[0].push()
        assert isinstance(found, Push)
        for samples in (5, 2**32 - 1):
            with pytest.raises(Exception, match=f"counted {samples} samples in a batch of at most 4"):
                dispatcher.push(_Timed(), found._replace(samples=samples))
        dispatcher.push(_Timed(), found._replace(samples=3))
    assert run.server.pushes == 1


restarting = pytest.mark.parametrize("bench", [{"restart_workers": 1}], indirect=True)


@restarting
@pytest.mark.parametrize("order", ["connection first", "order first"])
def test_the_run_waits_for_a_lost_worker_until_it_is_gone_for_good(bench: Bench, order: str) -> None:
    for worker in (0, 1):
        bench.admit(worker)
        bench.greet(worker)
    bench.hang_up(0)
    bench.order_gone(0, 0)
    assert not bench.run.server.finished and not bench.service._returning
    if order == "order first":  # the supervisor knows of the end before the server has read it
        bench.order_gone(1, 0)
        assert not bench.run.server.finished
        bench.hang_up(1)
    else:
        bench.hang_up(1)
        assert not bench.run.server.finished, "the supervisor may start it again"
        bench.order_gone(1, 0)
    assert bench.run.server.finished and bench.run.host.stop_reason == ALL_GONE
    assert bench.run.host.lost == [0, 1], "each is counted once"


@restarting
@pytest.mark.parametrize("closes_first", [True, False])
def test_a_worker_that_is_started_again_goes_on_with_its_share(bench: Bench, closes_first: bool) -> None:
    for worker in (0, 1):
        bench.admit(worker)
        bench.greet(worker)
    bench.send(1, push())
    bench.hang_up(0)
    bench.order_gone(0, 0)
    earlier = bench.ends[1]
    if closes_first:
        bench.hang_up(1)
    bench.admit(1, 1)
    earlier.close()
    bench.greet(1, 1)
    member = bench.run.server.members[1]
    assert (member.live, member.incarnation, member.accepted) == (True, 1, 1)
    assert not bench.service._returning and not bench.run.server.finished
    bench.send(1, push())
    assert bench.run.server.pushes == 2
    bench.hang_up(1)
    bench.order_gone(1, 1)
    assert bench.run.server.finished


@restarting
def test_a_worker_that_is_expelled_or_dropped_is_not_waited_for(bench: Bench) -> None:
    for worker in (0, 1):
        bench.admit(worker)
        bench.greet(worker)
    bench.send(0, PACKETS["no samples"])
    bench.service._drop(1, "it hangs")
    assert bench.run.server.finished and not bench.service._returning


def test_without_restarts_a_lost_worker_is_gone_at_once(bench: Bench) -> None:
    bench.admit(0)
    bench.greet(0)
    bench.hang_up(0)
    assert bench.run.server.finished


def test_workers_that_have_not_joined_in_time_are_named_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.admit(0)
    bench.greet(0)
    notes: list[str] = []
    monkeypatch.setattr(bench.service._control, "note", notes.append)
    assert bench.service._began is not None
    bench.service._check()
    assert not notes
    bench.service._began -= 30.0
    for _ in range(2):
        bench.service._check()
    assert notes == ["worker 1 has not joined after 30 s"]
