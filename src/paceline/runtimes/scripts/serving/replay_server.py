"""The server of a script's replay: it applies pushes in the order of the log, and sends the outcome to its parent."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.assembly.own_loop import optimizer_state
from paceline.core.buffers import WorkerBuffers
from paceline.core.messages import Join, OwnLoopInput, Push, ReadOptimizer, ReadWeights, Reply
from paceline.errors import ProtocolError, RunFailed
from paceline.runs.arrival_log import Record
from paceline.runs.compare_replay import checkpoints_by_record, compare
from paceline.runs.recording import open_recording
from paceline.runs.replay import Replay
from paceline.runtimes.scripts.serving.requests import FinalStatistics
from paceline.runtimes.scripts.serving.server import learn
from paceline.runtimes.server.process import reporting
from paceline.runtimes.server.runtime import SupervisorChannel
from paceline.system.terminal import seconds_text
from paceline.transports.protocol import Hello, ReportedFigures
from paceline.transports.shared_memory import SharedMemoryPeer

SILENCE_SECONDS = 60.0  # how long a worker may be silent when its push is due; longer if the run itself was slower
START_SECONDS = 600.0  # how long a script may take until it calls session.prepare(...)


class ScriptWorker:
    """A worker whose pushes a script makes in another process."""

    def __init__(self, join: Join, peer: SharedMemoryPeer, patience: float) -> None:
        assert peer.slot is not None
        self.join, self.peer = join, peer
        self.memory: WorkerBuffers = peer.slot
        self.pending: Reply | None = None
        self._patience = patience

    def load_state(self, local_state: Tensor) -> None:
        """Never called: a script's replay begins with the run, not at a checkpoint."""
        raise AssertionError("a script keeps its own state to itself")

    def push(self) -> Push | None:
        """Receive the script's next push, or None if it has ended."""
        self.pending = None
        message = receive(self.peer, self._patience, "a push")
        return message if isinstance(message, Push) else None


def receive(peer: SharedMemoryPeer, patience: float, what: str) -> Hello | Push | OwnLoopInput | None:
    """Receive a worker's next message, or None if it is gone; skip logged metrics."""
    peer.connection.settimeout(patience)
    try:
        while isinstance(message := peer.receive(), ReportedFigures):
            pass
    except TimeoutError:
        silence = f"worker {peer.worker} was silent for {seconds_text(patience)}, but the log has {what} of it"
        raise RunFailed(f"{silence}: the script waits for something, or does other work than in the run") from None
    except ProtocolError as error:
        raise RunFailed(f"{error}: the script does other work than in the run") from None
    return message


class ScriptWorkers:
    """The scripts of a replay, by worker. The first of each worker start at once, later incarnations as they join."""

    def __init__(self, control: SupervisorChannel, records: list[Record]) -> None:
        self._control, self._patience = control, patience(records)
        self._peers: dict[int, SharedMemoryPeer] = {}
        self._hellos: dict[int, Hello] = {}
        self._num_statistics = sum(record.kind == "statistics" for record in records)
        first: dict[int, int] = {}
        for record in records:
            if record.kind == "join":
                first.setdefault(record.worker, record.incarnation)
        self._start(first)

    def _start(self, incarnations: dict[int, int]) -> None:
        """Start the scripts of these workers, in these incarnations."""
        for worker, incarnation in incarnations.items():
            self._control.send({"kind": "start", "worker": worker, "incarnation": incarnation})
        for _ in incarnations:
            order, fds = self._control.receive()
            peer = SharedMemoryPeer(socket.socket(fileno=fds[0]), order["worker"], order["incarnation"])
            self._peers[peer.worker] = peer

    def hello(self, join: Join) -> Hello:
        """The hello of a worker that joins. It is received once."""
        worker = join.worker
        if worker not in self._peers or self._peers[worker].incarnation != join.incarnation:
            self.hang_up(worker)
            self._start({worker: join.incarnation})
        if worker not in self._hellos:
            message = receive(self._peers[worker], START_SECONDS, "the hello")
            if not isinstance(message, Hello):
                raise RunFailed(f"worker {worker} ended before session.prepare(...): in the run it went on")
            self._hellos[worker] = message
        return self._hellos[worker]

    def instance(self, join: Join) -> ScriptWorker:
        """The worker that joins as it did in the run."""
        hello = self.hello(join)
        if hello.join.quota != join.quota:
            what = f"worker {join.worker} has work for {hello.join.quota} pushes, in the run for {join.quota}"
            raise RunFailed(f"{what}: the script brings other data")
        if hello.join.threads != join.threads:
            text = f"worker {join.worker} uses {hello.join.threads} threads, in the run {join.threads}"
            self._control.send({"kind": "note", "text": text})
        return ScriptWorker(join, self._peers[join.worker], self._patience)

    def answer(self, reply: Reply) -> None:
        """Send a reply whose weights lie in the worker's memory."""
        self._peers[reply.worker].answer(reply)

    def own_loop_input(self, record: Record, statistics: FinalStatistics) -> None:
        """Answer a script that reads weights, or take the statistics it sends, at the same place as in the run."""
        peer, message = self._peers.get(record.worker), None
        if peer is not None:
            message = receive(peer, self._patience, f"a message ({record.kind})")
        if peer is None or message != record.message:
            what = f"worker {record.worker} does not evaluate its weights as in the run"
            raise RunFailed(f"{what} (the log has {record.message}): the script does other work than in the run")
        if isinstance(message, ReadWeights):
            statistics.read(peer)
            return
        if isinstance(message, ReadOptimizer):
            peer.send_optimizer(optimizer_state(statistics.server, message.optimizer))
            return
        statistics.add(peer, record.samples)
        self._num_statistics -= 1
        if not self._num_statistics:
            statistics.answer(self._peers.values())

    def hang_up(self, worker: int) -> None:
        """Disconnect a worker that the run lost, or that left."""
        self._hellos.pop(worker, None)
        if (peer := self._peers.pop(worker, None)) is not None:
            peer.connection.close()

    def hang_up_all(self) -> None:
        """Disconnect every worker: the run was stopped or killed here, and resumed with new processes."""
        for worker in tuple(self._peers):
            self.hang_up(worker)


def last_leaves(records: Sequence[Record]) -> set[int]:
    """Numbers of the leave records after which a script has nothing to say any more: its process is hung up there.

    A script that leaves early still reads the final weights, so the leave record before that is not its last.
    """
    following: dict[int, str] = {}
    found: set[int] = set()
    for number in reversed(range(len(records))):
        kind, worker = records[number].kind, records[number].worker
        if kind == "leave" and following.get(worker, "join") in ("join", "leave"):
            found.add(number)
        if kind in ("join", "leave", "push", "rate", "read", "statistics"):
            following[worker] = kind
    return found


def patience(records: Iterable[Record]) -> float:
    """Seconds to wait for a push: five times the slowest step of the run."""
    last: dict[int, float] = {}
    longest = 0.0
    for record in records:
        longest = max(longest, record.now - last.get(record.worker, record.now))
        last[record.worker] = record.now
    return max(SILENCE_SECONDS, 5.0 * longest)


def main(spec: dict[str, Any], fds: list[int]) -> int:
    """Replay one run of a script."""

    def serve(control: SupervisorChannel) -> None:
        output = Path(spec["output"]) if spec["output"] is not None else None
        recording = open_recording(Path(spec["folder"]), spec["until"], output)
        records = recording.log.effective_records
        before_push = itertools.takewhile(lambda record: record.kind != "push", records)
        joins: dict[int, Join] = {}
        for record in before_push:
            if isinstance(record.message, Join):
                joins.setdefault(record.worker, record.message)
        scripts = ScriptWorkers(control, records)
        if not joins:
            raise RunFailed("no worker joined in this run: there is nothing to replay")
        _, model, server = learn(recording.config, [*map(scripts.hello, joins.values())], recording.folder)
        again = Replay(server, scripts.instance, send=scripts.answer, compare_with=checkpoints_by_record(recording))
        statistics = FinalStatistics(server, model)
        last = last_leaves(records)

        def passed(record: Record) -> None:
            if record.kind in ("read", "optimizer", "statistics"):
                scripts.own_loop_input(record, statistics)
            elif record.kind == "resume":
                scripts.hang_up_all()
                statistics.clear()
            elif again.fed - 1 in last:
                scripts.hang_up(record.worker)

        with torch.inference_mode():
            outcome = compare(again, recording, model, control.send, passed)
        control.send({"kind": "replayed", "outcome": outcome})

    return reporting(serve, fds[0], spec["folder"])
