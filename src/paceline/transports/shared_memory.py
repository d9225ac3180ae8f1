"""Worker and server on one machine: tensors in shared memory, a few bytes of control on a socket.

The worker's gradient is written where the server reads it; its weights are read where the server writes them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

import torch
from torch import Tensor

from paceline.core.buffers import Memory, Sizes
from paceline.core.messages import Deal, Join, Push, Rate, Reply
from paceline.errors import ProtocolError
from paceline.system.shared_segment import Segment, page_aligned
from paceline.transports.protocol import MEMBER_NBYTES, Figures, Hello, Timing, pack_members, unpack_members

_PUSH = struct.Struct("<BxxxIIIQffff")
_REPLY = struct.Struct("<BBxxIQQdII")
_RATE = struct.Struct("<Bd")
_HELLO, _PUSHED, _REPLIED, _REPORTED, _RATED = 1, 2, 3, 4, 5
_LARGEST = 1 << 20


class Slot(Memory):
    """One worker's memory in a segment that its server maps too; every part begins on a page of its own."""

    def __init__(self, segment: Segment, sizes: Sizes) -> None:
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
    def nbytes_for(sizes: Sizes) -> int:
        """Bytes a slot takes."""
        return sum(page_aligned(dtype.itemsize * count) for dtype, count in sizes.parts().values())

    @staticmethod
    def create(sizes: Sizes) -> Slot:
        """A worker's new slot, reserved."""
        return Slot(Segment.create(Slot.nbytes_for(sizes), "weights and gradient of a worker"), sizes)


def channel() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that keeps messages whole and says when the other end is gone."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class WorkerDoor:
    """The worker's only door: say hello once, then exchange a push for weights.

    It asks for its reply `polls` times, giving way to others in between, before it goes to sleep over it. A reply that
    brings a deal names up to `places` members.
    """

    def __init__(self, connection: socket.socket, polls: int = 0, places: int = 0) -> None:
        self._connection, self._polls = connection, polls
        self._largest = _REPLY.size + MEMBER_NBYTES * places
        self._deal: Deal | None = None

    def hello(self, join: Join, slot: Slot, facts: dict[str, Any]) -> Reply | None:
        """Hand the slot over and wait for the first weights."""
        fields = {
            "worker": join.worker,
            "incarnation": join.incarnation,
            "quota": join.quota,
            "threads": join.threads,
            "sizes": slot.sizes,
            **facts,
        }
        payload = bytes([_HELLO]) + json.dumps(fields).encode()
        try:
            socket.send_fds(self._connection, [payload], [slot.segment.fd])
        except (BrokenPipeError, ConnectionResetError):
            return None
        slot.segment.close_descriptor()
        return self._reply(join.worker, join.incarnation)

    def exchange(self, push: Push, timing: Timing) -> Reply | None:
        """Send a push and wait for its reply; None when the server is gone."""
        try:
            sizes = push.samples, push.update.nbytes
            self._connection.send(_PUSH.pack(_PUSHED, push.seq, push.reply, *sizes, push.loss, *timing))
        except (BrokenPipeError, ConnectionResetError):
            return None
        return self._reply(push.worker, push.incarnation)

    def _poll(self) -> bytes | None:
        for _ in range(self._polls):
            try:
                return self._connection.recv(self._largest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return None

    def report(self, figures: dict[str, float]) -> None:
        """Tell the server figures that belong into the result."""
        try:
            self._connection.send(bytes([_REPORTED]) + json.dumps(figures).encode())
        except (BrokenPipeError, ConnectionResetError):
            return

    def set_rate(self, rate: Rate) -> None:
        """Before the push it is meant for: the learning rate is another from now on."""
        try:
            self._connection.send(_RATE.pack(_RATED, rate.factor))
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        """Say good-bye."""
        self._connection.close()

    def _reply(self, worker: int, incarnation: int) -> Reply | None:
        try:
            packet = self._poll() if self._polls else None
            packet = self._connection.recv(self._largest) if packet is None else packet
        except ConnectionResetError:
            return None
        if not packet:
            return None
        _, over, serial, version, batch, lr, steps, generation = _REPLY.unpack_from(packet)
        if len(packet) > _REPLY.size:
            self._deal = Deal(generation, unpack_members(packet[_REPLY.size :]))
        return Reply(worker, incarnation, serial, version, batch, bool(over), steps, lr, self._deal)


class ServerDoor:
    """The server's end of one worker's connection."""

    def __init__(self, connection: socket.socket, worker: int, incarnation: int) -> None:
        self.connection = connection
        self.worker, self.incarnation = worker, incarnation
        self.slot: Slot | None = None
        self.timing = Timing(0.0, 0.0, 0.0)
        """Of the last push."""
        self._told: Deal | None = None

    def fileno(self) -> int:
        """Of its connection."""
        return self.connection.fileno()

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def receive(self) -> Hello | Push | Rate | Figures | None:
        """The next message, or None when the worker is gone; anything malformed is a ProtocolError."""
        if self.slot is not None:
            try:
                packet = self.connection.recv(1 << 16)
            except ConnectionResetError:
                return None
            if packet and packet[0] == _REPORTED:
                return self._figures(packet)
            if len(packet) == _RATE.size and packet[0] == _RATED:
                return Rate(self.worker, _RATE.unpack(packet)[1])
            return self._push(packet, self.slot) if packet else None
        try:
            packet, fds, _, _ = socket.recv_fds(self.connection, _LARGEST, 1)
        except ConnectionResetError:
            return None
        return self._hello(packet, fds) if packet else None

    def _figures(self, packet: bytes) -> Figures:
        try:
            values = {str(name): float(value) for name, value in json.loads(packet[1:]).items()}
        except (ValueError, TypeError, AttributeError):
            raise ProtocolError(f"worker {self.worker} reported figures that are none") from None
        return Figures(self.worker, values)

    def _push(self, packet: bytes, slot: Slot) -> Push:
        if len(packet) != _PUSH.size or packet[0] != _PUSHED:
            raise ProtocolError(f"worker {self.worker} sent {len(packet)} bytes that are no push")
        _, seq, reply, samples, nbytes, loss, *seconds = _PUSH.unpack(packet)
        update = slot.update
        if nbytes > update.nbytes:
            raise ProtocolError(f"worker {self.worker} pushed {nbytes} bytes into a memory of {update.nbytes}")
        self.timing = Timing(*seconds)
        if slot.sizes.payload is not None:
            update = update[:nbytes]
        return Push(self.worker, self.incarnation, seq, reply, samples, loss, update, slot.state)

    def _hello(self, packet: bytes, fds: list[int]) -> Hello:
        try:
            fields = json.loads(packet[1:]) if packet[0] == _HELLO and len(fds) == 1 else {}
            join = Join(self.worker, self.incarnation, fields.pop("quota"), int(fields.pop("threads")))
            weights, state, payload, pulled, own = fields.pop("sizes")
            sizes = Sizes(int(weights), int(state), payload, pulled, int(own))
            nbytes = Slot.nbytes_for(sizes)
        except (ValueError, KeyError, TypeError):
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"worker {self.worker} sent {len(packet)} bytes that are no hello") from None
        segment = Segment.attach(fds[0], nbytes)
        segment.close_descriptor()
        self.slot = Slot(segment, sizes)
        return Hello(join, self.slot, fields)

    def answer(self, reply: Reply) -> None:
        """Send the reply, with its deal where that is new; a worker that is gone is noticed when it is read next."""
        generation = reply.deal.generation if reply.deal is not None else 0
        named = (_REPLIED, reply.over, reply.serial, reply.version)
        packet = _REPLY.pack(*named, reply.batch, reply.lr, reply.steps, generation)
        if reply.deal is not None and reply.deal != self._told:
            packet += pack_members(reply.deal.members)  # once a connection
            self._told = reply.deal
        try:
            self.connection.send(packet)
        except (BrokenPipeError, ConnectionResetError):
            return
