"""Strangers: each costs a few bytes for a short while, and nothing he sends is worth anything without the token."""

from __future__ import annotations

import contextlib
import errno
import gc
import random
import select
import shutil
import socket
import threading
import time
import weakref
from pathlib import Path

import pytest

from paceline.core.compression import DENSE
from paceline.errors import UserError
from paceline.transports import listener as listener_module
from paceline.transports.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, DENIAL, PROOF_NBYTES, ClientHandshake, read_only
from paceline.transports.connection import parse_address
from paceline.transports.file_client import FileClient
from paceline.transports.frames import MAX_APPLY, VERSION, FrameKind, FrameReader, fields_frame, header
from paceline.transports.handshake import TlsExpected
from paceline.transports.listener import APPLICATION, MAX_SHARE, MAX_UNPAUSED, JoinRequest, Listener
from paceline.transports.tcp_client import TcpClient
from paceline.transports.tls import Tls, make_certificate, server_tls, worker_tls
from tests.support.small_star import TOKEN, Star, Wire, work
from tests.support.strangers import ENDS, PHASES, SILENT, Stranger
from tests.support.waiting import until


class Hall:
    """A listener that is served by hand, at a time of our choosing."""

    def __init__(self, most: int = 256, token: bytes = TOKEN, tls: Tls | None = None) -> None:
        self.listener, self.now = Listener("127.0.0.1:0", token, tls, most=most, seconds=10.0), 0.0
        self.tls, self.requests = tls, list[JoinRequest]()
        self.visitors: list[socket.socket] = []

    def __enter__(self) -> Hall:
        return self

    def __exit__(self, *exception: object) -> None:
        self.listener.close()
        for visitor in self.visitors:
            visitor.close()

    def knock(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection that was let in."""
        visitor = socket.create_connection(parse_address(self.listener.address), 5, (source, 0))
        self.visitors.append(visitor)
        assert self.serve() == []
        return visitor

    def serve(self) -> list[JoinRequest]:
        found = self.listener.serve(self.now)
        self.requests += found
        for applicant in found:
            applicant.connection.close()
        return found

    def stranger(self) -> Stranger:
        """A connection that was not let in yet."""
        return Stranger(self.listener.address, self.tls, TOKEN, self.serve)

    def prove(self, visitor: socket.socket) -> None:
        """As one who knows the token."""
        proof = ClientHandshake(TOKEN)
        visitor.sendall(proof.answer(visitor.recv(CHALLENGE_NBYTES)))
        assert self.serve() == []
        proof.check(visitor.recv(PROOF_NBYTES))


def is_closed(visitor: socket.socket, seconds: float = 5.0) -> bool:
    """Whether all that comes is an end."""
    visitor.settimeout(seconds)
    try:
        while visitor.recv(1000):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(scope="module")
def server_side(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The certificate of a server."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    return server_tls(*make_certificate(tmp_path_factory.mktemp("tls")))


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(("encrypted", "phase"), [(tls, phase) for tls in PHASES for phase in PHASES[tls]])
def test_a_connection_that_ends_at_any_moment_ends_alone(
    encrypted: bool, phase: str, how: str, request: pytest.FixtureRequest
) -> None:
    with Hall(tls=request.getfixturevalue("server_side") if encrypted else None) as hall:
        with hall.stranger() as stranger:
            assert phase in stranger.phases()
            stranger.end(how)
            hall.serve()
            hall.serve()
            assert not hall.listener.strangers and hall.listener.num_refused == 1
            said = hall.listener.complaints()
            assert (
                len(said) == int(phase not in SILENT)
                and all("was turned away: " in text for text in said)
                and not hall.requests
            )
        with hall.stranger() as honest:
            list(honest.phases())
            assert [found.fields["worker"] for found in hall.requests] == [3]
        assert hall.listener.num_refused == 1 and not hall.listener.strangers


def test_a_worker_that_tries_whether_a_server_speaks_tls_is_no_intruder(server_side: Tls) -> None:
    def join_plainly() -> None:
        with contextlib.suppress(TlsExpected):
            TcpClient(hall.listener.address, TOKEN, patience=5).apply({})

    with Hall(tls=server_side) as hall:
        trying = threading.Thread(target=join_plainly)
        trying.start()
        while trying.is_alive():
            hall.serve()
            trying.join(0.01)
        hall.serve()
        assert hall.listener.complaints() == [] and hall.requests == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), ValueError("odd"), AttributeError("odd")])
def test_whatever_a_handshake_raises_ends_that_connection_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise error

    with Hall() as hall:
        visitor = hall.knock()
        with monkeypatch.context() as patch:
            patch.setattr(FrameReader, "fill", fails)
            visitor.sendall(b"P")
            assert hall.serve() == [] and not hall.listener.strangers
        assert is_closed(visitor) and hall.listener.num_refused == 1
        assert hall.knock()


def test_who_proves_and_applies_is_an_applicant() -> None:
    with Hall() as hall:
        visitor = hall.knock()
        hall.prove(visitor)
        visitor.sendall(fields_frame(FrameKind.APPLY, {"worker": 3, "who": "a worker"}, MAX_APPLY))
        (applicant,) = hall.serve()
        assert applicant.fields["worker"] == 3 and applicant.fields.keys() == APPLICATION.keys()
        assert applicant.peer == f"127.0.0.1:{visitor.getsockname()[1]}"
        assert not hall.listener.strangers and not hall.listener.complaints()


def test_a_stranger_may_take_his_time_byte_by_byte_but_not_for_ever() -> None:
    with Hall() as hall:
        slow, drip = hall.knock(), hall.knock()
        answer = ClientHandshake(TOKEN).answer(slow.recv(CHALLENGE_NBYTES))
        for byte in answer:
            slow.sendall(bytes([byte]))
            assert hall.serve() == []
        assert len(slow.recv(PROOF_NBYTES)) == PROOF_NBYTES
        drip.sendall(b"P")
        hall.now = 9.9
        hall.serve()
        assert len(hall.listener.strangers) == 2
        drip.sendall(b"A")
        hall.now = 10.0
        hall.serve()
        assert not hall.listener.strangers and is_closed(slow) and is_closed(drip)
        assert all("no proof within 10 s" in text for text in hall.listener.complaints())


def test_a_flood_from_one_address_takes_no_place_from_others() -> None:
    with Hall(most=4) as hall:
        honest = hall.knock()
        flood = [hall.knock("127.0.0.2") for _ in range(20)]
        assert len(hall.listener.strangers) == 4 and hall.listener.num_refused == 17
        hall.prove(honest)
        assert sum(is_closed(visitor, seconds=0.01) for visitor in flood) == 17


def test_among_equals_one_is_closed_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it were the oldest, no newcomer would get through once a flood is faster than his handshake."""
    monkeypatch.setattr(listener_module.secrets, "choice", random.Random(1).choice)
    with Hall(most=8) as hall:
        numbers = {hall.knock().getsockname()[1]: number for number in range(40)}
        left = [numbers[parse_address(stranger.peer)[1]] for stranger in hall.listener.strangers.values()]
        assert len(left) == 8 and left == sorted(left)
        assert min(left) < 32 and max(left) < 40, "not the last eight, as always closing the oldest would leave"


def test_strangers_wait_after_they_took_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter(range(1000))
    with Hall() as hall:
        poll = select.poll()
        poll.register(hall.listener.fileno(), select.POLLIN)
        hall.knock()
        monkeypatch.setattr(listener_module.time, "thread_time", lambda: float(next(spent)))
        hall.knock()  # takes one second, by the clock above
        with socket.create_connection(parse_address(hall.listener.address)):
            assert not poll.poll(0), "a worker's message would be handled now"
            hall.listener.expire(0.9 / MAX_SHARE)
            assert not poll.poll(0)
            hall.listener.expire(1 / MAX_SHARE)
            assert poll.poll(0), "now that second is no more than their share"


def test_many_strangers_are_served_together_not_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module.time, "thread_time", lambda: 0.0)
    with Hall() as hall:
        poll = select.poll()
        poll.register(hall.listener.fileno(), select.POLLIN)
        for _ in range(MAX_UNPAUSED):
            hall.knock()
        assert not hall.listener.expire(0.0), "none had to wait yet"
        for _ in range(MAX_UNPAUSED + 1):
            hall.knock()
        with socket.create_connection(parse_address(hall.listener.address)):
            assert not poll.poll(0)
            assert hall.listener.expire(0.0) and poll.poll(0)


@pytest.mark.parametrize("said", [b"", b"P", bytes(ANSWER_NBYTES)])
def test_nothing_is_left_of_a_stranger_even_before_the_garbage_is_collected(said: bytes) -> None:
    """Else a flood takes memory until the collector looks at its oldest generation, which it seldom does."""
    with Hall() as hall:
        gc.disable()
        try:
            visitor = hall.knock()
            stranger = weakref.ref(next(iter(hall.listener.strangers.values())))
            visitor.sendall(said)
            hall.now = 9.0
            hall.serve()
            hall.now = 11.0
            hall.serve()
            assert hall.listener.num_refused == 1 and stranger() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("stranger_is_there", [True, False])
def test_when_descriptors_run_out_one_connection_is_closed(
    stranger_is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the poll would return at once for ever, because of a connection that nobody can accept."""

    class Full:
        """A socket that cannot accept the first time."""

        def __init__(self, real: socket.socket) -> None:
            self._real, self._left, self.fileno = real, 1, real.fileno

        def accept(self) -> tuple[socket.socket, object]:
            if self._left:
                self._left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._real.accept()

        def close(self) -> None:
            self._real.close()

    with Hall() as hall:
        first = hall.knock() if stranger_is_there else None
        monkeypatch.setattr(hall.listener, "_socket", Full(hall.listener._socket))
        second = hall.knock()
        assert is_closed(first or second) and len(hall.listener.strangers) == (first is not None)
        (text,) = hall.listener.complaints()
        assert "no descriptors" in text
        assert hall.knock() and hall.listener.num_refused == 1


WRONG = {
    "a wrong token": ClientHandshake(b"a guess"),
    "no token": ClientHandshake(b""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_token_is_told_and_sent_away(name: str) -> None:
    with Hall() as hall:
        visitor = hall.knock()
        visitor.sendall(WRONG[name].answer(visitor.recv(CHALLENGE_NBYTES)))
        assert hall.serve() == []
        assert visitor.recv(1000) == DENIAL and is_closed(visitor)
        (text,) = hall.listener.complaints()
        assert text.endswith("was turned away: a wrong token") and "127.0.0.1:" in text
        assert not hall.listener.strangers


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n" * 10, bytes(ANSWER_NBYTES), header(FrameKind.APPLY, 1 << 60) * 8, b"PACE\x07" + bytes(90)],
)
def test_noise_is_turned_away(noise: bytes) -> None:
    with Hall() as hall:
        visitor = hall.knock()
        visitor.sendall(noise)
        assert hall.serve() == [] and not hall.listener.strangers
        assert len(hall.listener.complaints()) == 1 and is_closed(visitor)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (header(FrameKind.APPLY, MAX_APPLY + 1), "at most 65536"),
        (header(FrameKind.PUSH, 10), "instead of apply"),
        (header(FrameKind.APPLY, 2) + b"[]", "not a JSON object"),
    ],
)
def test_one_who_knows_the_token_still_says_one_small_frame(frame: bytes, reason: str) -> None:
    with Hall() as hall:
        visitor = hall.knock()
        hall.prove(visitor)
        visitor.sendall(frame)
        assert hall.serve() == [] and not hall.listener.strangers
        assert reason in hall.listener.complaints()[0]


def test_one_who_hangs_up_is_forgotten() -> None:
    with Hall() as hall:
        hall.knock().close()
        hall.serve()
        assert not hall.listener.strangers


def test_a_recorded_conversation_replayed_is_turned_away() -> None:
    with Star() as star, Wire(star.listener.address, []) as wire:
        door = TcpClient(wire.address, TOKEN)
        door.apply({})
        work(door, DENSE)
        door.close()
        pushes = star.server.pushes
        assert pushes and len(wire.recorded[0]) > 1000
        with socket.create_connection(parse_address(star.listener.address), timeout=5) as thief:
            thief.sendall(wire.recorded[0])
            assert is_closed(thief)
        assert star.server.pushes == pushes and len(star.applied) == 1
    assert star.errors and "a wrong token" in star.errors[-1]


def test_complaints_of_a_flood_are_few_and_count_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with Hall() as hall:

        def annoy(times: int) -> list[str]:
            for _ in range(times):
                hall.knock().sendall(bytes(ANSWER_NBYTES))
                hall.serve()
            return hall.listener.complaints()

        monkeypatch.setattr(time, "monotonic", lambda: 100.0)
        assert len(annoy(1)) == 1, "the first is told at once"
        assert len(annoy(99)) == 2 and annoy(1) == [], "for the others it is too early"
        monkeypatch.setattr(time, "monotonic", lambda: 160.0)
        (text,) = hall.listener.complaints()
        assert text.startswith("and 98 others (101 so far), the last: 127.0.0.1:")
        assert len(annoy(10)) == 2 and hall.listener.num_refused == 111
        monkeypatch.setattr(time, "monotonic", lambda: 161.0)
        (text,) = hall.listener.complaints(all_of_them=True)
        assert text.startswith("and 8 others (111 so far)")


def test_a_worker_is_told_in_one_line_what_is_wrong() -> None:
    with Star() as star:
        with pytest.raises(UserError, match="does not accept our token: give the one"):
            TcpClient(star.listener.address, b"a guess").apply({})


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"220 mail.example.org ESMTP, what can we do for you?", "is not a Paceline server"),
        (
            b"PACE" + bytes([VERSION + 1]) + bytes(CHALLENGE_NBYTES - 5),
            f"speaks protocol {VERSION + 1}, .*install the same version",
        ),
    ],
)
def test_a_server_of_another_kind_is_known_by_its_greeting(greeting: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            visitor, _ = other.accept()
            with visitor, contextlib.suppress(ConnectionResetError):
                visitor.sendall(greeting)
                visitor.recv(1)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(UserError, match=reason):
            TcpClient(f"127.0.0.1:{other.getsockname()[1]}", TOKEN).apply({})
        thread.join(5)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_without_a_token_neither_end_begins(host: str) -> None:
    """A server without one would take anybody's pushes, and a worker would run what anybody's server says.

    On one machine too: any of its users can take the port of a server that has ended.
    """
    with pytest.raises(UserError, match="there is no token"):
        Listener(f"{host}:0", b"")
    with pytest.raises(UserError, match="there is no token"):
        TcpClient(f"{host}:7000", b"").apply({})
    with pytest.raises(UserError, match="there is no token"):
        FileClient(f"{host}:7000", b"")


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("fields", [{}, {"shard": True}, {"again": True, "worker": 0, "incarnation": 0}])
def test_the_token_of_observers_lets_nobody_join(tmp_path: Path, fields: dict[str, object], encrypted: bool) -> None:
    tls = server_tls(*make_certificate(tmp_path)) if encrypted else None
    with Star(tls=tls) as star:
        with pytest.raises(UserError, match="this token is for observers, who only read: a worker needs the run's own"):
            TcpClient(star.listener.address, read_only(TOKEN), worker_tls() if encrypted else None).apply(fields)
        until(lambda: star.errors, "a complaint")
        assert "asked to join with the token of observers" in star.errors[-1]
        assert star.applied == []


def test_an_address_that_cannot_be_listened_at_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="another program listens there"):
            Listener(f"127.0.0.1:{taken.getsockname()[1]}", TOKEN)
    for address, reason in (
        ("127.0.0.1", "write HOST:PORT"),
        ("host:99999", "a port is a number from 0 .* to 65535"),
        ("192.0.2.7:0", "this machine does not have that address"),
    ):
        with pytest.raises(UserError, match=reason):
            Listener(address, TOKEN)
