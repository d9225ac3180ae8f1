"""The machines of workers: told once each, and only where there are more threads than cores, or another time."""

from __future__ import annotations

import os
import socket
import time

import pytest

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.compression import DENSE
from paceline.core.messages import Join, Push
from paceline.errors import UnknownWorker
from paceline.runtimes.server.admission import WorkerHost, WorkerHosts, own_place
from paceline.transports.tcp_client import TcpClient
from tests.support.small_star import TIMING, TOKEN, Star

NOW = 1_800_000_000.0


def place(process: int, machine: str = "m", cores: int = 4, threads: int = 2, clock: float = NOW - 0.2) -> WorkerHost:
    return WorkerHost(machine, cores, process, threads, clock)


def test_a_machine_with_a_core_for_every_thread_is_not_spoken_of() -> None:
    machines = WorkerHosts()
    assert [machines.come(number, place(number + 1), NOW) for number in range(2)] == [[], []]
    assert machines.come(2, place(3, machine="another"), NOW) == []


def test_too_many_threads_are_told_once_a_machine() -> None:
    machines = WorkerHosts()
    lines = [machines.come(number, place(number + 1), NOW) for number in range(4)]
    assert lines[:2] == [[], []] and lines[3] == []
    told = "workers 0, 1 and 2 share the 4 cores of a machine with 6 threads, and wait for each other"
    assert lines[2] == [f"{told}: give each --threads 1"]
    assert machines.come(4, place(5, machine="another", threads=5), NOW) == []  # alone there: its own wish
    (line,) = machines.come(5, place(6, machine="another", threads=1), NOW)
    assert "workers 4 and 5" in line


def test_who_left_takes_no_core() -> None:
    machines = WorkerHosts()
    assert machines.come(0, place(1, threads=4), NOW) == []
    machines.leave(0)
    assert machines.come(1, place(2, threads=4), NOW) == []


def test_workers_that_take_turns_in_one_process_share_its_threads() -> None:
    machines = WorkerHosts()
    assert [machines.come(number, place(7, threads=4), NOW) for number in range(3)] == [[]] * 3


@pytest.mark.parametrize(("off", "words"), [(-3600.0, "1 h behind ours"), (61.0, "1 min 1 s ahead of ours")])
def test_a_clock_that_is_off_is_told_once_a_machine(off: float, words: str) -> None:
    machines = WorkerHosts()
    (line,) = machines.come(3, place(1, clock=NOW + off), NOW)
    assert line.startswith(f"the clock of worker 3's machine is {words}: ")
    assert machines.come(4, place(2, clock=NOW + off), NOW) == []


def test_a_process_tells_of_itself() -> None:
    before, told, after = time.time(), own_place(3), time.time()
    assert (told["process"], told["threads"]) == (os.getpid(), 3)
    assert told["machine"] == own_place(3)["machine"] != ""
    assert before <= told["clock"] <= after


@pytest.mark.parametrize(("told", "warns"), [(0.0, False), (299.0, False), (-61.0, True), (361.0, True)])
def test_a_server_that_was_stopped_while_the_request_came_suspects_no_clock(told: float, warns: bool) -> None:
    """The connection was accepted, the server stopped for 300 s, and the worker's request lay there meanwhile."""
    lines = WorkerHosts().come(0, place(1, clock=NOW + told), NOW + 300.0, since=NOW)
    assert bool(lines) is warns


def test_a_worker_that_comes_again_tells_the_time_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection broke after an hour, and the server has forgotten it."""
    now = [NOW]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with Star(DENSE, 4) as star:
        door = TcpClient(star.listener.address, TOKEN)
        door.apply({}, fresh=lambda: {"place": own_place(1)})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
        now[0] += 3600.0
        star.doors[0].connection.sock.shutdown(socket.SHUT_RDWR)
        star.forget()
        with pytest.raises(UnknownWorker):
            door.exchange(Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state), TIMING)
        door.close()
    for when, fields in zip([NOW, NOW + 3600.0], star.applied, strict=True):
        assert WorkerHosts().come(0, WorkerHost(**fields["place"]), when) == []
