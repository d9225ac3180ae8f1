"""What crosses a TCP connection: a fixed header, then as many raw bytes as it says. No pickle, no torch here.

A reader is a generator of the places to fill next, so that one flow serves a blocking and a non-blocking connection.
"""

from __future__ import annotations

import enum
import json
import struct
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from paceline.errors import ProtocolError

MAGIC = b"PACE"
VERSION = 2
_HEADER = struct.Struct("<4sBBxxQ")
HEADER_NBYTES = _HEADER.size
ALIGNMENT = 16
"""Frames are multiples of it, so that tensors lie in the system's buffers as in ours: copies are a fifth cheaper."""
PUSH_HEAD = struct.Struct("<IIIxxxxQQQffff8x")
"""seq, reply, samples, bytes of update, of state, of the worker's own state, loss, seconds: cpu, wall, waited."""
REPLY_HEAD = struct.Struct("<BBBxIQQdIIQQ8x")
"""over, encoded, asks for the own state, serial, version, batch, lr, steps, generation of the deal, bytes of its
members (none if the worker knows them), bytes of the weights or of the encoded reply."""
MOST_AT_ONCE = 64
"""Places that one call sends from: the system takes no more than 1,024."""

T = TypeVar("T")
Reading: TypeAlias = Generator[memoryview, None, T]
"""Yields each place when it is next to be filled, and goes on when it is full."""


class Kind(enum.IntEnum):
    """What a frame is."""

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


MOST_APPLY = 1 << 16
MOST_WELCOME = MOST_HELLO = 1 << 20
MOST_REFUSED = 1 << 12
MOST_FIGURES = 1 << 16
MOST_SHARD = 1 << 24
MOST_LOOK = MOST_SEEN = 1 << 12
MOST_PIECE = 1 << 20
"""Of a file, at once."""


def padding(nbytes: int) -> bytes:
    """What follows so many bytes up to the next multiple of the alignment.

    >>> len(padding(0)), len(padding(1)), len(padding(16))
    (0, 15, 0)
    """
    return bytes(-nbytes % ALIGNMENT)


def header(kind: Kind, nbytes: int) -> bytes:
    """The first bytes of a frame.

    >>> header(Kind.BEAT, 0).hex(" ", 4)
    '50414345 02080000 00000000 00000000'
    """
    return _HEADER.pack(MAGIC, VERSION, kind, nbytes)


def parse_header(packed: bytes | bytearray, most: Mapping[Kind, int]) -> tuple[Kind, int]:
    """Kind and size of a frame; ProtocolError unless it is one of `most`, and no larger than that says.

    >>> parse_header(header(Kind.APPLY, 100), {Kind.APPLY: 99})
    Traceback (most recent call last):
    paceline.errors.ProtocolError: a frame 'apply' of 100 bytes, where at most 99 are taken
    """
    magic, version, number, nbytes = _HEADER.unpack(packed)
    if magic != MAGIC:
        raise ProtocolError("bytes that are no frame")
    if version != VERSION:
        raise ProtocolError(f"a frame of protocol {version}, where {VERSION} is spoken")
    if number not in most:
        name = f"'{Kind(number).name.lower()}'" if number in set(Kind) else f"of unknown kind {number}"
        raise ProtocolError(f"a frame {name}, where {' or '.join(kind.name.lower() for kind in most)} is awaited")
    kind = Kind(number)
    if nbytes > most[kind]:
        raise ProtocolError(f"a frame '{kind.name.lower()}' of {nbytes} bytes, where at most {most[kind]} are taken")
    return kind, nbytes


def read_bytes(nbytes: int) -> Reading[bytearray]:
    """So many bytes."""
    place = bytearray(nbytes)
    yield memoryview(place)
    return place


def read_header(most: Mapping[Kind, int]) -> Reading[tuple[Kind, int]]:
    """Wait for a frame: its kind and size."""
    return parse_header((yield from read_bytes(HEADER_NBYTES)), most)


def read_fields(nbytes: int) -> Reading[dict[str, Any]]:
    """The body of a frame that holds a JSON object; `nbytes` was checked with its header."""
    text = yield from read_bytes(nbytes)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ProtocolError(f"a frame of {nbytes} bytes that hold no JSON object")
    return fields


def fields_frame(kind: Kind, fields: Mapping[str, Any], most: int) -> bytes:
    """A frame of JSON; larger than the other side will take is our own mistake."""
    text = json.dumps(fields).encode()
    text += b" " * len(padding(len(text)))
    assert len(text) <= most, f"{len(text)} bytes for a frame '{kind.name.lower()}' of at most {most}"
    return header(kind, len(text)) + text


def refusal_frame(reason: str) -> bytes:
    """A frame that says why not, cut to the size that is taken."""
    return fields_frame(Kind.REFUSED, {"reason": reason[: MOST_REFUSED // 8]}, MOST_REFUSED)


class Filler(Generic[T]):
    """Drives a reader over bytes that come in pieces of any size."""

    def __init__(self, reading: Reading[T]) -> None:
        self._reading = reading
        self._place: memoryview | None = None

    def fill(self, receive_into: Callable[[memoryview], int | None]) -> tuple[T] | None:
        """Read until all is there: (what was read,). None when `receive_into` has nothing more for now.

        >>> left = [b"ab", None, b"cd"]
        >>> def receive_into(place):
        ...     piece = left.pop(0)
        ...     place[:len(piece or b"")] = piece or b""
        ...     return piece and len(piece)
        >>> def reading():
        ...     place = bytearray(4)
        ...     yield memoryview(place)
        ...     return bytes(place)
        >>> filler = Filler(reading())
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


class Outbox:
    """What is still to be sent, without a copy: the memory must stay as it is until it is gone."""

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
        """Send until all is gone (True), or until `send` takes no more for now (False)."""
        while self._parts:
            count = send([self._parts[n] for n in range(min(len(self._parts), MOST_AT_ONCE))])
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
