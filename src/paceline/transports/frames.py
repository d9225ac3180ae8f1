"""The frames of a TCP connection: a fixed header, then as many raw bytes as it says. No pickle, no torch here.

A reader is a generator of buffers to fill, for blocking and non-blocking connections. A frame of JSON has a schema.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from paceline.errors import ProtocolError
from paceline.system.strict_json import from_json, to_json
from paceline.system.terminal import printable

MAGIC = b"PACE"
VERSION = 7
_HEADER = struct.Struct("<4sBBxxQ")
HEADER_NBYTES = _HEADER.size
ALIGNMENT = 16
"""Frames are multiples of it, so that tensors are aligned in the kernel's buffers too: copies are a fifth cheaper."""
PUSH_HEAD = struct.Struct("<IIIBxxxQQQQffffd8x")
"""seq, reply, samples, number of the optimizer, bytes of update, of state, of both saved local states, of what an own
loop says, loss, seconds: cpu, wall, waited, weight (BY_SAMPLES: the samples)."""
REPLY_HEAD = struct.Struct("<BBBBIQQdIIQQIIQQ")
"""an Ending or 0, encoded, asks for the local state, number of the optimizer, serial, version, batch, lr, steps,
generation of the data assignment, bytes of its members (0 if the worker knows them), bytes of the weights or of the
encoded reply, pushes that the policy dropped, pushes dropped that count as steps of an own loop, bytes of what an own
loop said last, and of the buffers that its model had then."""
REQUEST_HEAD = struct.Struct("<QBBxxI")  # number, kind, optimizer, samples; statistics follow
ANSWER_HEAD = struct.Struct("<QBxxxI")  # number of the request, whether the weights are averaged, bytes of padding
BEAT_BODY = struct.Struct("<Q8x")  # steps that the worker has begun
MAX_AT_ONCE = 64  # the most buffers per send: the system's limit is 1,024


class Ending(enum.IntEnum):
    """The first byte of a worker's last reply: why training is over for it."""

    FINISHED = 1
    DRAINED = 2  # for this worker alone
    STOPPED = 3  # by a signal to the server
    DIVERGED = 4


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
    WANTED = 14
    INITIAL = 15
    REQUEST = 16
    ANSWER = 17


MAX_REFUSED = MAX_LOOK = MAX_SEEN = 1 << 12
MAX_APPLY = MAX_FIGURES = 1 << 16
MAX_WELCOME = 1 << 20
MAX_HELLO = MAX_SHARD = 1 << 24
MAX_PIECE = 1 << 20  # the most bytes of a file in one frame
MAX_REASON = 512  # characters of a refusal
UINT32 = (1 << 32) - 1
ARRIVING_NBYTES = 1 << 22


def padding(nbytes: int) -> bytes:
    """The zero bytes that follow `nbytes` bytes up to the next multiple of the alignment.

    >>> len(padding(0)), len(padding(1)), len(padding(16))
    (0, 15, 0)
    """
    return bytes(-nbytes % ALIGNMENT)


def header(kind: FrameKind, nbytes: int) -> bytes:
    """Pack the first bytes of a frame.

    >>> header(FrameKind.BEAT, 0).hex(" ", 4)
    '50414345 07080000 00000000 00000000'
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


def read_arriving(nbytes: int) -> Reading[bytearray]:
    """Read perhaps very many bytes: memory grows with what has arrived, and not with what the sender announced."""
    found = bytearray()
    while len(found) < nbytes:
        found += yield from read_bytes(min(nbytes - len(found), ARRIVING_NBYTES))
    return found


def read_header(most: Mapping[FrameKind, int]) -> Reading[tuple[FrameKind, int]]:
    """Read a frame's header. Return its kind and size."""
    return parse_header((yield from read_bytes(HEADER_NBYTES)), most)


def read_fields(nbytes: int) -> Reading[dict[str, Any]]:
    """Read the body of a frame as a JSON object. The size was checked with the header."""
    text = yield from read_bytes(nbytes)
    try:
        fields = from_json(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ProtocolError(f"a frame of {nbytes} bytes that are not a JSON object")
    return fields


@dataclass(frozen=True)
class Field:
    """What a field of a message holds: `accepts` tests a value, `take` returns it as it is used.

    Text is taken as `printable` writes it, so that it can be shown anywhere.
    """

    what: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    required: bool = True
    nullable: bool = False
    default: Any = None  # for null or a missing field

    def take(self, value: Any) -> Any:
        """Return the value to use. Raise ValueError if it is not acceptable."""
        if value is None and self.nullable:
            return self.default
        if not self.accepts(value):
            raise ValueError(f"{_shown(value)}, not {self.what}")
        return self.convert(value)


Schema: TypeAlias = Mapping[str, Field]


def integer(least: int = 0, most: int = UINT32) -> Field:
    """A whole number; true and false are none."""
    return Field(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float) -> Field:
    """A finite number."""
    what = f"a number from {least:g} to {most:g}"
    return Field(what, lambda value: type(value) in (int, float) and least <= value <= most, float)


def text(most: int) -> Field:
    """Text of at most so many characters."""
    what = f"text of at most {most} characters"
    return Field(
        what, lambda value: isinstance(value, str) and len(value) <= most, lambda value: printable(value, most)
    )


def record(schema: Schema) -> Field:
    """An object with its own schema."""
    return Field("an object", lambda value: isinstance(value, dict), lambda value: checked(value, schema))


def listed(of: Field, least: int, most: int) -> Field:
    """A list of so many values of one kind."""

    def accepts(value: Any) -> bool:
        return isinstance(value, list) and least <= len(value) <= most

    return Field(f"a list of {least} to {most} values", accepts, lambda value: [of.take(one) for one in value])


OBJECT = Field("an object", lambda value: isinstance(value, dict))
FLAG = Field("true or false", lambda value: type(value) is bool)
ANYTHING = Field("a value", lambda value: True)  # for what is only compared, or checked by whoever uses it


def nullable(field: Field) -> Field:
    """A field that must be there and may be null."""
    return replace(field, nullable=True)


def optional(field: Field, default: Any = None) -> Field:
    """A field that may be missing or null; `default` is taken then."""
    return replace(field, required=False, nullable=True, default=default)


def _shown(value: Any) -> str:
    return printable(repr(value), 40) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def checked(fields: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return exactly the fields of the schema. Raise ProtocolError if one is missing or wrong; others are ignored.

    >>> checked({"worker": 3, "shoe_size": 44}, {"worker": integer(), "again": optional(FLAG, False)})
    {'worker': 3, 'again': False}
    >>> checked({"worker": True}, {"worker": integer(0, 7)})
    Traceback (most recent call last):
    paceline.errors.ProtocolError: 'worker' that is True, not a whole number from 0 to 7
    """
    found = {}
    for name, field in schema.items():
        if name not in fields and field.required:
            raise ProtocolError(f"no '{name}'")
        try:
            found[name] = field.take(fields.get(name))
        except ValueError as error:
            raise ProtocolError(f"'{name}' that is {error}") from None
    return found


def read_checked(nbytes: int, schema: Schema) -> Reading[dict[str, Any]]:
    """Read the body of a frame as the fields of a schema."""
    return checked((yield from read_fields(nbytes)), schema)


def fields_frame(kind: FrameKind, fields: Mapping[str, Any], most: int) -> bytes:
    """Build a frame of JSON. The caller keeps to the size that the other side accepts."""
    body = to_json(fields).encode()
    body += b" " * len(padding(len(body)))
    assert len(body) <= most, f"{len(body)} bytes for a frame '{kind.name.lower()}' of at most {most}"
    return header(kind, len(body)) + body


REFUSAL: Schema = {"reason": optional(text(MAX_REASON), "no reason given")}


def beat_frame(num_steps: int) -> bytes:
    """Build a heartbeat. It carries the worker's progress: a hung worker may well send heartbeats."""
    return header(FrameKind.BEAT, BEAT_BODY.size) + BEAT_BODY.pack(num_steps)


def refusal_frame(reason: str) -> bytes:
    """Build a refusal with its reason, shortened to the size that the other side accepts."""
    reason = printable(reason, MAX_REASON)
    while len(to_json(reason)) > MAX_REFUSED // 2:  # JSON takes up to 12 bytes for a character
        reason = reason[: len(reason) // 2]
    return fields_frame(FrameKind.REFUSED, {"reason": reason}, MAX_REFUSED)


def read_refusal(nbytes: int) -> Reading[str]:
    """Read the reason of a refusal, to be shown to the user."""
    reason: str = (yield from read_checked(nbytes, REFUSAL))["reason"]
    return reason


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
