"""Worker and server on one machine: tensors in shared memory, a few bytes per message on a Unix socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers
from paceline.core.messages import (
    DataAssignment,
    EstimatedStatistics,
    Join,
    OwnLoopInput,
    Push,
    ReadOptimizer,
    ReadWeights,
    Reply,
)
from paceline.errors import ProtocolError
from paceline.interfaces import State
from paceline.system.memory import receive_fds
from paceline.system.shared_segment import Segment, page_aligned
from paceline.system.strict_json import from_json, to_json
from paceline.transports import protocol
from paceline.transports.frames import Ending
from paceline.transports.protocol import Hello, Peer, ReportedFigures, ScriptTransport, Timing, unreadable

_PUSH = struct.Struct("<BBxxIIIQffffd")
_REPLY = struct.Struct("<BBBxIQQdIIII")
_READ = struct.Struct("<BB")
_STATISTICS = struct.Struct("<BI")
_COUNT = struct.Struct("<BQ")
_HELLO, _PUSHED, _REPLIED, _REPORTED, _READING, _ESTIMATED, _CONFIRMED, _READING_OPTIMIZER = range(1, 9)
_GONE = BrokenPipeError, ConnectionResetError
_LARGEST = 1 << 20
_current_core: Callable[[], int] | None = getattr(ctypes.CDLL(None), "sched_getcpu", None)
"""Returns the number of the core that the caller runs on; None if the C library has no such call."""


class SharedBuffers(WorkerBuffers):
    """One worker's buffers in a segment that the server maps too. Each part starts on its own page."""

    def __init__(self, segment: Segment, sizes: BufferSizes) -> None:
        self.segment = segment
        parts, offset = {}, 0
        for name, (dtype, count) in sizes.parts().items():
            parts[name] = self._tensor(dtype, count, offset)
            offset += page_aligned(dtype.itemsize * count)
        super().__init__(sizes, parts)

    def _tensor(self, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.segment.memory, dtype=dtype, count=count, offset=offset)

    @staticmethod
    def nbytes_for(sizes: BufferSizes) -> int:
        """The number of bytes that a segment for `sizes` takes."""
        return sum(page_aligned(dtype.itemsize * count) for dtype, count in sizes.parts().values())

    @staticmethod
    def create(sizes: BufferSizes) -> SharedBuffers:
        """Allocate the segment of a new worker."""
        return SharedBuffers(Segment.create(SharedBuffers.nbytes_for(sizes), "weights and gradient of a worker"), sizes)


def channel() -> tuple[socket.socket, socket.socket]:
    """Create a socket pair that keeps message boundaries and reports a closed peer."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SharedMemoryClient(ScriptTransport):
    """The worker's side: it polls for a reply `polls` times, yielding the core in between, before it sleeps.

    A reply names at most `max_workers` members.
    """

    def __init__(self, connection: socket.socket, polls: int = 0, max_workers: int = 0) -> None:
        self._connection, self._polls = connection, polls
        self._largest = _REPLY.size + protocol.PASS_NBYTES + protocol.MEMBER_NBYTES * max_workers
        self._assignment: DataAssignment | None = None
        self.lends_core_to: int | None = None
        """The process id of a server that is to run on this worker's core while the worker waits for a reply."""

    def hello(self, join: Join, memory: WorkerBuffers, facts: dict[str, Any]) -> Reply | None:
        """Pass the segment's descriptor to the server and wait for the first weights."""
        assert isinstance(memory, SharedBuffers), "allocate the buffers with SharedBuffers.create"
        payload = bytes([_HELLO]) + to_json({**join._asdict(), "sizes": memory.sizes, **facts}).encode()
        try:
            socket.send_fds(self._connection, [payload], [memory.segment.fd])
        except _GONE:
            return None
        memory.segment.close_descriptor()
        return self._reply(join.worker, join.incarnation)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send a push and wait for its reply. Return None if the server is gone."""
        if self.lends_core_to is not None and _current_core is not None:
            try:
                os.sched_setaffinity(self.lends_core_to, (_current_core(),))
            except OSError:
                self.lends_core_to = None  # the server is gone, or this process may not move it
        try:
            sizes = push.samples, push.update.nbytes
            facts = *sizes, push.loss, *timing, protocol.BY_SAMPLES if push.weight is None else push.weight
            self._connection.send(_PUSH.pack(_PUSHED, push.optimizer, push.seq, push.reply, *facts))
        except _GONE:
            return None
        return self._reply(push.worker, push.incarnation)

    def report(self, figures: dict[str, float]) -> None:
        """Send metrics that belong in the run's result."""
        with contextlib.suppress(*_GONE):
            words = {name: str(value) for name, value in figures.items()}  # JSON has no NaN
            self._connection.send(bytes([_REPORTED]) + to_json(words).encode())

    def read_weights(self, final: bool) -> bool | None:
        """Get the weights that would be saved now into this worker's buffers. Return whether they are averaged."""
        return self._confirmed(_READ.pack(_READING, final))

    def read_optimizer(self, number: int) -> State | None:
        """Return the optimizer's state as the server has it; it comes in a segment of its own."""
        try:
            self._connection.send(bytes([_READING_OPTIMIZER, number]))
            packet, fds = receive_fds(self._connection, _COUNT.size, 1)
        except _GONE:
            return None
        if not packet or len(fds) != 1:
            return None
        nbytes = _COUNT.unpack(packet)[1]
        segment = Segment.attach(fds[0], nbytes)
        segment.close_descriptor()
        return load(bytes(segment.memory[:nbytes]))

    def merge_statistics(self, samples: int) -> bool:
        """Replace the statistics in this worker's buffers by those of all workers."""
        return self._confirmed(_STATISTICS.pack(_ESTIMATED, samples)) is not None

    def _confirmed(self, packet: bytes) -> bool | None:
        """Send a request and wait until the server has written the buffers. Return its flag, None if it is gone."""
        try:
            self._connection.send(packet)
            answer = self._connection.recv(_READ.size)
        except _GONE:
            return None
        return bool(_READ.unpack(answer)[1]) if answer else None

    def close(self) -> None:
        """Leave the run."""
        self._connection.close()

    def _poll(self) -> bytes | None:
        for _ in range(self._polls):
            try:
                return self._connection.recv(self._largest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return None

    def _reply(self, worker: int, incarnation: int) -> Reply | None:
        try:
            packet = self._poll() if self._polls else None
            packet = self._connection.recv(self._largest) if packet is None else packet
        except ConnectionResetError:
            return None
        if not packet:
            return None
        _, finished, optimizer, serial, version, batch, lr, steps, generation, dropped, discarded = _REPLY.unpack_from(
            packet
        )
        if len(packet) > _REPLY.size:
            self._assignment = protocol.unpack_assignment(generation, packet[_REPLY.size :])
        work = serial, version, batch, bool(finished), steps, lr
        counts = dropped, discarded, optimizer
        return Reply(worker, incarnation, *work, self._assignment, *counts, released=finished == Ending.DRAINED)


def _fields_of(packet: bytes) -> dict[str, Any]:
    """The JSON object behind the first byte of a packet."""
    try:
        fields = from_json(packet[1:])
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ProtocolError(f"{len(packet)} bytes that are not a JSON object")
    return fields


class SharedMemoryPeer(Peer):
    """The server's side of one worker's connection."""

    def __init__(self, connection: socket.socket, worker: int, incarnation: int) -> None:
        self.connection, self.worker, self.incarnation = connection, worker, incarnation
        self.slot: SharedBuffers | None = None
        self.timing = Timing(0.0, 0.0, 0.0)  # of the last push
        self._sent_assignment: DataAssignment | None = None

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self.connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def receive(self) -> Hello | Push | OwnLoopInput | ReportedFigures | None:
        """Read the next message. Return None if the worker is gone; raise ProtocolError if the bytes are malformed."""
        slot = self.slot
        try:
            if slot is None:
                packet, fds = receive_fds(self.connection, _LARGEST, 1)
            else:
                packet, fds = self.connection.recv(1 << 16), []
        except ConnectionResetError:
            return None
        if not packet:
            return None
        try:
            return self._hello(packet, fds) if slot is None else self._message(packet, slot)
        except ProtocolError as error:
            raise ProtocolError(f"worker {self.worker} sent {error}") from None
        except Exception as error:  # of the bytes of this worker alone: nothing has been applied
            raise unreadable(self.worker, error) from error

    def _message(self, packet: bytes, slot: SharedBuffers) -> Push | OwnLoopInput | ReportedFigures:
        if packet[0] != _PUSHED or len(packet) != _PUSH.size:
            return self._setting(packet)
        _, optimizer, seq, reply, samples, nbytes, loss, *seconds, weight = _PUSH.unpack(packet)
        update = slot.update
        if nbytes > update.nbytes:
            raise ProtocolError(f"a push of {nbytes} bytes for buffers of {update.nbytes}")
        timing = Timing(*seconds)
        known = None if weight == protocol.BY_SAMPLES else weight
        protocol.check_push(seq, reply, samples, loss, timing, known)
        self.timing = timing
        if slot.sizes.payload is not None:
            update = update[:nbytes]
        tensors = update, slot.state, known, slot.loop
        return Push(self.worker, self.incarnation, seq, reply, samples, loss, *tensors, optimizer)

    def _setting(self, packet: bytes) -> OwnLoopInput | ReportedFigures:
        """Decode the messages of a user's own loop that are not pushes."""
        if packet[0] == _READING and len(packet) == _READ.size:
            return ReadWeights(self.worker, bool(packet[1]))
        if packet[0] == _READING_OPTIMIZER and len(packet) == 2:
            return ReadOptimizer(self.worker, packet[1])
        if packet[0] == _ESTIMATED and len(packet) == _STATISTICS.size:
            return EstimatedStatistics(self.worker, _STATISTICS.unpack(packet)[1])
        if packet[0] != _REPORTED:
            raise ProtocolError(f"{len(packet)} bytes that are not a push")
        return protocol.parse_figures(self.worker, _fields_of(packet))

    def _hello(self, packet: bytes, fds: list[int]) -> Hello:
        try:
            if packet[0] != _HELLO or len(fds) != 1:
                raise ProtocolError(f"{len(packet)} bytes that are not a hello")
            join, asked, facts = protocol.parse_hello(self.worker, self.incarnation, _fields_of(packet))
            sizes = protocol.parse_sizes(asked)
        except ProtocolError:
            for fd in fds:
                os.close(fd)
            raise
        segment = Segment.attach(fds[0], SharedBuffers.nbytes_for(sizes))
        segment.close_descriptor()
        self.slot = SharedBuffers(segment, sizes)
        return Hello(join, self.slot, facts)

    def answer(self, reply: Reply) -> None:
        """Send a reply, with its members if they are new. If the worker is gone, the next `receive` says so."""
        generation = reply.assignment.generation if reply.assignment is not None else 0
        over = Ending.DRAINED if reply.released else reply.finished
        named = (_REPLIED, over, reply.optimizer, reply.serial, reply.version)
        counts = reply.dropped, reply.discarded
        packet = _REPLY.pack(*named, reply.batch, reply.lr, reply.steps, generation, *counts)
        if reply.assignment is not None and reply.assignment != self._sent_assignment:
            packet += protocol.pack_assignment(reply.assignment)  # once per connection
            self._sent_assignment = reply.assignment
        self._send(packet)

    def confirm(self, averaged: bool = False) -> None:
        """Say that the weights or statistics that the worker waits for are in its buffers."""
        self._send(_READ.pack(_CONFIRMED, averaged))

    def send_optimizer(self, state: State) -> None:
        """Send the optimizer's state, as the bytes of a safetensors file in a segment."""
        content = save({name: tensor.contiguous() for name, tensor in state.items()})
        segment = Segment.create(len(content), "the state of an optimizer")
        segment.memory[: len(content)] = content
        with contextlib.suppress(*_GONE):
            socket.send_fds(self.connection, [_COUNT.pack(_CONFIRMED, len(content))], [segment.fd])
        segment.close_descriptor()

    def _send(self, packet: bytes) -> None:
        try:
            self.connection.send(packet)
        except _GONE:
            return
