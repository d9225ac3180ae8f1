"""The proof of the token: both sides or neither, for one connection only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ProtocolError, UserError
from paceline.transports.auth import (
    ANSWER_NBYTES,
    CHALLENGE_NBYTES,
    PROOF_NBYTES,
    TOKEN_VARIABLE,
    ClientHandshake,
    ConnectOptions,
    OtherVersion,
    ServerHandshake,
    WrongToken,
    make_token,
    read_only,
    read_token,
    token_of,
    write_secret,
)
from paceline.transports.frames import VERSION


@given(st.binary(max_size=100), st.binary(max_size=40))
def test_who_knows_the_token_is_let_in(token: bytes, binding: bytes) -> None:
    gatekeeper, visitor = ServerHandshake(token, binding), ClientHandshake(token, binding)
    answer = visitor.answer(gatekeeper.challenge)
    proof = gatekeeper.check(answer)
    visitor.check(proof)
    assert (len(gatekeeper.challenge), len(answer), len(proof)) == (CHALLENGE_NBYTES, ANSWER_NBYTES, PROOF_NBYTES)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_who_does_not_is_not(token: bytes, guess: bytes) -> None:
    if token.rstrip(b"\0") == guess.rstrip(b"\0"):  # a short key is filled with zeros
        return
    gatekeeper = ServerHandshake(token)
    with pytest.raises(ProtocolError, match="wrong token"):
        gatekeeper.check(ClientHandshake(guess).answer(gatekeeper.challenge))


def test_a_recorded_answer_is_worth_nothing_later() -> None:
    first, visitor = ServerHandshake(b"token"), ClientHandshake(b"token")
    answer = visitor.answer(first.challenge)
    first.check(answer)
    with pytest.raises(ProtocolError, match="wrong token"):
        ServerHandshake(b"token").check(answer)


def test_a_recorded_server_is_known_for_what_it_is() -> None:
    first, visitor = ServerHandshake(b"token"), ClientHandshake(b"token")
    proof = first.check(visitor.answer(first.challenge))
    later = ClientHandshake(b"token")
    later.answer(first.challenge)
    with pytest.raises(ProtocolError, match="does not know our token"):
        later.check(proof)


def test_our_own_answer_sent_back_proves_nothing() -> None:
    gatekeeper, visitor = ServerHandshake(b"token"), ClientHandshake(b"token")
    answer = visitor.answer(gatekeeper.challenge)
    with pytest.raises(ProtocolError):
        visitor.check(answer[-PROOF_NBYTES:])


def test_nothing_is_proved_before_a_challenge() -> None:
    with pytest.raises(ProtocolError):
        ClientHandshake(b"token").check(b"")


def test_a_proof_made_for_another_certificate_is_refused() -> None:
    """Somebody between both has to show a certificate of his own, and can only pass proofs on."""
    gatekeeper = ServerHandshake(b"token", b"sha256:ours")
    with pytest.raises(ProtocolError, match="wrong token"):
        gatekeeper.check(ClientHandshake(b"token", b"sha256:his").answer(gatekeeper.challenge))


@given(st.integers(0, 8 * ANSWER_NBYTES - 1))
def test_no_bit_of_an_answer_can_be_changed(bit: int) -> None:
    gatekeeper = ServerHandshake(b"token")
    answer = bytearray(ClientHandshake(b"token").answer(gatekeeper.challenge))
    answer[bit // 8] ^= 1 << bit % 8
    if bit // 8 in range(5, 16):  # padding says nothing
        gatekeeper.check(answer)
    else:
        with pytest.raises(ProtocolError):
            gatekeeper.check(answer)


def test_another_protocol_is_told_from_a_wrong_token() -> None:
    gatekeeper = ServerHandshake(b"token")
    answer = bytearray(ClientHandshake(b"token").answer(gatekeeper.challenge))
    answer[4] += 1
    with pytest.raises(OtherVersion, match=f"protocol {VERSION + 1}, not {VERSION}"):
        gatekeeper.check(answer)


def test_tokens_differ_and_can_be_typed() -> None:
    assert len({make_token() for _ in range(100)}) == 100
    assert make_token().decode().isascii()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_comes_from_the_file_before_the_variable(tmp_path: Path) -> None:
    file = write(tmp_path / "token", "a token from the file\n")
    assert read_token(file, {TOKEN_VARIABLE: "from the variable"}) == b"a token from the file"
    assert read_token(None, {TOKEN_VARIABLE: " from the variable\n"}) == b"from the variable"
    assert read_token(None, {}) is None
    assert read_token(write(tmp_path / "shared", "the token of a group", 0o640), {}) == b"the token of a group"


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has recorded a handshake tries guesses at leisure, without asking the server again."""
    file = write(tmp_path / "token", 15 * "x")
    for where, variables in ((file, {}), (None, {TOKEN_VARIABLE: 15 * "x"})):
        with pytest.raises(UserError, match="has 15 bytes, and needs 16"):
            read_token(where, variables)
    monkeypatch.setenv(TOKEN_VARIABLE, "x")
    with pytest.raises(UserError, match=r"in PACELINE_TOKEN has 1 byte, and needs 16: copy the one of the server"):
        token_of(ConnectOptions("127.0.0.1:1"))
    assert read_token(write(tmp_path / "longer", 16 * "x"), {}) == 16 * b"x"


def test_the_token_of_observers_proves_that_one_may_read_and_no_more() -> None:
    token = make_token()
    for shown, reads_only in ((token, False), (read_only(token), True)):
        server, client = ServerHandshake(token), ClientHandshake(shown)
        client.check(server.check(client.answer(server.challenge)))
        assert server.reads_only == reads_only
    with pytest.raises(WrongToken):
        observers = ServerHandshake(read_only(token))  # who holds only the derived token cannot pose as the server
        observers.check(ClientHandshake(token).answer(observers.challenge))


@pytest.mark.parametrize("before", [None, 0o644, 0o600])
def test_a_secret_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    """Nor while it is written, whatever the umask."""
    file, modes = tmp_path / "token", set[int]()
    if before is not None:
        write(file, "an old one", before)
    monkeypatch.setattr(os, "fsync", lambda number: modes.add(os.fstat(number).st_mode & 0o777))
    mask = os.umask(0)
    try:
        write_secret(file, b"a new one")
    finally:
        os.umask(mask)
    assert modes == {0o600} and file.stat().st_mode & 0o777 == 0o600 and file.read_bytes() == b"a new one"
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_a_token_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        read_token(write(tmp_path / "open", "secret", 0o644), {})
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "nowhere", {})
    with pytest.raises(UserError, match="is empty"):
        read_token(write(tmp_path / "empty", "\n"), {})
    with pytest.raises(UserError, match="is empty"):
        read_token(None, {TOKEN_VARIABLE: " "})
