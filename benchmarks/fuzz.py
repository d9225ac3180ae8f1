"""Feed random and mutated frames to every decoder that reads what a peer sent; each must end in a message or an error.

    python benchmarks/fuzz.py [--count N] [--seed N]

Valid messages of every kind are mutated (bits, bytes, lengths, pieces, numbers of a JSON text) or replaced by noise.
They go to the reader that a server, a worker, an observer or a further server uses for them, and to the decoders of all
codecs. A reader may return a message or raise one of the errors that mean "this peer is at fault"; anything else would
have ended a server. Prints frames per second, the outcomes by kind and the peak of memory. Nothing is sent anywhere.
"""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pairs
import torch
from safetensors.torch import save

from paceline.codecs.slices import slice_codec
from paceline.core.buffers import BufferSizes, WorkerBuffers, view
from paceline.core.messages import Join
from paceline.errors import ProtocolError
from paceline.interfaces import pack
from paceline.runtimes.scripts.remote.client import LoopClient
from paceline.runtimes.sharded.channel import FILLED, ShardChannel
from paceline.runtimes.sharded.orders import from_words
from paceline.runtimes.sharded.peers import VOTE
from paceline.runtimes.sharded.shard import ORDER
from paceline.settings.codecs import build_codec
from paceline.system.strict_json import to_json
from paceline.transports import file_client, frames, handshake, protocol, shared_memory
from paceline.transports.auth import ClientHandshake
from paceline.transports.connection import Connection, JoinRefused
from paceline.transports.frames import (
    ANSWER_HEAD,
    PUSH_HEAD,
    REPLY_HEAD,
    REQUEST_HEAD,
    FrameKind,
    FrameReader,
    beat_frame,
    checked,
    header,
    padding,
)
from paceline.transports.listener import UnauthenticatedPeer
from paceline.transports.protocol import RequestKind
from paceline.transports.shared_memory import SharedBuffers, SharedMemoryPeer
from paceline.transports.tcp_client import TcpClient
from paceline.transports.tcp_server import FROZEN, USED, WEIGHTS, TcpPeer

COUNT, QUICK_COUNT = 1_000_000, 20_000
MOST_GROWTH_MIB = 64.0
AT_FAULT = (ProtocolError, ConnectionError, JoinRefused)
"""The errors that end one peer's connection and nothing else."""
SIZES = BufferSizes(8, 2, None, None, 4)
PULLING = BufferSizes(8, 2, None, 24, 4)
LAYOUT = pack([("matrix", (40, 16), True), ("bias", (7,), True)])
SPAN = slice(256, 512)  # the part of another server
CODECS = ("none", "fp16", "bf16", "int8", "sign", "topk:0.1", "lowrank:2")
WORDS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "0.5", "1" * 400, str(2**32), str(2**64), "9" * 5000),
    *("true", "null", "[]", "{}", '""', '"' + "\\ud83d\\udc0d" * 300 + '"', '"\\u001b[2J"', '"\\ud800"', "[" * 3000),
)
"""What a number or a text of a JSON text is replaced by."""


class ScriptedConnection(Connection):
    """A connection whose other end has sent given bytes and then closes; what is sent into it is kept."""

    def __init__(self, received: bytes = b"", closes: bool = True) -> None:
        self.received, self.sent, self.closes = received, b"", closes
        self.sock, self.peer, self.wants_write = None, "127.0.0.1:1", False  # type: ignore[assignment]

    def fileno(self) -> int:
        return -1

    def receive_into(self, place: memoryview) -> int | None:
        count = min(len(place), len(self.received))
        if not count and self.closes:
            raise ConnectionError("closed by the other end")
        if not count:
            return None
        place[:count], self.received = self.received[:count], self.received[count:]
        return count

    def send(self, parts: list[memoryview]) -> int:
        self.sent += b"".join(parts)
        return sum(map(len, parts))

    def close(self) -> None:
        self.received = b""


@dataclass(frozen=True)
class Target:
    """One decoder: messages that it reads, and the function that gives it the bytes of any other."""

    valid: list[bytes]
    feed: Callable[[bytes], object]


def _fields(kind: FrameKind, **fields: Any) -> bytes:
    return frames.fields_frame(kind, fields, 1 << 20)


def _framed(kind: FrameKind, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return header(kind, len(body)) + body


PLACE = {"machine": "m", "cores": 2, "process": 7, "threads": 1, "clock": 1.5}
WORKER = {"worker": 0, "incarnation": 0, "again": True, "version": "0.1.0", "device": "cpu", "place": PLACE}
SHARD = {"shard": True, "version": "0.1.0", "pid": 7, "address": "127.0.0.1:7", "fingerprint": "sha256:00"}
APPLICATIONS = [_fields(FrameKind.APPLY, **fields) for fields in (WORKER, SHARD, {"observer": True})]
FACTS = {"layout": 5, "num_samples": 6, "targets": 7}
JOIN = {"worker": 0, "incarnation": 0, "quota": None, "threads": 1, "own_loop": False}
HELLO = _fields(FrameKind.HELLO, **JOIN, sizes=SIZES, **FACTS)
LOOP_SIZES = BufferSizes(8, 2, None, None, 0, 3)
LOOP_HELLO = _fields(FrameKind.HELLO, **{**JOIN, "own_loop": True}, sizes=LOOP_SIZES, **FACTS)
STATISTICS = bytes(8)
REQUESTS = [
    _framed(FrameKind.REQUEST, REQUEST_HEAD.pack(1, kind, 0, 4), body, padding(len(body)))
    for kind, body in [*((kind, b"") for kind in range(3)), (RequestKind.STATISTICS, STATISTICS)]
]
INITIAL = _framed(
    FrameKind.INITIAL,
    save(
        {WEIGHTS: torch.ones(8), f"{FROZEN}scale": torch.ones(3, dtype=torch.int64), f"{USED}0/0.step": torch.ones(1)}
    ),
)
BODY = bytes(range(40))
PUSH_FIELDS = (0, 0, 4, 0, 32, 8, 0, 0, 0.5, 0.1, 0.2, 0.3, -1.0)
PUSH = _framed(FrameKind.PUSH, PUSH_HEAD.pack(*PUSH_FIELDS), BODY, padding(len(BODY)))
MESSAGES = [
    PUSH,
    _fields(FrameKind.FIGURES, accuracy=0.5, f1="nan"),
    beat_frame(7),
    header(FrameKind.BYE, 0),
]
SERVERS = [{"span": [0, 4]}, {"span": [4, 8], "address": "127.0.0.1:7", "fingerprint": None, "pid": 3}]
WELCOME = {
    "worker": 0,
    "incarnation": 0,
    "again": False,
    "config": {"strategy": "async"},
    "run": "r",
    "shards": SERVERS,
}
REFUSED = _fields(FrameKind.REFUSED, reason="training is over")


def _application(data: bytes) -> object:
    """After a right handshake."""
    connection = ScriptedConnection(closes=False)
    stranger = UnauthenticatedPeer(connection, b"token", b"", 0.0)
    stranger.step()  # sends the challenge
    connection.received, connection.closes = ClientHandshake(b"token").answer(connection.sent) + data, True
    return stranger.step()


def _greeted(hello: bytes = HELLO, sizes: BufferSizes | None = SIZES) -> TcpPeer:
    peer = TcpPeer(ScriptedConnection(hello), 0, 0, sizes)
    peer.receive()
    return peer


def _loop_hello(data: bytes) -> object:
    """On a machine with little memory: the buffers that an own loop asks for may take half of what is free."""
    with patch.object(protocol, "available_memory", lambda: 1 << 20):
        return _through(TcpPeer(ScriptedConnection(), 0, 0, None), data)


def _initial(data: bytes) -> object:
    """As a server reads it that has asked for it."""
    peer = _greeted(LOOP_HELLO, None)
    peer.ask_initial()
    return _through(peer, data)


def _loop_client(sizes: BufferSizes = LOOP_SIZES) -> LoopClient:
    client = LoopClient("127.0.0.1:1", b"token")
    client._memory = WorkerBuffers.private(sizes)
    return client


def _answer(kind: RequestKind) -> Callable[[bytes], object]:
    """As an own loop reads the answer to its first request."""

    def feed(data: bytes) -> object:
        client, connection = _loop_client(), ScriptedConnection(data)
        client._ask = lambda parts, reading: _first(FrameReader(reading()).fill(connection.receive_into))  # type: ignore
        if kind is RequestKind.OPTIMIZER:
            return client.read_optimizer(0)
        return client.read_weights(False) if kind is RequestKind.WEIGHTS else client.merge_statistics(4)

    return feed


def _first(found: tuple[Any] | None) -> Any:
    return found[0] if found is not None else None


def _answer_frame(body: bytes) -> bytes:
    pad = padding(len(body))
    return _framed(FrameKind.ANSWER, ANSWER_HEAD.pack(1, 0, len(pad)), body, pad)


def _greeting(data: bytes) -> object:
    """As an own loop reads the answer to its hello."""
    client = _loop_client()
    client._assignment = None
    return FrameReader(client._reply_or_wanted(Join(0, 0))).fill(ScriptedConnection(data).receive_into)


def _through(peer: TcpPeer, data: bytes) -> object:
    """All messages in the bytes."""
    peer.connection = ScriptedConnection(data)
    message: object = None
    while (received := peer.receive()) is not None:
        message = received
    return message


def _reply(sizes: BufferSizes) -> Callable[[bytes], object]:
    client = TcpClient("127.0.0.1:1", b"token")
    client._memory = WorkerBuffers.private(sizes)

    def feed(data: bytes) -> object:
        client._assignment = None
        return FrameReader(client._reply(Join(0, 0))).fill(ScriptedConnection(data).receive_into)

    return feed


def _reply_frame(encoded: bool, members: bytes, body: bytes) -> bytes:
    head = REPLY_HEAD.pack(0, encoded, 0, 0, 3, 17, 5, 0.1, 0, 1, len(members), len(body), 0, 0, 0, 0)
    return _framed(FrameKind.REPLY, head, members, body, padding(len(members) + len(body)))


def _read(reading: Callable[[], frames.Reading[Any]]) -> Callable[[bytes], object]:
    return lambda data: FrameReader(reading()).fill(ScriptedConnection(data).receive_into)


def _look() -> frames.Reading[dict[str, Any]]:
    _, nbytes = yield from frames.read_header({FrameKind.LOOK: frames.MAX_LOOK})
    return (yield from frames.read_checked(nbytes, file_client.LOOK))


def _order(data: bytes) -> object:
    """As a further server reads what the first one orders."""
    channel = ShardChannel(ScriptedConnection(data))
    channel.expect([torch.empty(4)])
    message = channel.receive()
    if message is None or message is FILLED:
        return message
    order = checked(message, ORDER)
    return from_words(order["input"]) if order["input"] is not None else order


def _vote(data: bytes) -> object:
    message = ShardChannel(ScriptedConnection(data)).receive()
    return checked(message, VOTE) if message is not None else None


class _Packets:
    """The packets of a worker on this machine, before and after its hello."""

    def __init__(self) -> None:
        self._slot = SharedBuffers.create(SIZES)
        self.hello = b"\1" + to_json({**JOIN, "sizes": SIZES, **FACTS}).encode()
        push = shared_memory._PUSH.pack(2, 0, 0, 0, 4, 32, 0.5, 0.1, 0.2, 0.3, -1.0)
        metrics = b"\4" + to_json({"accuracy": "0.5"}).encode()
        self.messages = [push, metrics, b"\5\1", b"\6" + bytes(4), b"\10\0"]
        self._greeted = SharedMemoryPeer(socket.socket(), 0, 0)
        self._greeted.connection.close()

    def greet(self, packet: bytes) -> object:
        peer = SharedMemoryPeer(self._greeted.connection, 0, 0)
        hello = peer._hello(packet or b"\0", [os.dup(self._slot.segment.fd)])
        assert peer.slot is not None
        return hello

    def hear(self, packet: bytes) -> object:
        return self._greeted._message(packet or b"\0", self._slot)


def _codec_targets() -> dict[str, Target]:
    found = {}
    for name in CODECS:
        codec, out = build_codec(name, LAYOUT), torch.empty(LAYOUT.size)
        payload = torch.zeros(codec.capacity, dtype=torch.uint8)
        update = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
        count = codec.encode(update, codec.start(), payload)

        def decode(data: bytes, decoder: Any = codec, out: torch.Tensor = out) -> object:
            place = torch.empty(len(data), dtype=torch.uint8)
            view(place)[:] = data
            decoder.decode(place, out)
            return out

        found[f"codec {name}"] = Target([bytes(payload[:count].numpy().tobytes())], decode)
        size = SPAN.stop - SPAN.start
        part = slice_codec(codec, SPAN, build_codec(name, pack([("all", (size,), True)]), first=SPAN.start))
        cut = torch.zeros(part.capacity, dtype=torch.uint8)
        count = part.extract(payload[:count], cut)

        def decode_part(data: bytes, decoder: Any = part, decode: Any = decode) -> object:
            return decode(data, decoder, torch.empty(SPAN.stop - SPAN.start))

        found[f"codec {name}, one server's part"] = Target([bytes(cut[:count].numpy().tobytes())], decode_part)
    return found


def make_targets() -> dict[str, Target]:
    """All decoders, by name."""
    packets, greeted, looping = _Packets(), _greeted(), _greeted(LOOP_HELLO, None)
    wanted = [header(FrameKind.WANTED, 0), _reply_frame(False, b"", bytes(32)), REFUSED]
    members, weights = bytes([2, 0, 0, 0, 0, 0, 1, 0]), bytes(32)
    sent = [_fields(FrameKind.SEEN, offset=0, size=9, age=0.5) + _framed(FrameKind.BODY, bytes(9)), REFUSED]
    orders = [["Push", 0, 0, 1, 1, 4, "0.5", None], ["Join", 0, 0, None, 1, False], ["Leave", 0, 0], ["Resume", 0, 0]]
    orders = [_fields(FrameKind.SHARD, input=words, finite=True) for words in orders]  # type: ignore[misc]
    votes = [_fields(FrameKind.SHARD, part=[0, 0, 3], finite=True, nbytes=9), _fields(FrameKind.SHARD, beat=True)]

    def message(data: bytes) -> object:
        greeted.left, greeted._filler, greeted._seq = False, None, {}
        return _through(greeted, data)

    def request(data: bytes) -> object:
        looping.left, looping._filler, looping._seq, looping._request = False, None, {}, (0, RequestKind.WEIGHTS)
        return _through(looping, data)

    return {
        "request to join": Target(APPLICATIONS, _application),
        "hello": Target([HELLO], lambda data: _through(TcpPeer(ScriptedConnection(), 0, 0, SIZES), data)),
        "push, metrics, beat": Target(MESSAGES, message),
        "hello of an own loop": Target([LOOP_HELLO], _loop_hello),
        "request of an own loop": Target(REQUESTS, request),
        "initial tensors": Target([INITIAL], _initial),
        "greeting of an own loop": Target(wanted, _greeting),
        "weights for an own loop": Target([_answer_frame(bytes(32)), REFUSED], _answer(RequestKind.WEIGHTS)),
        "statistics for an own loop": Target([_answer_frame(bytes(8)), REFUSED], _answer(RequestKind.STATISTICS)),
        "optimizer for an own loop": Target(
            [_answer_frame(save({"0.step": torch.ones(1)})), REFUSED], _answer(RequestKind.OPTIMIZER)
        ),
        "welcome": Target([_fields(FrameKind.WELCOME, **WELCOME), REFUSED], _read(handshake._welcome)),
        "reply": Target([_reply_frame(False, members, weights), REFUSED], _reply(SIZES)),
        "encoded reply": Target([_reply_frame(True, b"", bytes(24))], _reply(PULLING)),
        "part of a file": Target(sent, _read(lambda: file_client._piece(0, 64))),
        "request for a file": Target([_fields(FrameKind.LOOK, file="events.jsonl", offset=0, most=9)], _read(_look)),
        "order to a server": Target([*orders, _framed(FrameKind.BODY, bytes(16))], _order),
        "vote of a server": Target(votes, _vote),
        "hello in shared memory": Target([packets.hello], packets.greet),
        "push in shared memory": Target(packets.messages, packets.hear),
        **_codec_targets(),
    }


_TOKEN = re.compile(rb'-?\d+(\.\d+)?|"[^"]*"|null|true|false')


def mutate(rng: random.Random, valid: bytes) -> bytes:
    """Return a message like `valid` with a few things wrong, or noise."""
    data = bytearray(valid)
    way = rng.randrange(8)
    if way == 0:
        return rng.randbytes(rng.randrange(200))
    if way == 1:
        kind, body = rng.randrange(max(FrameKind) + 2), rng.randbytes(rng.randrange(100))
        return b"PACE" + bytes([frames.VERSION, kind, 0, 0]) + len(body).to_bytes(8, "little") + body
    if way == 2 and data:
        del data[rng.randrange(len(data)) :]
    elif way in (3, 4):
        return _with_other_word(rng, valid)
    elif way == 5:
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.randbytes(rng.randrange(1, 20))
    for _ in range(rng.randrange(1, 4) if data else 0):
        at = rng.randrange(len(data))
        data[at] = data[at] ^ 1 << rng.randrange(8) if rng.random() < 0.5 else rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(data)


def _with_other_word(rng: random.Random, valid: bytes) -> bytes:
    """Replace one number or text of a JSON message, and correct the size in the header of its frame."""
    is_frame = valid[:4] == b"PACE"
    head, body = (valid[:16], valid[16:]) if is_frame else (valid[:1], valid[1:])
    found = list(_TOKEN.finditer(body))
    if not found or body[:1] != b"{":
        return valid[: rng.randrange(len(valid) + 1)]
    one = rng.choice(found)
    body = body[: one.start()] + rng.choice(WORDS).encode() + body[one.end() :]
    return (head[:8] + len(body).to_bytes(8, "little") if is_frame else head) + body


@dataclass
class Outcomes:
    """What became of the messages: how many ended how, and the first escapes."""

    counts: Counter[str] = field(default_factory=Counter)
    escapes: dict[str, str] = field(default_factory=dict)

    def feed(self, name: str, target: Target, data: bytes) -> None:
        """Give a decoder these bytes."""
        try:
            found = target.feed(data)
        except AT_FAULT as error:
            self.counts[type(error).__name__] += 1
        except Exception as error:
            self.counts[f"ESCAPED {type(error).__name__}"] += 1
            self.escapes.setdefault(f"{name}: {type(error).__name__}: {error}", data[:200].hex())
        else:
            self.counts["read" if found is not None else "incomplete"] += 1


def memory_mib() -> float:
    """Return the peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = pairs.flags(__doc__)
    parser.add_argument("--count", type=int, help=f"frames in all [{COUNT:,}; with --quick {QUICK_COUNT:,}]")
    parser.add_argument("--seed", type=int, default=0, help="of all mutations [%(default)s]")
    parsed = parser.parse_args()
    count = parsed.count or (QUICK_COUNT if parsed.quick else COUNT)
    torch.set_num_threads(1)
    targets, outcomes, rng = make_targets(), Outcomes(), random.Random(parsed.seed)
    for name, target in targets.items():
        for valid in target.valid:
            outcomes.feed(name, target, valid)
    refusals = sum(target.valid.count(REFUSED) for target in targets.values())
    refused = sum(outcomes.counts[error.__name__] for error in AT_FAULT) - refusals
    names, before, began = list(targets), memory_mib(), time.perf_counter()
    for number in range(count):
        name = names[number % len(names)]
        target = targets[name]
        outcomes.feed(name, target, mutate(rng, rng.choice(target.valid)))
    seconds, after = time.perf_counter() - began, memory_mib()
    print(f"{count:,} frames for {len(targets)} decoders in {seconds:.1f} s: {count / seconds:,.0f} frames/s")
    for outcome, times in outcomes.counts.most_common():
        print(f"  {times:>10,}  {outcome}")
    print(f"peak of memory {before:.1f} -> {after:.1f} MiB; {max(0, refused)} valid messages refused")
    for what, data in list(outcomes.escapes.items())[:20]:
        print(f"ESCAPED {what}\n  {data}")
    safe = not outcomes.escapes and after - before < MOST_GROWTH_MIB
    print("safe" if safe else "NOT SAFE: an exception would have ended a process, or memory grew")
    facts = {"frames": count, "seconds": seconds, "outcomes": dict(outcomes.counts), "memory": [before, after]}
    return pairs.close(parsed, "fuzz", [], **facts, safe=safe) or int(parsed.strict and not safe)


if __name__ == "__main__":
    sys.exit(main())
