"""The processes of a ring on one machine. Worker 0 also keeps the run folder and talks to the supervisor."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.assembly.cpu_sharing import polls_before_sleep
from paceline.assembly.preflight import announce_batches
from paceline.assembly.task import build_of, make_task, why_builds_differ
from paceline.config import from_dict
from paceline.core.driver import BareDriver
from paceline.core.server import Server
from paceline.data.datasets import Dataset
from paceline.data.shared import attach
from paceline.errors import ProtocolError, UserError, mismatched_keys
from paceline.runs.checkpoint import newest_checkpoint, restore
from paceline.runs.folder import RunFolder
from paceline.runtimes.ring.replica import Replica, RingWorker
from paceline.runtimes.ring.shared_memory import RingMemory, SharedRing
from paceline.runtimes.server.process import reporting, start_host
from paceline.runtimes.server.runtime import LocalRuntime, SupervisorChannel
from paceline.system.memory import keep_freed_memory, receive_fds
from paceline.system.shared_segment import Segment
from paceline.system.strict_json import to_json
from paceline.tasks.given_weights import read_given

_LARGEST = 1 << 16


class RingRendezvous:
    """The rendezvous at worker 0: wait for all workers, pass them the ring's memory, and notice lost ones."""

    def __init__(self, place: RingWorker, control: SupervisorChannel) -> None:
        self.place, self.control = place, control
        self._build = build_of(place.task)
        self.connections: dict[int, socket.socket] = {}
        self.missing: list[int] = []
        self.stop_reason: str | None = None
        self.memory = RingMemory.create(place.num_workers, place.task.layout.size, place.task.state_size)
        self.bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(place.num_workers)]
        self.ring = SharedRing(self.memory, 0, self.bells, polls_before_sleep(place.config))
        self.ring.listen(control.connection, self._order)
        self.note_fault: Callable[[dict[str, Any]], None] = lambda fault: None  # no fault comes before training
        self._hellos: set[int] = set()

    def wait(self) -> None:
        """Wait until every worker has come or is known to be missing."""
        while len(self._hellos) + len(self.missing) < self.place.num_workers - 1 and self.stop_reason is None:
            self.ring.hear(None)

    def welcome(self, resumed: bool) -> None:
        """Send the ring's memory to all workers that came."""
        facts = to_json({"missing": self.missing, "resumed": resumed}).encode()
        for worker in sorted(self._hellos):
            socket.send_fds(self.connections[worker], [facts], [self.memory.segment.fd, *self.bells])

    def _order(self) -> None:
        order, fds = self.control.receive()
        if order["kind"] == "worker":
            connection = self.connections[order["worker"]] = socket.socket(fileno=fds[0])
            self.ring.listen(connection, lambda: self._hear(order["worker"]))
        elif order["kind"] == "stop":
            self.stop_reason = order["reason"]
        elif order["kind"] == "fault":
            self.note_fault(order["fault"])

    def _hear(self, worker: int) -> None:
        connection = self.connections[worker]
        try:
            packet = connection.recv(_LARGEST)
        except ConnectionResetError:
            packet = b""
        if packet:
            ours, theirs = self._build, json.loads(packet)
            if wrong := mismatched_keys(ours, theirs):
                differs = f"worker {worker} differs from worker 0 in {' and '.join(wrong)}: give all the same data"
                raise UserError(why_builds_differ(self.place.config, ours, theirs) or differs)
            self._hellos.add(worker)
            return
        self.ring.forget(connection)
        connection.close()
        if worker in self._hellos:
            self.ring.lose(worker)
        else:
            self.missing.append(worker)


def host(spec: dict[str, Any], fds: list[int]) -> int:
    """Run worker 0: wait for the others, train with them and keep the run folder."""

    def serve(control: SupervisorChannel) -> None:
        dataset = _dataset(spec, fds)
        place = _place(spec, dataset, 0)
        announce_batches(place.config, place.task.given.batch_size, place.task.given.shuffles, control.send)
        gathering = RingRendezvous(place, control)
        control.send({"kind": "serving"})
        instance, folder = place.instance(gathering.ring), RunFolder(Path(spec["folder"]))
        to_folder = folder, control.send, LocalRuntime(place.put, way="waiting")
        pieces = place.server, place.task, place.work, place.config, *to_folder
        hosting = start_host(pieces, dataset, spec["facts"], spec["resume"])
        if spec["resume"]:
            hosting.checkpoint_now()  # the other workers start from it
        gathering.note_fault = hosting.note_fault
        replica = Replica(place, hosting, instance, gathering.ring, hosting.timings)
        gathering.wait()
        gathering.welcome(spec["resume"])
        replica.start(gathering.missing)
        control.send({"kind": "clock", "now": hosting.clock.now(), "runs": True})

        def stopping() -> bool:
            gathering.ring.hear()
            if gathering.stop_reason is not None:
                hosting.stop(gathering.stop_reason)
            hosting.check_time_limit()
            return hosting.server.finished

        replica.run(stopping)
        gathering.ring.stop()
        control.send({"kind": "clock", "now": hosting.clock.now(), "runs": False})
        hosting.finish()
        hosting.close()

    return reporting(serve, fds[0], spec["folder"])


def _dataset(spec: dict[str, Any], fds: list[int]) -> Dataset | None:
    """Attach the shared data. Callable once, because it closes the descriptors."""
    return attach(spec["dataset"], fds[1:]) if spec["dataset"] is not None else None


def _place(spec: dict[str, Any], dataset: Dataset | None, worker: int) -> RingWorker:
    keep_freed_memory()
    config = from_dict(spec["config"])
    torch.set_num_threads(config.threads or 1)
    given = read_given(config, RunFolder(Path(spec["folder"])).initial_file)
    return RingWorker(config, make_task(config, dataset, given), worker, spec["incarnation"])


def worker(spec: dict[str, Any], fds: list[int]) -> int:
    """Run any other worker until training is over or worker 0 is gone."""
    place = _place(spec, _dataset(spec, fds), spec["worker"])
    connection = socket.socket(fileno=fds[0])
    connection.send(to_json(build_of(place.task)).encode())
    packet, passed = receive_fds(connection, _LARGEST, place.num_workers + 1)
    if not packet:
        return 0  # worker 0 is gone, which the supervisor reports
    welcome = json.loads(packet)
    size, state_size = place.task.layout.size, place.task.state_size
    segment = Segment.attach(passed[0], RingMemory.nbytes(place.num_workers, size, state_size))
    memory = RingMemory(segment, place.num_workers, size, state_size)
    ring = SharedRing(memory, spec["worker"], passed[1:], polls_before_sleep(place.config))
    ring.listen(connection, lambda: os._exit(0))
    if welcome["resumed"]:
        _catch_up(place.server, RunFolder(Path(spec["folder"])))
    replica = Replica(place, BareDriver(place.server, place.put), place.instance(ring), ring, None)
    replica.start(welcome["missing"])
    replica.run()
    return 0


def _catch_up(server: Server, folder: RunFolder) -> None:
    """Load the checkpoint that worker 0 has just written."""
    checkpoint, _ = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise ProtocolError(f"{folder.checkpoints} holds no checkpoint, though worker 0 has just written one")
    restore(server, checkpoint)
