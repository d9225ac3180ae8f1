"""The frames of a TCP connection: a fixed header, then as many raw bytes as it says. No pickle, no torch here.

A reader is a generator of buffers to fill, for blocking and non-blocking connections.
"""

from __future__ import annotations

import enum
import json
import struct
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from paceline.errors import ProtocolError
from paceline.system.strict_json import to_json

MAGIC = b"PACE"
VERSION = 4
_HEADER = struct.Struct("<4sBBxxQ")
HEADER_NBYTES = _HEADER.size
ALIGNMENT = 16
"""Frames are multiples of it, so that tensors are aligned in the kernel's buffers too: copies are a fifth cheaper."""
PUSH_HEAD = struct.Struct("<IIIxxxxQQQffffd")
"""seq, reply, samples, bytes of update, of state, of both saved local states, loss, seconds: cpu, wall, waited, weight
(0: the samples)."""
REPLY_HEAD = struct.Struct("<BBBxIQQdIIQQI4x")
"""over (or DRAINED), encoded, asks for the local state, serial, version, batch, lr, steps, generation of the data
assignment, bytes of its members (0 if the worker knows them), bytes of the weights or of the encoded reply, pushes
dropped so far."""
BEAT_BODY = struct.Struct("<Q8x")  # steps that the worker has begun
DRAINED = 2  # in the first byte of a reply: this worker alone is to leave
MAX_AT_ONCE = 64  # the most buffers per send: the system's limit is 1,024

T = TypeVar("T")
Reading: TypeAlias = Generator[memoryview, None, T]  # yields each buffer to fill next, and continues when it is full


class FrameKind(enum.IntEnum):
    """The kind of a frame."""

    APPLY = 1
    WELCOME = 2
    REFUSED = 3
    HELLO = 4
    PUSH = 5
    REPLY = 6
    FIGURES = 7
    BEAT = 8
    BYE = 9
    SHARD = 10
    BODY = 11
    LOOK = 12
    SEEN = 13


MAX_REFUSED = MAX_LOOK = MAX_SEEN = 1 << 12
MAX_APPLY = MAX_FIGURES = 1 << 16
MAX_WELCOME = MAX_HELLO = 1 << 20
MAX_SHARD = 1 << 24
MAX_PIECE = 1 << 20  # the most bytes of a file in one frame


def padding(nbytes: int) -> bytes:
    """The zero bytes that follow `nbytes` bytes up to the next multiple of the alignment.

    >>> len(padding(0)), len(padding(1)), len(padding(16))
    (0, 15, 0)
    """
    return bytes(-nbytes % ALIGNMENT)


def header(kind: FrameKind, nbytes: int) -> bytes:
    """Pack the first bytes of a frame.

    >>> header(FrameKind.BEAT, 0).hex(" ", 4)
    '50414345 04080000 00000000 00000000'
    """
    return _HEADER.pack(MAGIC, VERSION, kind, nbytes)


def parse_header(packed: bytes | bytearray, most: Mapping[FrameKind, int]) -> tuple[FrameKind, int]:
    """Return kind and size of a frame. Raise ProtocolError unless `most` has the kind and allows the size.

    >>> parse_header(header(FrameKind.APPLY, 100), {FrameKind.APPLY: 99})
    Traceback (most recent call last):
    paceline.errors.ProtocolError: a frame 'apply' of 100 bytes, which may have at most 99
    """
    magic, version, number, nbytes = _HEADER.unpack(packed)
    if magic != MAGIC:
        raise ProtocolError("bytes that are not a frame")
    if version != VERSION:
        raise ProtocolError(f"a frame of protocol {version}, not {VERSION}")
    if number not in most:
        name = f"'{FrameKind(number).name.lower()}'" if number in set(FrameKind) else f"of unknown kind {number}"
        raise ProtocolError(f"a frame {name} instead of {' or '.join(kind.name.lower() for kind in most)}")
    kind = FrameKind(number)
    if nbytes > most[kind]:
        raise ProtocolError(f"a frame '{kind.name.lower()}' of {nbytes} bytes, which may have at most {most[kind]}")
    return kind, nbytes


def read_bytes(nbytes: int) -> Reading[bytearray]:
    """Read `nbytes` bytes."""
    place = bytearray(nbytes)
    yield memoryview(place)
    return place


def read_header(most: Mapping[FrameKind, int]) -> Reading[tuple[FrameKind, int]]:
    """Read a frame's header. Return its kind and size."""
    return parse_header((yield from read_bytes(HEADER_NBYTES)), most)


def read_fields(nbytes: int) -> Reading[dict[str, Any]]:
    """Read the body of a frame as a JSON object. The size was checked with the header."""
    text = yield from read_bytes(nbytes)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ProtocolError(f"a frame of {nbytes} bytes that are not a JSON object")
    return fields


def fields_frame(kind: FrameKind, fields: Mapping[str, Any], most: int) -> bytes:
    """Build a frame of JSON. The caller keeps to the size that the other side accepts."""
    text = to_json(fields).encode()
    text += b" " * len(padding(len(text)))
    assert len(text) <= most, f"{len(text)} bytes for a frame '{kind.name.lower()}' of at most {most}"
    return header(kind, len(text)) + text


def beat_frame(num_steps: int) -> bytes:
    """Build a heartbeat. It carries the worker's progress: a hung worker may well send heartbeats."""
    return header(FrameKind.BEAT, BEAT_BODY.size) + BEAT_BODY.pack(num_steps)


def refusal_frame(reason: str) -> bytes:
    """Build a refusal with its reason, shortened to the size that the other side accepts."""
    return fields_frame(FrameKind.REFUSED, {"reason": reason[: MAX_REFUSED // 8]}, MAX_REFUSED)


class FrameReader(Generic[T]):
    """Drives a reader over bytes that arrive in pieces of any size."""

    def __init__(self, reading: Reading[T]) -> None:
        self._reading = reading
        self._place: memoryview | None = None

    def fill(self, receive_into: Callable[[memoryview], int | None]) -> tuple[T] | None:
        """Read on. Return (result,) when the reader is done, or None if `receive_into` has no more bytes yet.

        >>> left = [b"ab", None, b"cd"]
        >>> def receive_into(place):
        ...     piece = left.pop(0)
        ...     place[:len(piece or b"")] = piece or b""
        ...     return piece and len(piece)
        >>> def reading():
        ...     place = bytearray(4)
        ...     yield memoryview(place)
        ...     return bytes(place)
        >>> filler = FrameReader(reading())
        >>> filler.fill(receive_into), filler.fill(receive_into)
        (None, (b'abcd',))
        """
        try:
            while True:
                while not self._place:
                    self._place = next(self._reading)
                count = receive_into(self._place)
                if count is None:
                    return None
                self._place = self._place[count:]
        except StopIteration as end:
            return (end.value,)


class SendQueue:
    """Bytes still to be sent, not copied: the memory must not change until they are sent."""

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, *parts: bytes | memoryview) -> None:
        """Queue one frame."""
        self._parts.extend(memoryview(part) for part in parts if len(part))
        self.nbytes += sum(map(len, parts))

    def flush(self, send: Callable[[list[memoryview]], int | None]) -> bool:
        """Send until the queue is empty (True) or `send` accepts no more for now (False)."""
        while self._parts:
            count = send([self._parts[n] for n in range(min(len(self._parts), MAX_AT_ONCE))])
            if count is None:
                return False
            self.nbytes -= count
            while count:
                first = self._parts.popleft()
                if count < len(first):
                    self._parts.appendleft(first[count:])
                    break
                count -= len(first)
        return True
