"""Every codec: decoded + memory = what went in, whatever the layout and the numbers; and no NaN stays behind."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ProtocolError
from paceline.interfaces import Codec, Layout, Parameter, State, pack
from paceline.settings.codecs import CODECS, build_codec

NAMES = ("none", "fp16", "bf16", "int8", "sign", "topk:0.1", "topk:0.003", "lowrank:1", "lowrank:3")
LOSSY = NAMES[1:]
every_codec = pytest.mark.parametrize("name", NAMES)
every_lossy_codec = pytest.mark.parametrize("name", LOSSY)
MODEL = pack([("conv", (6, 3, 5, 5), True), ("bias", (6,), False), ("dense", (40, 33), True), ("last", (10,), True)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Parameters of up to 4 axes with gaps of any length before, between and behind them."""
    laid, offset = [], draw(st.integers(0, 5))
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
        laid.append(Parameter(f"p{number}", shape, offset))
        offset += laid[-1].size + draw(st.sampled_from([0, 0, 1, 15, 300]))
    return Layout(tuple(laid), offset)


def update_for(layout: Layout, seed: int, scale: float = 1.0) -> Tensor:
    """Values of very different sizes, some of them zero, and zeros in the gaps."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(layout.size)
    for view in layout.views(flat).values():
        values = torch.randn(view.shape, generator=generator) * torch.rand(view.shape, generator=generator) ** 4
        view.copy_(values * (torch.rand(view.shape, generator=generator) > 0.2) * scale)
    return flat


def send(codec: Codec, update: Tensor, memory: State) -> Tensor:
    """What arrives."""
    out = torch.full((codec.capacity + 24,), 0xA5, dtype=torch.uint8)
    nbytes = codec.encode(update, memory, out)
    assert nbytes <= codec.capacity
    assert (out[codec.capacity :] == 0xA5).all()
    decoded = torch.full((update.numel(),), 7.0)
    codec.decode(out[:nbytes], decoded)
    return decoded


def error_of(memory: State) -> Tensor | float:
    return memory.get("error", 0.0)


def gaps_of(layout: Layout, flat: Tensor) -> Tensor:
    outside = torch.ones(layout.size, dtype=torch.bool)
    for parameter in layout.parameters:
        outside[parameter.offset : parameter.offset + parameter.size] = False
    return flat[outside]


@every_codec
@settings(max_examples=12)
@given(layout=layouts(), seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 1e-42, 1e-12, 1.0, 1e6, 1e25]))
def test_decoded_and_memory_are_what_went_in(name: str, layout: Layout, seed: int, scale: float) -> None:
    codec = build_codec(name, layout)
    memory = codec.start(seed)
    for push in range(3):
        update = update_for(layout, seed + push, scale)
        expected = update.double() + error_of(memory)
        decoded = send(codec, update, memory)
        nearness = 1e-5 * max(expected.abs().max().item(), 1e-40)
        assert ((decoded.double() + error_of(memory)) - expected).abs().max().item() <= nearness
        assert not gaps_of(layout, decoded).any()
        assert "error" not in memory or not gaps_of(layout, memory["error"]).any()


@every_codec
def test_the_same_push_is_the_same_bytes_and_memory(name: str) -> None:
    first, second = build_codec(name, MODEL), build_codec(name, MODEL)
    memories = first.start(5), second.start(5)
    for push in range(3):
        update = update_for(MODEL, push)
        outs = [torch.zeros(first.capacity, dtype=torch.uint8) for _ in range(2)]
        lengths = [c.encode(update, m, o) for c, m, o in zip((first, second), memories, outs, strict=True)]
        assert lengths[0] == lengths[1]
        assert torch.equal(*outs)
        assert all(torch.equal(memories[0][key], memories[1][key]) for key in memories[0])


@every_codec
def test_a_memory_saved_and_restored_goes_on_alike(name: str) -> None:
    codec = build_codec(name, MODEL)
    memory = codec.start(9)
    send(codec, update_for(MODEL, 1), memory)
    restored = {key: tensor.clone() for key, tensor in memory.items()}
    update = update_for(MODEL, 2)
    assert torch.equal(send(codec, update, memory), send(build_codec(name, MODEL), update, restored))


@every_codec
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_at_the_other_end_and_nowhere_else(name: str, poison: float) -> None:
    codec = build_codec(name, MODEL)
    memory = codec.start()
    send(codec, update_for(MODEL, 1), memory)
    before = {key: tensor.clone() for key, tensor in memory.items()}
    update = update_for(MODEL, 2)
    update[MODEL.parameters[2].offset + 100] = poison
    decoded = send(codec, update, memory)
    assert not math.isfinite(decoded.sum().item())
    assert all(torch.equal(before[key], memory[key]) for key in memory)


@every_lossy_codec
def test_values_whose_squares_overflow_are_sent_and_those_near_the_end_of_floats_are_not(name: str) -> None:
    codec = build_codec(name, MODEL)
    assert send(codec, update_for(MODEL, 3, 1e29), codec.start()).isfinite().all()
    assert not send(codec, update_for(MODEL, 3, 3e37), codec.start()).isfinite().all()


@every_lossy_codec
def test_pushes_add_up_to_all_that_was_given(name: str) -> None:
    """Error feedback: over many pushes of one update, the mean of what arrives comes near it."""
    codec = build_codec(name, MODEL)
    memory, update, total = codec.start(), update_for(MODEL, 4), torch.zeros(MODEL.size)
    for _ in range(300):
        total += send(codec, update, memory)
    assert (total / 300 - update).norm() < 0.35 * update.norm()
    assert torch.allclose(total + memory["error"], 300 * update, atol=2e-3)


@every_codec
def test_bytes_that_no_encoder_wrote_are_the_peers_fault(name: str) -> None:
    codec = build_codec(name, MODEL)
    for nbytes in (codec.capacity + 8, 3):
        with pytest.raises(ProtocolError, match=rf"{nbytes} bytes by codec {name}"):
            codec.decode(torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(MODEL.size))


def test_every_name_has_a_codec_and_is_tested() -> None:
    assert {name.partition(":")[0] for name in NAMES} == set(CODECS)
    assert [build_codec(name, MODEL).name for name in NAMES] == list(NAMES)


SIZE = MODEL.size
BLOCKS = -(-SIZE // 256)
FACTORS = 3 * (6 + 75) + 3 * (40 + 33) + 6 + 10


@pytest.mark.parametrize(
    ("name", "primitive", "nbytes"),
    [
        ("none", "reduce", 4 * SIZE),
        ("fp16", "reduce", 2 * SIZE),
        ("bf16", "reduce", 2 * SIZE),
        ("int8", "gather", SIZE + 4 * BLOCKS),
        ("sign", "gather", -(-SIZE // 8) + 4 * BLOCKS),
        ("topk:0.1", "gather", 8 * (SIZE // 10)),
        ("lowrank:3", "reduce", 4 * FACTORS),
    ],
)
def test_bytes_to_a_server_and_on_a_ring(name: str, primitive: str, nbytes: int) -> None:
    codec = build_codec(name, MODEL)
    assert (codec.primitive, codec.capacity) == (primitive, nbytes)
    for workers in (1, 2, 5):
        on_ring = 2 * nbytes * (workers - 1) / workers if primitive == "reduce" else nbytes * (workers - 1)
        assert codec.ring_nbytes(workers) == math.ceil(on_ring)
    out = torch.zeros(codec.capacity, dtype=torch.uint8)
    assert codec.encode(update_for(MODEL, 1), codec.start(), out) == nbytes


@pytest.mark.parametrize("name", [*NAMES, "lowrank:4", "lowrank:8"])
def test_the_same_bits_on_any_number_of_threads(name: str) -> None:
    """A worker and its server decode the same payload, each on threads of its own."""
    layout = pack([("dense", (128, 1152), True), ("bias", (128,), False), ("last", (10, 128), True)])
    found: list[list[Tensor]] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codec = build_codec(name, layout)
            memory = codec.start(9)
            found.append([send(codec, update_for(layout, seed), memory) for seed in range(2)] + list(memory.values()))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)
