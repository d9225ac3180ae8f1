"""A log's tail computed again by workers that are back: the bits of the server alone, whoever comes or goes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from recorded_runs import Record, RecordedRun, assert_same, ignore, small_task

from paceline.assembly import run as crew
from paceline.assembly.run import begin_anew, identity_of, make_join, make_seat, sizes_of
from paceline.core.messages import Push, Reply
from paceline.core.server import Server
from paceline.core.worker import Seat
from paceline.runs.recovery import Rebuilt, rebuild
from paceline.runtimes.server.recomputing import ClusterCompany, Company, LocalCompany
from paceline.runtimes.server.service import Control
from paceline.system.environment import machine_kind, package_version
from paceline.transports.listener import Listener
from paceline.transports.shared_memory import Hello, Slot, Timing, WorkerDoor, channel
from paceline.transports.tcp_client import TcpWorkerDoor

pytestmark = pytest.mark.long

SETTINGS: dict[str, dict[str, Any]] = {
    "async": {"strategy": "async", "rule": "foresight", "average": "on"},
    "sync": {"strategy": "sync", "rule": "plain", "codec": "topk:0.2"},
    "codecs": {"strategy": "async", "rule": "plain", "codec": "int8", "pull_codec": "int8"},
    "local steps": {"strategy": "async-local:2", "codec": "int8"},
    "elastic": {"strategy": "async", "rule": "plain", "max_workers": 4},
}
NO_TIME = Timing(0.0, 0.0, 0.0)


class StandIns:
    """Workers on threads of this process, which come when the company begins and are waited for at the end."""

    def __init__(self, run: RecordedRun, transport: str, threads: int = 1, lost_after: dict[int, int] | None = None):
        self._run, self._transport, self._count = run, transport, threads
        self._lost_after = lost_after or {}
        self._threads: list[threading.Thread] = []
        self.notes: list[str] = []
        self._line, far = channel()
        self._listener = Listener("127.0.0.1:0", b"")
        self.company: Company
        if transport == "tcp":
            self.company = ClusterCompany(self._listener, lambda row: self.notes.append(row["text"]))
        else:
            self.company = LocalCompany(Control(far))
        self._far = far

    def come(self, numbers: list[int], incarnation: int) -> None:
        for number in numbers:
            here, there = channel()
            if self._transport == "shared":
                order = {"kind": "worker", "worker": number, "incarnation": incarnation}
                socket.send_fds(self._line, [json.dumps(order).encode()], [here.fileno()])
            here.close()
            thread = threading.Thread(target=self._work, args=(number, incarnation, there))
            self._threads.append(thread)
            thread.start()

    def _work(self, number: int, incarnation: int, connection: socket.socket) -> None:
        run, door = self._run, WorkerDoor(connection, places=8)
        if self._transport == "tcp":
            connection.close()
            door = TcpWorkerDoor(self._listener.address, b"", patience=0.1)  # type: ignore[assignment]
            words = {"worker": number, "version": package_version("paceline"), "kind": f"{machine_kind()}, cpu"}
            incarnation = door.apply(words)["incarnation"]  # type: ignore[attr-defined]
        task = small_task()
        join = make_join(run.config, run.work, number, incarnation)._replace(threads=self._count)
        seat = make_seat(run.config, task, run.work, join, Slot.create)
        with contextlib.closing(door):
            reply = door.hello(join, seat.memory, identity_of(task))  # type: ignore[arg-type]
            made = 0
            while reply is not None and not reply.over and made != self._lost_after.get(number):
                if reply.anew:
                    seat = begin_anew(run.config, None, run.work, seat, reply)
                seat.pending = reply
                push = seat.push()
                assert push is not None
                made += 1
                reply = door.exchange(push, NO_TIME)

    def end(self) -> None:
        """Hang up on those who are left."""
        for stand_in in self.company._stand_ins.values():
            stand_in.door.close()
        self._listener.close()
        self._line.close()
        self._far.close()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()

    @property
    def told(self) -> str:
        """What the user was told."""
        if self._transport == "tcp":
            return "\n".join(self.notes)
        with contextlib.suppress(BlockingIOError):
            while packet := self._line.recv(1 << 16, socket.MSG_DONTWAIT):
                self.notes.append(json.loads(packet)["text"])
        return "\n".join(self.notes)


@pytest.fixture(autouse=True)
def the_small_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.assembly.run.make_task", lambda config, dataset: small_task())
    monkeypatch.setattr(
        "paceline.assembly.run._codec", crew._codec.__wrapped__
    )  # threads must not share a codec's scratch


def recorded(record: Record, **settings: Any) -> RecordedRun:
    """A run with a cut, behind which a worker goes and comes back, as it is when its server is killed."""
    run = record(seed=5, workers=3, epochs=9.0, **settings)
    run.join_all()
    run.push_at_random(9)
    run.cut()
    run.push_at_random(7)
    run.leave(1)
    run.push_at_random(4)
    run.join(1)
    run.push_at_random(9)
    while not run.server.can_be_cut:
        run.push_at_random(1)
    run.close()
    return run


@contextlib.contextmanager
def recovered(run: RecordedRun, stand_ins: StandIns, numbers: list[int]) -> Iterator[tuple[Server, Rebuilt]]:
    """Rebuild in company; all of it is here before the first record is fed."""
    company, server = stand_ins.company, run.new_server()
    begin = company.begin

    def wait_for_all(server: Server, records: Any, incarnation: int, threads: int) -> None:
        begin(server, records, incarnation, threads)
        stand_ins.come(numbers, incarnation)
        while sum(one.hello is not None for one in company._stand_ins.values()) < len(numbers):
            company.look(0.1)

    company.begin = wait_for_all  # type: ignore[method-assign]
    company.meet({}, identity_of(run.task), sizes_of(run.config, run.task, run.work))
    try:
        yield server, rebuild(server, run.make_seat, run.task, run.config, run.folder, ignore, company)
    finally:
        stand_ins.end()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("name", SETTINGS)
def test_workers_compute_all_of_the_tail_with_the_bits_of_the_run(record: Record, name: str, transport: str) -> None:
    run = recorded(record, **SETTINGS[name])
    with recovered(run, StandIns(run, transport), [0, 1, 2]) as (server, rebuilt):
        assert_same(server, run.server)
        assert rebuilt.by_workers == rebuilt.pushes > 15


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("name", ["sync", "codecs", "local steps"])
def test_a_lost_stand_in_is_replaced_from_where_it_was(record: Record, name: str, transport: str) -> None:
    run = recorded(record, **SETTINGS[name])
    stand_ins = StandIns(run, transport, lost_after={0: 3, 2: 0})
    with recovered(run, stand_ins, [0, 2]) as (server, rebuilt):
        assert_same(server, run.server)
        assert rebuilt.by_workers in (2, 3)  # the last one may be lost with its connection
        assert "worker 0 was lost while the log is computed again: its pushes are computed here" in stand_ins.told


def test_a_worker_on_other_threads_has_nothing_to_do(record: Record) -> None:
    run = recorded(record, **SETTINGS["async"])
    stand_ins = StandIns(run, "shared", threads=3)
    with recovered(run, stand_ins, [0, 1, 2]) as (server, rebuilt):
        assert_same(server, run.server)
        assert rebuilt.by_workers == 0
        assert "worker 0 computes on 3 threads, in the log on 1: its pushes are computed here" in stand_ins.told


class Service:
    """What takes the workers over: keeps them, and answers each as one that has just joined."""

    def __init__(self) -> None:
        self.doors: dict[int, Any] = {}
        self.applicants: list[Any] = []

    def adopt(self, door: Any, hello: Hello | None) -> None:
        assert hello is not None
        self.doors[door.worker] = door

    def look_at(self, applicants: list[Any]) -> None:
        self.applicants = applicants

    def obey(self, order: dict[str, Any], fds: list[int]) -> None:
        raise AssertionError(order)

    def next_push(self, worker: int, run: RecordedRun, steps: int) -> Push:
        """The first push of a new incarnation on the run's first weights."""
        door = self.doors[worker]
        door.slot.weights.copy_(run.task.initial())
        door.answer(Reply(worker, door.incarnation, 0, 0, 0, steps=steps, lr=0.1))
        if hasattr(door, "flush"):
            door.connection.sock.setblocking(True)
            door.flush()
        while not isinstance(message := door.receive(), Push):
            assert message is not None
        return message


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("name", ["codecs", "local steps"])
def test_who_stood_in_begins_anew_in_the_run_that_goes_on(record: Record, name: str, transport: str) -> None:
    run = recorded(record, **SETTINGS[name])
    stand_ins, service = StandIns(run, transport), Service()
    with recovered(run, stand_ins, [0, 1, 2]) as (_, rebuilt):
        stand_ins.company.hand_over(service)  # type: ignore[attr-defined]
        assert sorted(service.doors) == [0, 1, 2] and service.applicants == []
        incarnations = [door.incarnation for door in service.doors.values()]
        assert min(incarnations) == 2 and rebuilt.incarnation > max(incarnations) * (transport == "tcp")
        steps = 2 if name == "local steps" else 0
        found = service.next_push(1, run, steps)
        fresh: Seat = run.make_seat(make_join(run.config, run.work, 1, 2))
        fresh.memory.weights.copy_(run.task.initial())
        fresh.pending = Reply(1, 2, 0, 0, 0, steps=steps, lr=0.1)
        expected = fresh.push()
        assert expected is not None
        assert (found.seq, found.loss, found.samples) == (0, expected.loss, expected.samples)
        assert found.update.tolist() == expected.update.tolist()
        assert found.state.tolist() == expected.state.tolist()
