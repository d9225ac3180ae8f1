"""Doors over TCP: what shared memory gives, through cuts of the wire at any byte, and with every push counted once."""

from __future__ import annotations

import gc
import shutil
import socket
import subprocess
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.buffers import BufferSizes, WorkerBuffers, view
from paceline.core.compression import DENSE, Codecs
from paceline.core.messages import Disposition, Input, Join, Leave, Outcome, Push, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import Roster, Server
from paceline.errors import ProtocolError, UnknownWorker, UserError
from paceline.transports import tcp_client as tcp_worker
from paceline.transports.connection import Connection
from paceline.transports.frames import PUSH_HEAD, Ending, FrameKind, beat_frame, fields_frame, header, padding
from paceline.transports.protocol import HEARD, Hello, Keepalive, ReportedFigures, parse_sizes, require_fitting
from paceline.transports.shared_memory import SharedBuffers, SharedMemoryClient, SharedMemoryPeer, channel
from paceline.transports.tcp_client import TcpClient
from paceline.transports.tcp_server import TcpPeer
from paceline.transports.tls import fingerprint, make_certificate, server_tls, worker_tls
from tests.support.small_star import (
    LAYOUT,
    TIMING,
    TOKEN,
    Star,
    Told,
    Wire,
    answer,
    codecs,
    make_server,
    own_size,
    work,
)
from tests.support.waiting import until

pytestmark = pytest.mark.long  # left to `make test`

UPDATES = 4
USED = [(None, None), ("int8", None), (None, "int8"), ("topk:0.1", "bf16")]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_worker, "FIRST_PAUSE", 0.001)


def through_shared_memory(
    used: Codecs, server: Server | None = None, pushed: list[float | None] | None = None
) -> tuple[Told, torch.Tensor]:
    """The same exchange on one machine."""
    server, (ours, theirs) = server or make_server(used, UPDATES), channel()
    door = SharedMemoryPeer(ours, 0, 0)

    def serve() -> None:
        while (message := door.receive()) is not None:
            assert not isinstance(message, ReportedFigures)
            if pushed is not None and isinstance(message, Push):
                pushed.append(message.weight)
            answer(server, message.join if isinstance(message, Hello) else message, door)

    thread = threading.Thread(target=serve)
    thread.start()
    worker = SharedMemoryClient(theirs, max_workers=server.max_workers)
    told = work(worker, used, SharedBuffers.create)
    worker.close()
    thread.join(10)
    ours.close()
    return told, server.weights


def through_tcp(star: Star, used: Codecs, address: str | None = None, **given: Any) -> Told:
    door = TcpClient(address or star.listener.address, TOKEN, **given)
    assert door.apply({"version": "1"})["worker"] == 0
    told = work(door, used)
    door.report({"seconds": 1.5})
    door.close()
    return told


@pytest.mark.parametrize("names", USED)
def test_a_worker_cannot_tell_tcp_from_shared_memory(names: tuple[str | None, str | None]) -> None:
    used = codecs(*names)
    expected, weights = through_shared_memory(used)
    with Star(used, UPDATES) as star:
        told = through_tcp(star, used)
        assert told == expected and len(told.rows) == UPDATES + 1
        assert torch.equal(star.server.weights, weights)
    assert not star.errors


def test_both_ends_keep_what_shared_memory_keeps() -> None:
    """State rides behind each push; timing, figures and the own state that was asked for come along."""
    used = codecs("int8", None)
    with Star(used, UPDATES) as star:
        star.want_own = True
        told = through_tcp(star, used)
        until(lambda: star.figures, "the figures")
        assert star.figures[0].values == {"seconds": 1.5}
        assert star.doors[0].timing == TIMING
        assert star.server.worker_states[0].tolist() == [float(UPDATES)] * 3
        assert list(star.kept) == [0, 1, 2, 3]
        weights = list[float | None]()
        through_shared_memory(used, pushed=weights)
        assert star.weights == weights == [0.75, None, 2.75, None]
        assert all(torch.equal(star.kept[seq], told.local_state[seq]) for seq in star.kept)
        assert len(told.local_state[0]) == own_size(used) > 0


@pytest.mark.parametrize("cuts", [[], [("up", 1500), ("down", 1600), ("up", 900), ("down", 700)]])
def test_a_worker_learns_of_dropped_pushes_and_both_ends_keep_the_earlier_state(
    cuts: list[tuple[str, int]],
) -> None:
    """Its own state sums gradients that depend on the weights, and on every push that counted."""
    used = codecs("int8", None)
    expected, weights = through_shared_memory(used, make_server(used, UPDATES, drops=True))
    assert [reply.discarded for reply, *_ in expected.rows] == [0, 0, 1, 2, 2, 2, 3, 4, 4]
    for before, after in ((0, 1), (1, 2), (4, 5), (5, 6)):
        assert torch.equal(expected.local_state[before], expected.local_state[after])
    star = Star(used, UPDATES)
    star.server, star.want_own = make_server(used, UPDATES, drops=True), True
    with star, Wire(star.listener.address, cuts) as wire:
        told = through_tcp(star, used, wire.address)
        assert told == expected and torch.equal(star.server.weights, weights)
        assert wire.num_connections == len(cuts) + 1
        assert set(star.kept) <= set(range(8)) and len(star.kept) > 3
        assert all(torch.equal(state, expected.local_state[seq]) for seq, state in star.kept.items())


class Restless(Server):
    """Others come and go while worker 0 works, so that it is dealt other data with almost every reply."""

    def handle(self, message: Input) -> Outcome:
        outcome = super().handle(message)
        if isinstance(message, Push) and outcome.disposition != Disposition.REPEATED and not self.finished:
            other = self.pushes % 3 + 1
            super().handle(Leave(1, 0) if other == 3 else Join(other, 0))
        return outcome


def restless() -> Restless:
    training = Training(Budget(12, 12), Schedule(0.1))
    return Restless(torch.ones(LAYOUT.size), Plain(Sgd()), Async(), training, Roster(1, 4))


@pytest.mark.parametrize("cuts", [[], [("down", 900), ("down", 700)], [("up", 1500), ("down", 800), ("up", 900)]])
def test_deals_cross_the_wire_and_are_told_again_where_it_broke(cuts: list[tuple[str, int]]) -> None:
    expected, weights = through_shared_memory(DENSE, restless())
    assignments = [reply.assignment for reply, *_ in expected.rows]
    assert assignments[:2] == [None, None] and assignments[-1] is not None and len(set(assignments)) > 2
    star = Star(DENSE, UPDATES)
    star.server = restless()
    with star, Wire(star.listener.address, cuts) as wire:
        assert through_tcp(star, DENSE, wire.address) == expected
        assert torch.equal(star.server.weights, weights)
    assert not star.errors and wire.num_connections == len(cuts) + 1


HANDSHAKE = 72 + 16 + len('{"version": "1"}')
CUTS = [
    [("up", 0)],
    [("up", 40)],
    [("up", HANDSHAKE - 1)],
    [("up", HANDSHAKE + 16)],
    [("up", HANDSHAKE + 400)],
    [("up", HANDSHAKE + 800), ("up", 300), ("up", 500), ("up", 900)],
    [("down", 0)],
    [("down", 100)],
    [("down", 200)],
    [("down", 700), ("down", 800), ("down", 200)],
    [("down", 1500), ("up", 1200), ("down", 900)],
]


@pytest.mark.parametrize("cuts", CUTS)
def test_a_wire_that_breaks_changes_nothing(cuts: list[tuple[str, int]]) -> None:
    used = codecs("int8", "bf16")
    expected, weights = through_shared_memory(used)
    with Star(used, UPDATES) as star, Wire(star.listener.address, cuts) as wire:
        told = through_tcp(star, used, wire.address)
        assert wire.num_connections > 1, "it did break"
        assert told == expected
        assert torch.equal(star.server.weights, weights)
        assert star.verdicts.count(Disposition.TAKEN) == UPDATES + 1, "each push counts once, and so does the join"
        assert star.server.pushes == UPDATES


def test_a_push_that_was_taken_is_answered_again_and_not_applied_again() -> None:
    """The wire breaks after the whole push and before its reply."""
    with Star(DENSE, UPDATES) as star, Wire(star.listener.address, [("down", 1150)]) as wire:
        through_tcp(star, DENSE, wire.address)
        assert star.verdicts.count(Disposition.REPEATED) == 1
        assert star.server.version == UPDATES


def test_a_server_that_was_started_anew_is_told_from_one_that_remembers() -> None:
    with Star(DENSE, UPDATES) as star:
        address = star.listener.address
        door = TcpClient(address, TOKEN)
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        reply = door.hello(Join(0, 0), memory, {})
        assert reply is not None
        star.doors[0].connection.sock.shutdown(socket.SHUT_RDWR)
        star.forget()
        push = Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state)
        with pytest.raises(UnknownWorker) as forgotten:
            door.exchange(push, TIMING)
        assert forgotten.value.welcome["incarnation"] == 0
        assert star.applied[1].items() > {"again": True, "worker": 0, "incarnation": 0}.items()
        star.server = make_server(DENSE, UPDATES)
        assert door.hello(Join(0, 1), memory, {}) == Reply(0, 0, 0, 0, 0)._replace(incarnation=1)
        door.close()


def test_patience_ends() -> None:
    with Star(DENSE, UPDATES) as star:
        door = TcpClient(star.listener.address, TOKEN, patience=0.05)
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
    assert door.exchange(Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state), TIMING) is None
    assert door.farewell is None
    door.close()


def test_a_worker_that_is_sent_away_knows_why() -> None:
    with Star(DENSE, UPDATES) as star:
        with pytest.raises(UserError, match="nobody wants green"):
            TcpClient(star.listener.address, TOKEN).apply({"device": "green"})
        door = TcpClient(star.listener.address, TOKEN)
        door.apply({})
        with pytest.raises(UserError, match="worker 0 sent buffers with weights of 4000000000"):
            door.hello(
                Join(0, 0),
                WorkerBuffers(BufferSizes(4_000_000_000), WorkerBuffers.private(BufferSizes(1)).__dict__ | PARTS),
                {},
            )
        assert star.doors[0].slot is None, "no memory was taken"
        door.close()


PARTS = {"pulled": torch.empty(0, dtype=torch.uint8), "local_state": torch.empty(0, dtype=torch.uint8)}


def test_beats_are_heard_while_computing_and_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with Star(DENSE, UPDATES) as star:
        door = TcpClient(star.listener.address, TOKEN, beat=0.01)
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
        first = star.doors[0].last_heard
        until(lambda: star.doors[0].last_heard != first, "a heartbeat")
        held, take = threading.Event(), star.handle

        def hold(message: Join | Push, theirs: TcpPeer) -> None:
            """Answer only after two heartbeats have come behind the push."""
            for _ in range(2):
                before = theirs.last_heard
                until(lambda: theirs.receive() is HEARD and theirs.last_heard > before, "a heartbeat")  # noqa: B023
            held.set()
            take(message, theirs)

        monkeypatch.setattr(star, "handle", hold)
        assert door.exchange(Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state), TIMING) is not None
        assert held.is_set()
        door.close()
        until(lambda: star.doors[0].left, "the farewell")


def test_a_broken_connection_is_opened_again_while_the_worker_computes() -> None:
    with Star(DENSE, UPDATES) as star:
        door = TcpClient(star.listener.address, TOKEN, beat=0.01)
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
        star.doors[0].connection.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: len(star.applied) == 2, "a second handshake")
        assert star.applied[1]["again"]
        reply = door.exchange(Push(0, 0, 0, 0, 2, 0.5, memory.update, memory.state), TIMING)
        assert reply is not None and reply.serial == 1
        door.close()


def test_an_address_where_nobody_listens_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UserError, match="cannot be reached"):
        TcpClient(address, TOKEN).apply({}, patience=0.01)


class Pair:
    """A server's door, and the raw bytes of its worker's end."""

    def __init__(self, largest: BufferSizes) -> None:
        ours, self.raw = socket.socketpair()
        ours.setblocking(False)
        self.door = TcpPeer(Connection(ours, "a test", waits=False), 0, 0, largest)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        self.door.connection.close()
        self.raw.close()

    def greet(self, sizes: BufferSizes) -> None:
        fields = {"quota": None, "threads": 1, "sizes": sizes}
        self.raw.sendall(fields_frame(FrameKind.HELLO, fields, 1 << 20))
        assert isinstance(self.door.receive(), Hello)


SIZES = BufferSizes(8, 2, None, None, 0)
BODY = bytes(range(40))


def push_bytes(seq: int, body: bytes = BODY, update: int = 32, state: int = 8, local_state: int = 0) -> bytes:
    head = PUSH_HEAD.pack(seq, seq, 2, 0, update, state, local_state, 0, 0.5, *TIMING, 0.0)
    pad = padding(len(body))
    return header(FrameKind.PUSH, len(head) + len(body) + len(pad)) + head + body + pad


def test_a_push_byte_by_byte_counts_with_its_last_byte() -> None:
    with Pair(SIZES) as pair:
        pair.greet(SIZES)
        whole = push_bytes(0)
        for byte in whole[:-1]:
            pair.raw.sendall(bytes([byte]))
            assert pair.door.receive() is Keepalive.PARTIAL
        pair.raw.sendall(whole[-1:])
        message = pair.door.receive()
        assert isinstance(message, Push) and message.seq == 0
        assert bytes(view(message.update)) + bytes(view(message.state)) == BODY


def test_a_repeated_push_leaves_the_memory_that_is_held_as_it_is() -> None:
    with Pair(SIZES) as pair:
        pair.greet(SIZES)
        pair.raw.sendall(push_bytes(0))
        held = pair.door.receive()
        assert isinstance(held, Push)
        pair.raw.sendall(push_bytes(0, bytes(40)))
        again = pair.door.receive()
        assert isinstance(again, Push) and again.seq == 0
        assert bytes(view(held.update)) == BODY[:32]
        pair.raw.sendall(push_bytes(1, bytes(40)))
        pair.door.receive()
        assert bytes(view(held.update)) == bytes(32)


@pytest.mark.parametrize(
    "bad",
    [
        push_bytes(0, BODY + b"x" * 9),
        push_bytes(0, BODY[:-8]),
        push_bytes(0, update=31, state=9),
        push_bytes(0, update=1 << 63, state=1 << 63, local_state=40),
        push_bytes(0, local_state=8),
        header(FrameKind.PUSH, 10),
        header(FrameKind.PUSH, 1 << 40),
        header(FrameKind.BEAT, 1),
        header(FrameKind.REPLY, 0),
        fields_frame(FrameKind.HELLO, {"quota": None, "threads": 1, "sizes": [7, 2, None, None, 0]}, 1000),
        fields_frame(FrameKind.HELLO, {"threads": 1, "sizes": SIZES}, 1000),
        fields_frame(FrameKind.FIGURES, {"a": "b"}, 1000),
        b"GET / HTTP/1.0\r\n\r\n",
    ],
)
def test_a_malformed_message_is_its_workers_fault_and_changes_nothing(bad: bytes) -> None:
    with Pair(SIZES) as pair:
        pair.greet(SIZES)
        assert pair.door.slot is not None
        pair.door.slot.update.fill_(3.0)
        pair.raw.sendall(bad)
        with pytest.raises(ProtocolError, match="worker 0 sent"):
            pair.door.receive()
        assert pair.door.slot.update.tolist() == [3.0] * 8


@pytest.mark.parametrize("said", [b"", push_bytes(0)[:90], push_bytes(0)], ids=["nothing", "a piece", "a push"])
def test_a_door_that_is_dropped_gives_its_memory_back_at_once(said: bytes) -> None:
    with Pair(SIZES) as pair:
        pair.greet(SIZES)
        door, pair.door = pair.door, TcpPeer(pair.door.connection, 0, 0, SIZES)
        assert door.slot is not None
        memory = weakref.ref(door.slot)
        pair.raw.sendall(said)
        door.receive()
        gc.disable()
        try:
            door.close()
            del door
            assert memory() is None
        finally:
            gc.enable()


def test_a_push_before_the_hello_is_refused() -> None:
    with Pair(SIZES) as pair:
        pair.raw.sendall(push_bytes(0))
        with pytest.raises(ProtocolError, match="'push' instead of"):
            pair.door.receive()


def test_a_reply_that_does_not_fit_the_wire_goes_piece_by_piece() -> None:
    large = BufferSizes(3_000_000)
    with Pair(large) as pair:
        pair.greet(large)
        assert pair.door.slot is not None
        pair.door.slot.weights.copy_(torch.arange(3_000_000))
        pair.door.answer(Reply(0, 0, 0, 0, 0))
        assert pair.door.wants_write
        got = bytearray()
        while pair.door.wants_write:
            got += pair.raw.recv(1 << 20)
            pair.door.flush()
        pair.raw.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                got += pair.raw.recv(1 << 20)
        assert bytes(got[-12_000_000:]) == bytes(view(pair.door.slot.weights))


@pytest.mark.parametrize(
    "asked", [None, [1], [1, 2, 3, 4, True], ["8", 2, None, None, 0], [8, 2, 0, None, 0], [-1] * 5]
)
def test_sizes_that_are_not_as_expected_take_no_memory(asked: Any) -> None:
    with pytest.raises(ProtocolError):
        require_fitting(parse_sizes(asked), SIZES)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not here")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_the_same_over_tls(certificate: tuple[Path, Path]) -> None:
    tls = server_tls(*certificate)
    used = codecs("int8", "bf16")
    expected, _ = through_shared_memory(used)
    with Star(used, UPDATES, tls) as star:
        assert through_tcp(star, used, tls=worker_tls(tls.fingerprint), beat=0.001) == expected
    with Star(used, UPDATES, tls) as star, Wire(star.listener.address, [("up", 900), ("down", 1500)]) as wire:
        assert through_tcp(star, used, wire.address, tls=worker_tls()) == expected
        assert wire.num_connections == 3


def test_a_large_reply_crosses_tls(certificate: tuple[Path, Path]) -> None:
    with Star(DENSE, UPDATES, server_tls(*certificate)) as star:
        star.largest = BufferSizes(1_000_000)
        door = TcpClient(star.listener.address, TOKEN, worker_tls())
        door.apply({})
        star.server.weights = torch.arange(1_000_000.0)
        memory = WorkerBuffers.private(BufferSizes(1_000_000))
        assert door.hello(Join(0, 0), memory, {}) is not None
        assert torch.equal(memory.weights, star.server.weights)
        door.close()


def test_another_certificate_is_refused(certificate: tuple[Path, Path]) -> None:
    with Star(DENSE, UPDATES, server_tls(*certificate)) as star:
        with pytest.raises(UserError, match="is it the right server"):
            TcpClient(star.listener.address, TOKEN, worker_tls(fingerprint(b"other"))).apply({})
        with pytest.raises(UserError, match="not trusted"):
            TcpClient(star.listener.address, TOKEN, worker_tls(authorities=certificate[0])).apply({})


def test_a_certificate_of_another_time_is_refused_with_the_time_here(tmp_path: Path) -> None:
    _, key = make_certificate(tmp_path)
    request, names, expired = (tmp_path / name for name in ("request.pem", "names", "expired.pem"))
    names.write_text("subjectAltName = IP:127.0.0.1")
    ask = f"openssl req -new -key {key} -subj /CN=paceline -out {request}"
    sign = f"openssl x509 -req -in {request} -signkey {key} -days -1 -extfile {names} -out {expired}"
    for command in (ask, sign):
        subprocess.run(command.split(), check=True, capture_output=True)
    message = r"not trusted \(certificate has expired; here it is \d{4}-"
    with Star(DENSE, UPDATES, server_tls(expired, key)) as star, pytest.raises(UserError, match=message):
        TcpClient(star.listener.address, TOKEN, worker_tls(authorities=expired)).apply({})


@pytest.mark.parametrize("at_the_server", [True, False])
def test_tls_at_one_end_alone_is_one_clear_line(certificate: tuple[Path, Path], at_the_server: bool) -> None:
    ours, theirs = (None, server_tls(*certificate)) if at_the_server else (worker_tls(), None)
    message = (
        "speaks TLS, and we do not" if at_the_server else "does not speak TLS, and we do: start its server with --tls"
    )
    with Star(DENSE, UPDATES, theirs) as star, pytest.raises(UserError, match=message):
        TcpClient(star.listener.address, TOKEN, ours).apply({}, patience=0.5)


def test_bad_certificates_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="not a certificate and its key"):
        server_tls(tmp_path / "nowhere", tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no certificates"):
        worker_tls(authorities=tmp_path / "nowhere")
    with pytest.raises(UserError, match="64 digits"):
        worker_tls("sha256:12")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="openssl"):
        make_certificate(tmp_path / "new")


def test_heartbeats_tell_progress_from_liveness() -> None:
    with Pair(SIZES) as pair:
        pair.greet(SIZES)
        for num_steps, found in ((0, HEARD), (3, Keepalive.STEPPED), (3, HEARD), (2, HEARD), (4, Keepalive.STEPPED)):
            pair.raw.sendall(beat_frame(num_steps))
            assert pair.door.receive() is found


def test_a_worker_counts_its_steps_in_its_heartbeats() -> None:
    """Also those within one push: it makes them while a thread sends the heartbeats."""
    found: list[object] = []
    with Star(DENSE, UPDATES) as star:
        door = TcpClient(star.listener.address, TOKEN, beat=0.01)
        door.apply({})
        memory = WorkerBuffers.private(BufferSizes(star.server.weights.numel(), 3))
        assert door.hello(Join(0, 0), memory, {}) is not None
        receive = star.doors[0].receive
        star.doors[0].receive = lambda: found.append(receive()) or HEARD  # type: ignore[method-assign,func-returns-value]
        until(lambda: HEARD in found, "a heartbeat without a step")
        assert Keepalive.STEPPED not in found
        steps = iter(range(1, 10_000))
        door.num_steps = lambda: next(steps)
        until(lambda: Keepalive.STEPPED in found, "a heartbeat after a step")
        door.close()


@pytest.mark.parametrize("ending", Ending)
def test_a_worker_knows_why_it_is_to_leave(ending: Ending) -> None:
    with Star(DENSE, UPDATES) as star:
        door = TcpClient(star.listener.address, TOKEN)
        door.apply({})
        until(lambda: star.doors, "its place")
        star.doors[0].ending = ending
        told = work(door, DENSE)
        reply = told.rows[-1][0]
        assert reply.finished and door.ending == ending and reply.released is (ending is Ending.DRAINED)
        door.close()
