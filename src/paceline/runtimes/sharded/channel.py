"""The connection between the first server and a shard: small messages both ways, and tensors if they are expected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.core.buffers import view
from paceline.errors import ProtocolError
from paceline.transports import frames
from paceline.transports.connection import Connection
from paceline.transports.frames import MAX_SHARD, FrameKind, FrameReader, SendQueue

Message = dict[str, Any]
FILLED: Message = {"filled": True}  # received when the expected tensors are complete


class ShardChannel:
    """Sends and receives without blocking. Raises ConnectionError if the other side is gone."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._outbox = SendQueue()
        self._filler = FrameReader(self._message())
        self._places: list[memoryview] = []
        self.last_heard = time.monotonic()  # when bytes came last, even if their message is not complete yet

    def fileno(self) -> int:
        """The connection's descriptor."""
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether to call `flush` when the connection accepts bytes."""
        return bool(self._outbox)

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Queue a message and tensors, and send as much as possible at once. The tensors must not change until sent."""
        self._outbox.add(frames.fields_frame(FrameKind.SHARD, message, MAX_SHARD))
        if tensors:
            bodies = [view(tensor.view(-1)) for tensor in tensors]
            self._outbox.add(frames.header(FrameKind.BODY, sum(map(len, bodies))), *bodies)
        self.flush()

    def flush(self) -> None:
        """Continue sending."""
        self._outbox.flush(self.connection.send)

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Receive the next tensors into these. `receive` returns FILLED when they are complete."""
        self._places = [view(tensor.view(-1)) for tensor in tensors]

    def receive(self) -> Message | None:
        """Return the next message, or None if it is not complete yet."""
        whole = self._filler.fill(self._receive_into)
        if whole is None:
            return None
        self._filler = FrameReader(self._message())
        return whole[0]

    def _receive_into(self, place: memoryview) -> int | None:
        count = self.connection.receive_into(place)
        if count is not None:
            self.last_heard = time.monotonic()
        return count

    def _message(self) -> frames.Reading[Message]:
        packed = yield from frames.read_bytes(frames.HEADER_NBYTES)
        awaited = sum(map(len, self._places))
        kind, nbytes = frames.parse_header(packed, {FrameKind.SHARD: MAX_SHARD, FrameKind.BODY: awaited})
        if kind is FrameKind.SHARD:
            return (yield from frames.read_fields(nbytes))
        if nbytes != awaited:
            raise ProtocolError(f"tensors of {nbytes} bytes, not the expected {awaited}")
        yield from self._places
        self._places = []
        return FILLED

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
