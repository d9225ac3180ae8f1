"""Strangers: each costs a few bytes for a short while, and nothing he sends is worth anything without the token."""

from __future__ import annotations

import contextlib
import errno
import gc
import socket
import threading
import time
import weakref

import pytest

from paceline.core.compression import DENSE
from paceline.errors import UserError
from paceline.transports.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, DENIAL, PROOF_NBYTES, ClientHandshake
from paceline.transports.connection import parse_address
from paceline.transports.frames import MAX_APPLY, VERSION, FrameKind, fields_frame, header
from paceline.transports.listener import APPLICATION, JoinRequest, Listener
from paceline.transports.tcp_client import TcpClient
from tests.support.small_star import TOKEN, Star, Wire, work


class Hall:
    """A listener that is served by hand, at a time of our choosing."""

    def __init__(self, most: int = 256, token: bytes = TOKEN) -> None:
        self.listener, self.now = Listener("127.0.0.1:0", token, most=most, seconds=10.0), 0.0
        self.visitors: list[socket.socket] = []

    def __enter__(self) -> Hall:
        return self

    def __exit__(self, *exception: object) -> None:
        self.listener.close()
        for visitor in self.visitors:
            visitor.close()

    def knock(self) -> socket.socket:
        """A connection that was let in."""
        visitor = socket.create_connection(parse_address(self.listener.address), timeout=5)
        self.visitors.append(visitor)
        assert self.serve() == []
        return visitor

    def serve(self) -> list[JoinRequest]:
        found = self.listener.serve(self.now)
        for applicant in found:
            applicant.connection.close()
        return found

    def prove(self, visitor: socket.socket) -> None:
        """As one who knows the token."""
        proof = ClientHandshake(TOKEN)
        visitor.sendall(proof.answer(visitor.recv(CHALLENGE_NBYTES)))
        assert self.serve() == []
        proof.check(visitor.recv(PROOF_NBYTES))


def is_closed(visitor: socket.socket) -> bool:
    """Whether all that comes is an end."""
    try:
        while visitor.recv(1000):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


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


def test_only_so_many_strangers_are_let_in_and_the_oldest_goes_first() -> None:
    with Hall(most=3) as hall:
        visitors = [hall.knock() for _ in range(5)]
        assert len(hall.listener.strangers) == 3
        assert is_closed(visitors[0]) and is_closed(visitors[1])
        hall.prove(visitors[2])
        assert len(hall.listener.complaints()) == 2


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


def test_when_descriptors_run_out_the_oldest_stranger_goes(monkeypatch: pytest.MonkeyPatch) -> None:
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
        first = hall.knock()
        monkeypatch.setattr(hall.listener, "_socket", Full(hall.listener._socket))
        hall.knock()
        assert is_closed(first) and len(hall.listener.strangers) == 1
        assert "no descriptors" in hall.listener.complaints()[0]


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
        assert annoy(49) == [], "for the others it is too early"
        monkeypatch.setattr(time, "monotonic", lambda: 101.0)
        texts = hall.listener.complaints()
        assert len(texts) == 20 and "50 so far" in texts[-1]
        assert hall.listener.complaints() == []


def test_a_worker_is_told_in_one_line_what_is_wrong() -> None:
    with Star() as star:
        with pytest.raises(UserError, match="does not accept our token: give the one"):
            TcpClient(star.listener.address, b"a guess").apply({})


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"220 mail.example.org ESMTP, what can we do for you?", "is not a Paceline server"),
        (b"PACE" + bytes([VERSION + 1]) + bytes(CHALLENGE_NBYTES - 5), "speaks protocol 4, .*install the same version"),
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


def test_without_a_token_both_ends_keep_to_this_machine() -> None:
    """A server without one would take anybody's pushes, and a worker would run what anybody's server says."""
    with pytest.raises(UserError, match="there is no token"):
        Listener("0.0.0.0:0", b"")
    with pytest.raises(UserError, match="there is no token"):
        TcpClient("192.0.2.7:7000", b"").apply({})
    with Hall(token=b"") as hall:
        assert hall.knock()


def test_an_address_that_cannot_be_listened_at_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="another program listens there"):
            Listener(f"127.0.0.1:{taken.getsockname()[1]}", TOKEN)
    for address, reason in (
        ("127.0.0.1", "write HOST:PORT"),
        ("host:99999", "write HOST:PORT"),
        ("192.0.2.7:0", "assign"),
    ):
        with pytest.raises(UserError, match=reason):
            Listener(address, TOKEN)
