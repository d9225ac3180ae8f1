"""What makes each codec itself, against slow words for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.codecs.flat import CHUNK
from paceline.codecs.sparse import TopK
from paceline.errors import ProtocolError
from paceline.interfaces import Layout, State, pack
from paceline.models.cnn import Cnn
from paceline.models.lenet import LeNet5
from paceline.settings.codecs import build_codec
from paceline.tasks.flat import FlatModule


def one_vector(size: int) -> Layout:
    return pack([("v", (size,), True)])


def encoded(name: str, layout: Layout, update: Tensor, memory: State | None = None) -> tuple[Tensor, Tensor]:
    """Payload and what it decodes to."""
    codec = build_codec(name, layout)
    out, decoded = torch.zeros(codec.capacity, dtype=torch.uint8), torch.empty(layout.size)
    nbytes = codec.encode(update, codec.start() if memory is None else memory, out)
    codec.decode(out[:nbytes], decoded)
    return out[:nbytes], decoded


def test_int8_is_right_on_average_and_never_a_step_off() -> None:
    layout, torch_generator = one_vector(512), torch.Generator().manual_seed(0)
    update = torch.randn(512, generator=torch_generator)
    step = update.view(2, 256).abs().amax(1).repeat_interleave(256) / 127
    codec = build_codec("int8", layout)
    decoded = []
    for key in range(400):
        decoded.append(encoded("int8", layout, update, codec.start(key))[1])
    errors = torch.stack(decoded) - update
    assert (errors.abs() <= step * 1.0001).all()
    assert (errors.mean(0).abs() < 5 * step * 0.5 / 400**0.5).all()
    assert abs((errors / step).mean().item()) < 0.005


def test_int8_rounds_by_key_push_and_place() -> None:
    layout = one_vector(1024)
    update = torch.full((1024,), 0.3)
    update[::256] = 1.0
    codec = build_codec("int8", layout)
    memory = codec.start(1)
    first = encoded("int8", layout, update, codec.start(1))[1]
    assert torch.equal(first, encoded("int8", layout, update, memory)[1])
    memory["error"].zero_()
    assert not torch.equal(first, encoded("int8", layout, update, memory)[1])
    assert not torch.equal(first, encoded("int8", layout, update, codec.start(2))[1])
    ups = (first.view(4, 256) > 0.3)[:, 1:].float()
    assert len({tuple(row) for row in ups.tolist()}) == 4
    assert abs(ups.mean() - 0.3 * 127 % 1) < 0.1


def test_the_largest_of_a_block_stays_what_it_is_whatever_the_noise() -> None:
    update = torch.linspace(-1, 1, 256).sign() * 0.3
    for key in range(50):
        decoded = encoded("int8", one_vector(256), update, build_codec("int8", one_vector(256)).start(key))[1]
        assert torch.allclose(decoded, update)


def test_sign_sends_the_mean_magnitude_of_what_is_there() -> None:
    layout = pack([("a", (3,), True), ("b", (300,), True)])
    update = torch.zeros(layout.size)
    update[:3] = torch.tensor([1.0, -2.0, 3.0])
    update[16:316] = torch.where(torch.arange(300) % 3 == 0, -1.0, 1.0)
    decoded = encoded("sign", layout, update)[1]
    mean = (6.0 + 240.0) / 243
    assert torch.allclose(decoded[:3], mean * update[:3].sign())
    assert torch.allclose(decoded[16:256], mean * update[16:256].sign())
    assert torch.allclose(decoded[256:316], update[256:316])


@pytest.mark.parametrize("size", [CHUNK + 5 * 16, 2 * CHUNK])
@pytest.mark.parametrize("name", ["fp16", "int8", "sign", "topk:0.01"])
def test_chunks_meet_without_a_seam(name: str, size: int) -> None:
    layout = one_vector(size)
    codec = build_codec(name, layout)
    memory, update = codec.start(), torch.randn(size, generator=torch.Generator().manual_seed(1))
    decoded = encoded(name, layout, update, memory)[1]
    assert torch.allclose(decoded + memory["error"], update, atol=1e-5)
    assert decoded[CHUNK - 64 : CHUNK + 64].count_nonzero() or name.startswith("topk")


def test_topk_sends_exactly_the_largest() -> None:
    size = 200_000
    update = torch.randn(size, generator=torch.Generator().manual_seed(2)) ** 3
    payload, decoded = encoded("topk:0.01", one_vector(size), update)
    assert len(payload) == 8 * 2000
    expected = torch.zeros(size)
    largest = update.abs().topk(2000).indices
    expected[largest] = update[largest]
    assert torch.equal(decoded, expected)


def test_topk_finds_what_its_probes_missed_and_sends_no_zero() -> None:
    size = 200_000
    update = torch.zeros(size)
    update[:7] = 1.0
    payload, decoded = encoded("topk:0.01", one_vector(size), update)
    assert len(payload) == 8 * 7
    assert torch.equal(decoded, update)
    misleading = torch.full((size,), 1e-3)
    misleading[TopK(one_vector(size), 0.01)._probes[:1000]] = 1.0
    assert (encoded("topk:0.01", one_vector(size), misleading)[1] > 0.9).sum() < 1001
    assert encoded("topk:0.01", one_vector(size), misleading)[1].count_nonzero() == 2000


def test_a_place_beyond_the_end_is_the_peers_fault() -> None:
    codec = build_codec("topk:0.1", one_vector(160))
    payload = torch.full((8,), 0xFF, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="beyond the 160"):
        codec.decode(payload, torch.empty(160))


def test_low_rank_is_exact_where_the_update_has_that_rank_and_finds_the_best_by_and_by() -> None:
    layout = pack([("m", (30, 4, 10), True), ("b", (30,), True)])
    generator = torch.Generator().manual_seed(3)
    update = torch.zeros(layout.size)
    update[:1200] = (torch.randn(30, 2, generator=generator) @ torch.randn(2, 40, generator=generator)).view(-1)
    update[1200:1230] = 1.0
    assert torch.allclose(encoded("lowrank:2", layout, update)[1], update, atol=1e-4)
    codec = build_codec("lowrank:2", layout)
    matrix = torch.randn(30, 40, generator=generator)
    update[:1200] = matrix.view(-1)
    memory = codec.start()
    for _ in range(60):
        memory["error"].zero_()
        decoded = encoded("lowrank:2", layout, update, memory)[1]
    best = torch.linalg.svdvals(matrix)[2:].norm()
    assert (decoded[:1200].view(30, 40) - matrix).norm() < 1.01 * best


def test_low_rank_survives_an_update_of_zeros() -> None:
    layout = pack([("m", (20, 30), True)])
    codec = build_codec("lowrank:2", layout)
    memory = codec.start()
    before = memory["factors"].clone()
    assert not encoded("lowrank:2", layout, torch.zeros(layout.size), memory)[1].any()
    assert torch.equal(memory["factors"], before)


@pytest.mark.parametrize(
    ("model", "name", "times"),
    [(LeNet5, "int8", 3.9), (Cnn, "int8", 3.9), (LeNet5, "lowrank:4", 10.0), (Cnn, "lowrank:4", 25.0)],
)
def test_the_built_in_models_are_sent_in_so_many_times_fewer_bytes(
    model: type[nn.Module], name: str, times: float
) -> None:
    layout = FlatModule(model()).layout
    assert 4 * layout.num_parameters / build_codec(name, layout).capacity >= times
