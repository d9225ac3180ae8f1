"""A server with doors in a thread, workers that do sums, and a wire that can be cut: what the tests of TCP share."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.compression import DENSE, Codecs, WorkerCompression
from paceline.core.messages import Disposition, Join, Push, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Exchange, Roster, Server
from paceline.core.worker import LocalWorker
from paceline.errors import ProtocolError
from paceline.interfaces import Batch, Decision, State, pack
from paceline.settings.codecs import build_codec
from paceline.transports.listener import JoinRequest, Listener
from paceline.transports.protocol import Hello, ReportedFigures, Timing, Transport
from paceline.transports.shared_memory import SharedMemoryPeer
from paceline.transports.tcp_server import TcpPeer
from paceline.transports.tls import Tls

LAYOUT = pack([("matrix", (12, 9), True), ("bias", (7,), True)])
TOKEN = b"a token"
TIMING = Timing(1.0, 2.0, 3.0)


class Slopes:
    """A task whose gradients are a function of the weights and the batch; its state counts, its own state sums."""

    layout, state_size = LAYOUT, 3

    def __init__(self) -> None:
        self.local_state: State = {"sum": torch.zeros(5)}

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient, self._state = weights, gradient, state

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 2, number, None if number % 2 else number + 0.75)

    def gradient(self, batch: Batch) -> float:
        generator = torch.Generator().manual_seed(batch.key)
        for name, part in LAYOUT.views(self._gradient).items():
            part.copy_(torch.randn(part.shape, generator=generator)).add_(LAYOUT.views(self._weights)[name])
        self._state.add_(1.0)
        self.local_state["sum"].add_(self._gradient[:5])
        return float(self._gradient[0])


def codecs(push: str | None, pull: str | None) -> Codecs:
    """By name; None: as they are."""
    built = [build_codec(name, LAYOUT) if name is not None else None for name in (push, pull)]
    return Codecs(built[0], built[1])


class DropsSome(Async):
    """Drops the second and the third of every four pushes."""

    def __init__(self) -> None:
        self._count = 0

    def push(self, worker: int, staleness: int) -> Decision:
        self._count += 1
        if self._count % 4 in (2, 3):
            return Decision(release=(worker,), dropped=True)
        return super().push(worker, staleness)


def make_server(used: Codecs, updates: int, workers: int = 1, drops: bool = False) -> Server:
    """One that ends after so many updates."""
    training, policy = Training(Budget(2 * updates, 2 * updates), Schedule(0.1)), DropsSome() if drops else Async()
    weights = torch.ones(LAYOUT.size)
    return Server(weights, Plain(Sgd(0.5)), policy, training, Roster(workers), Exchange(used))


class Star:
    """The server's side, in a thread of its own; leave the block, and it is gone."""

    def __init__(
        self, used: Codecs = DENSE, updates: int = 4, tls: Tls | None = None, listener: Listener | None = None
    ) -> None:
        self.server = make_server(used, updates)
        self.listener = listener or Listener("127.0.0.1:0", TOKEN, tls)
        self.doors: dict[int, TcpPeer] = {}
        self.verdicts: list[Disposition] = []
        self.figures: list[ReportedFigures] = []
        self.errors: list[str] = []
        self.applied: list[dict[str, Any]] = []
        self.want_own = False
        self.kept: dict[int, Tensor] = {}
        self.weights: list[float | None] = []  # of the pushes that came
        self.largest = BufferSizes(LAYOUT.size, 3, *used.capacities, 10_000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Star:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)
        self.listener.close()
        self.forget()

    def _serve(self) -> None:
        while not self._stop.is_set():
            poll = select.poll()
            poll.register(self.listener.fileno(), select.POLLIN)
            by_number = {door.fileno(): door for door in self.doors.values() if door.fileno() >= 0}
            for number, door in by_number.items():
                poll.register(number, select.POLLIN | (select.POLLOUT if door.wants_write else 0))
            for number, happened in poll.poll(20):
                if number == self.listener.fileno():
                    for applicant in self.listener.serve():
                        self._admit(applicant)
                elif by_number[number].fileno() == number:
                    if happened & select.POLLOUT:
                        by_number[number].flush()
                    if happened & ~select.POLLOUT:
                        self._take(by_number[number])
            self.errors += self.listener.complaints()

    def _admit(self, applicant: JoinRequest) -> None:
        fields = applicant.fields
        self.applied.append(fields)
        if fields["device"] != "cpu":
            applicant.refuse(f"nobody wants {fields['device']}")
        elif fields.get("again") and fields["worker"] in self.doors:
            applicant.welcome_back(self.doors[fields["worker"]], {})
        else:
            self.forget()
            self.doors[0] = applicant.welcome({"worker": 0, "incarnation": 0}, self.largest)

    def forget(self) -> None:
        """As a server that was started anew."""
        for door in self.doors.values():
            door.connection.close()
        self.doors.clear()

    def _take(self, door: TcpPeer) -> None:
        try:
            message = door.receive()
        except ProtocolError as error:
            self.errors.append(str(error))
            door.dismiss(str(error))
            message = None
        if message is None:
            door.connection.close()
        elif isinstance(message, Hello):
            self.handle(message.join, door)
        elif isinstance(message, Push):
            self.weights.append(message.weight)
            self.handle(message, door)
            if door.state_seq == message.seq:
                assert door.slot is not None
                self.kept[message.seq] = door.slot.saved_state(self.server.members[0].saved).clone()
        elif isinstance(message, ReportedFigures):
            self.figures.append(message)

    def handle(self, message: Join | Push, door: TcpPeer) -> None:
        door.wants_state = self.want_own
        answer(self.server, message, door, self.verdicts)


def answer(
    server: Server, message: Join | Push, peer: TcpPeer | SharedMemoryPeer, verdicts: list[Disposition] | None = None
) -> None:
    """What a host does with one message."""
    outcome = server.handle(message)
    if verdicts is not None:
        verdicts.append(outcome.disposition)
    for reply in outcome.replies:
        assert peer.slot is not None
        if outcome.disposition != Disposition.REPEATED:
            server.send_weights(reply, peer.slot)
        peer.answer(reply)


class Told:
    """What a worker was told, and what its memory held then: to be compared."""

    def __init__(self) -> None:
        self.rows: list[tuple[Reply, Tensor, int, Tensor]] = []
        self.local_state: list[Tensor] = []

    def note(self, reply: Reply, memory: WorkerBuffers) -> None:
        count = memory.num_pulled
        self.rows.append((reply, memory.weights.clone(), count, memory.pulled[:count].clone()))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Told)
        return len(self.rows) == len(other.rows) and all(
            a[0] == b[0] and torch.equal(a[1], b[1]) and a[2] == b[2] and torch.equal(a[3], b[3])
            for a, b in zip(self.rows, other.rows, strict=True)
        )


def work(transport: Transport, used: Codecs, make_memory: Callable[[BufferSizes], Any] | None = None) -> Told:
    """A worker's loop, as in its process."""
    task, told = Slopes(), Told()
    instance = LocalWorker(task, task, Join(0, 0), codecs=used, make_memory=make_memory)
    memory: Any = instance.memory
    reply = transport.hello(instance.join, memory, {"model": "slopes"})
    while reply is not None:
        told.note(reply, memory)
        if reply.finished:
            break
        instance.pending = reply
        push = instance.push()
        assert push is not None
        reply = transport.exchange(push, TIMING)
        told.local_state.append(memory.saved_state(push.seq - (reply.discarded if reply is not None else 0)).clone())
    return told


def own_size(used: Codecs) -> int:
    """Bytes of a worker's own state."""
    return WorkerCompression(used, 0, Slopes()).sizes.local_state


class Wire:
    """Between a worker and its server: connection number n breaks after `cuts[n]` bytes up (to the server) or down."""

    def __init__(self, server: str, cuts: list[tuple[str, int]]) -> None:
        self._server = (server.split(":")[0], int(server.split(":")[1]))
        self._cuts = cuts
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.num_connections = 0
        self.recorded: list[bytes] = []
        """What each worker sent, as a thief would have it."""
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._socket.accept()
                server = socket.create_connection(self._server)
                way, most = self._cuts[self.num_connections] if self.num_connections < len(self._cuts) else ("", 0)
                self.recorded.append(b"")
                number, self.num_connections = self.num_connections, self.num_connections + 1
                pair = (worker, server)
                up, down = (most if way == name else None for name in ("up", "down"))
                threading.Thread(target=self._pump, args=(*pair, up, number), daemon=True).start()
                threading.Thread(target=self._pump, args=(*reversed(pair), down, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, most: int | None, number: int | None) -> None:
        with contextlib.suppress(OSError):
            while most is None or most > 0:
                piece = source.recv(4096 if most is None else min(most, 4096))
                if not piece:
                    break
                sink.sendall(piece)
                if number is not None:
                    self.recorded[number] += piece
                most = None if most is None else most - len(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
