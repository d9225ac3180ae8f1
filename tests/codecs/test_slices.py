"""Payloads that are cut for several servers: the parts decode to what the whole does, and nothing else is a part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs.quantized import BLOCK
from paceline.codecs.slices import CodecSlice, RowSlice
from paceline.errors import ProtocolError
from paceline.interfaces import Layout, pack
from paceline.runtimes.sharded.spans import CODED_GRAIN, part_of, spans_of
from paceline.settings.codecs import CODECS, build_codec, build_part, codec_of

MODEL = pack([("conv", (6, 3, 5, 5), True), ("bias", (6,), False), ("dense", (70, 33), True), ("last", (10,), True)])
LARGE = pack([("w", (300_000,), True)])
"""Longer than the noise of int8 is."""
NAMES = ("none", "fp16", "bf16", "int8", "sign", "topk:0.1", "lowrank:3")
every_codec = pytest.mark.parametrize("name", NAMES)


def parts_of(name: str, layout: Layout, servers: int) -> list[tuple[slice, CodecSlice]]:
    spans = spans_of(layout.size, servers, CODED_GRAIN)
    return [(span, build_part(name, layout, span, part_of(layout, span))) for span in spans]


def update_for(layout: Layout, seed: int) -> Tensor:
    flat, generator = torch.zeros(layout.size), torch.Generator().manual_seed(seed)
    for view in layout.views(flat).values():
        view.copy_(torch.randn(view.shape, generator=generator) ** 3)
    return flat


def test_ranges_begin_where_blocks_do() -> None:
    assert CODED_GRAIN % BLOCK == 0 and {codec_of(name)[0] for name in NAMES} == set(CODECS)


@every_codec
@settings(max_examples=8)
@given(servers=st.integers(1, 5), seed=st.integers(0, 1000))
def test_parts_decode_to_what_the_whole_does(name: str, servers: int, seed: int) -> None:
    codec, parts = build_codec(name, MODEL), parts_of(name, MODEL, servers)
    memory, out = codec.start(seed), torch.zeros(codec.capacity, dtype=torch.uint8)
    for push in range(3):
        payload = out[: codec.encode(update_for(MODEL, seed + push), memory, out)]
        whole = torch.zeros(MODEL.size)
        codec.decode(payload, whole)
        crossed = 0
        for span, part in parts:
            piece, decoded = torch.zeros(part.capacity, dtype=torch.uint8), torch.ones(span.stop - span.start)
            nbytes = part.extract(payload, piece)
            part.decode(piece[:nbytes], decoded)
            assert torch.equal(decoded, whole[span])
            crossed += nbytes
        assert crossed == len(payload) * (servers if parts[0][1].is_replicated else 1)


@pytest.mark.parametrize("name", [name for name in NAMES if CODECS[codec_of(name)[0]].by_range])
@pytest.mark.parametrize("layout", [MODEL, LARGE], ids=["model", "large"])
def test_a_range_that_is_encoded_by_itself_is_the_part_of_the_whole(name: str, layout: Layout) -> None:
    codec, parts = build_codec(name, layout), parts_of(name, layout, 3)
    whole, out = codec.start(7), torch.zeros(codec.capacity, dtype=torch.uint8)
    memories = [part.codec.start(7) for _, part in parts if isinstance(part, RowSlice)]
    for push in range(2):
        update, pasted = update_for(layout, push), torch.zeros_like(out)
        codec.encode(update, whole, out)
        for (span, part), memory in zip(parts, memories, strict=True):
            assert isinstance(part, RowSlice)
            piece = torch.zeros(part.capacity, dtype=torch.uint8)
            assert part.codec.encode(update[span], memory, piece) == part.capacity
            part.insert(piece, pasted)
            if "error" in whole:
                assert torch.equal(memory["error"], whole["error"][span])
        assert torch.equal(pasted, out)


@every_codec
def test_a_push_that_is_not_finite_is_not_finite_in_some_part(name: str) -> None:
    codec, update = build_codec(name, MODEL), update_for(MODEL, 0)
    update[MODEL.parameters[2].offset] = torch.nan
    out, found = torch.zeros(codec.capacity, dtype=torch.uint8), []
    nbytes = codec.encode(update, codec.start(), out)
    for span, part in parts_of(name, MODEL, 3):
        piece, decoded = torch.zeros(part.capacity, dtype=torch.uint8), torch.zeros(span.stop - span.start)
        part.decode(piece[: part.extract(out[:nbytes], piece)], decoded)
        found.append(bool(torch.isfinite(decoded).all()))
    assert not all(found)


@every_codec
def test_bytes_that_are_no_part_are_refused(name: str) -> None:
    (span, part), *_ = parts_of(name, MODEL, 3)
    size = span.stop - span.start
    with pytest.raises(ProtocolError):
        part.decode(torch.zeros(part.capacity + 8, dtype=torch.uint8), torch.zeros(1024))
    with pytest.raises(ProtocolError):
        part.decode(torch.full((part.capacity - 4,), 0xFF, dtype=torch.uint8), torch.zeros(1024))
    if name.startswith("topk"):
        with pytest.raises(ProtocolError, match="outside the range of"):
            part.decode(torch.tensor([size, 0], dtype=torch.int32).view(torch.uint8), torch.zeros(size))
