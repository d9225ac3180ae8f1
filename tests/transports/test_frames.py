"""Frames: however the bytes are cut into pieces the same messages come out, and nothing that is wrong is taken."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.transports import frames
from paceline.transports.frames import (
    HEADER_NBYTES,
    MAGIC,
    VERSION,
    FrameKind,
    FrameReader,
    Reading,
    SendQueue,
    fields_frame,
    header,
    parse_header,
    read_bytes,
    read_fields,
    read_header,
    refusal_frame,
)

MOST = {FrameKind.HELLO: 5000, FrameKind.PUSH: 300}
messages = st.lists(
    st.one_of(
        st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=5), st.binary(max_size=300)
    ),
    max_size=6,
)


def packed(message: dict[str, object] | bytes) -> bytes:
    if isinstance(message, bytes):
        return header(FrameKind.PUSH, len(message)) + message
    return fields_frame(FrameKind.HELLO, message, 5000)


def read_message() -> Reading[dict[str, object] | bytes]:
    kind, nbytes = yield from read_header(MOST)
    return (yield from read_fields(nbytes)) if kind is FrameKind.HELLO else bytes((yield from read_bytes(nbytes)))


class Source:
    """Bytes that come in pieces of given sizes; nothing for now after each."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data, self._sizes, self._left = data, sizes, 0

    def next_piece(self) -> None:
        self._left = self._sizes.pop(0) if self._sizes else len(self._data)

    def receive_into(self, place: memoryview) -> int | None:
        count = min(len(place), self._left, len(self._data))
        if not count:
            return None
        place[:count] = self._data[:count]
        self._data, self._left = self._data[count:], self._left - count
        return count


@settings(max_examples=40)
@given(messages, st.lists(st.integers(1, 40), max_size=60))
def test_any_pieces_give_the_same_messages(sent: list[dict[str, object] | bytes], sizes: list[int]) -> None:
    source = Source(b"".join(map(packed, sent)), sizes)
    got: list[dict[str, object] | bytes] = []
    filler = FrameReader(read_message())
    for _ in range(len(sizes) + 1):
        source.next_piece()
        while (whole := filler.fill(source.receive_into)) is not None:
            got.append(whole[0])
            filler = FrameReader(read_message())
    assert got == sent


@settings(max_examples=40)
@given(messages, st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_a_writer_that_is_taken_piece_by_piece_sends_the_same_bytes(
    sent: list[dict[str, object] | bytes], room: list[int]
) -> None:
    outbox, got = SendQueue(), bytearray()
    for message in sent:
        outbox.add(packed(message)[:HEADER_NBYTES], packed(message)[HEADER_NBYTES:])

    def send(parts: list[memoryview]) -> int | None:
        piece = b"".join(parts)[: room.pop(0) if room else None]
        got.extend(piece)
        return len(piece) or None

    while not outbox.flush(send):
        assert outbox
    assert bytes(got) == b"".join(map(packed, sent))
    assert not outbox and outbox.nbytes == 0


def test_an_outbox_of_many_places_is_sent_by_few_calls() -> None:
    outbox, calls = SendQueue(), []
    outbox.add(*[b"x"] * 1000)
    assert outbox.flush(lambda parts: calls.append(len(parts)) or len(parts))
    assert sum(calls) == 1000 and max(calls) <= 1024


@given(st.integers(0, 8 * HEADER_NBYTES - 1), st.sampled_from(list(MOST)), st.integers(0, 300))
def test_a_header_with_a_flipped_bit_is_refused_or_harmless(bit: int, kind: FrameKind, nbytes: int) -> None:
    flipped = bytearray(header(kind, nbytes))
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        found, size = parse_header(flipped, MOST)
    except ProtocolError:
        return
    assert found in MOST and size <= MOST[found], "no more memory than this kind may take"
    assert bit // 8 not in range(5), "magic and version are checked whole"


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_random_bytes_are_no_header(noise: bytes) -> None:
    if noise[:4] != MAGIC:
        with pytest.raises(ProtocolError, match="not a frame"):
            parse_header(noise, MOST)


@pytest.mark.parametrize("cut", range(len(packed({"a": 1}))))
def test_a_truncated_frame_is_no_message(cut: int) -> None:
    filler = FrameReader(read_message())
    source = Source(packed({"a": 1})[:cut], [])
    source.next_piece()
    assert filler.fill(source.receive_into) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (header(FrameKind.WELCOME, 5), "'welcome' instead of hello or push"),
        (header(FrameKind.HELLO, 5001), "5001 bytes, which may have at most 5000"),
        (header(FrameKind.PUSH, (1 << 64) - 1), "at most 300"),
        (MAGIC + bytes([VERSION + 1]) + header(FrameKind.HELLO, 5)[5:], f"protocol {VERSION + 1}, not {VERSION}"),
        (MAGIC + bytes([VERSION, 77]) + header(FrameKind.HELLO, 5)[6:], "unknown kind 77"),
    ],
)
def test_what_is_not_awaited_is_refused_with_its_reason(bad: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        parse_header(bad, MOST)


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"{", b"\xff", b"[" * 60_000, b"1" * 9000, b'{"a": ' + b"9" * 9000 + b"}"]
)
def test_a_body_that_is_no_object_is_refused(text: bytes) -> None:
    source = Source(text, [])
    source.next_piece()
    with pytest.raises(ProtocolError, match="not a JSON object"):
        FrameReader(read_fields(len(text))).fill(source.receive_into)


def test_a_reason_of_any_length_fits_its_frame() -> None:
    frame = refusal_frame("ü" * 10_000)
    _, nbytes = parse_header(frame[:HEADER_NBYTES], {FrameKind.REFUSED: frames.MAX_REFUSED})
    assert json.loads(frame[HEADER_NBYTES:])["reason"].startswith("üü") and nbytes == len(frame) - HEADER_NBYTES


@pytest.mark.parametrize("name", ["frames", "auth", "tls", "connection"])
def test_what_strangers_reach_knows_neither_torch_nor_pickle(name: str) -> None:
    tree = ast.parse((Path(frames.__file__).parent / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "__future__" in imported
    assert not {"torch", "pickle", "marshal"} & {module.split(".")[0] for module in imported}
