"""Dropout by address: the mask is a function of the key, the layer and the place, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.models.dropout import AddressedDropout, address_dropout, keep_mask
from paceline.randomness import mix64

COUNT = 200_000
keys = st.integers(0, 2**64 - 1)


def mask_of(key: int, layer: int = 1, probability: float = 0.5, count: int = COUNT) -> Tensor:
    dropout = AddressedDropout(probability, layer)
    dropout.key = key
    return dropout(torch.ones(count)) != 0


def far_from(share: float, expected: float, count: int = COUNT) -> bool:
    """Whether a share of `count` fair draws is more than five standard deviations off."""
    return abs(share - expected) > 5 * math.sqrt(expected * (1 - expected) / count)


@given(key=keys)
def test_the_mask_depends_only_on_the_key(key: int) -> None:
    torch.manual_seed(key % 1000)
    first = mask_of(key, count=300)
    torch.rand(7)
    dropout = AddressedDropout(0.5, layer=1)
    for other in (1, 2, 3):
        dropout.key = other
        dropout(torch.ones(10))
    dropout.key = key
    assert torch.equal(dropout(torch.ones(300)) != 0, first)


@given(key=keys, size=st.integers(1, 200))
def test_a_smaller_batch_sees_the_front_of_the_same_mask(key: int, size: int) -> None:
    assert torch.equal(mask_of(key, count=size), mask_of(key, count=200)[:size])


@pytest.mark.parametrize("probability", [0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, 2**32, 2**63, 2**64 - 1, mix64(0, 3, 17)])
def test_the_share_that_is_kept_is_one_minus_the_probability(probability: float, key: int) -> None:
    assert not far_from(mask_of(key, probability=probability).float().mean().item(), 1 - probability)


@pytest.mark.parametrize("key", range(8))
def test_neighbours_layers_and_keys_are_unrelated(key: int) -> None:
    mask = mask_of(key)
    for other in (mask_of(key + 1), mask_of(key, layer=2), mask.roll(1), mask.roll(28)):
        assert not far_from((mask == other).float().mean().item(), 0.5)


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    dropout = AddressedDropout(0.25, layer=1)
    kept = dropout(torch.ones(COUNT))
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)


def test_the_gradient_passes_through_the_same_mask() -> None:
    dropout = AddressedDropout(0.5, layer=1)
    values = torch.randn(1000, requires_grad=True)
    outputs = dropout(values)
    outputs.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad != 0, outputs != 0)


def test_evaluation_mode_is_the_identity() -> None:
    values = torch.randn(3, 5)
    assert AddressedDropout(0.5, layer=1).eval()(values) is values


def test_a_probability_of_zero_keeps_all() -> None:
    values = torch.randn(100)
    assert torch.equal(AddressedDropout(0.0, layer=1)(values), values)


def test_every_layer_of_a_model_is_given_the_key() -> None:
    model = nn.Sequential(AddressedDropout(0.1, 1), nn.Sequential(nn.ReLU(), AddressedDropout(0.2, 2)))
    address_dropout(model, 42)
    assert [module.key for module in model.modules() if isinstance(module, AddressedDropout)] == [42, 42]


def kept_in_plain_python(counter: int, key: int, probability: float) -> bool:
    """The hash written out over unsigned integers."""
    bits = (counter ^ key) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) + (key >> 32)) & 0xFFFFFFFF
    bits = (bits * 0x846CA68B) & 0xFFFFFFFF
    return (bits ^ 0x80000000) >= round(probability * 2**32)


@given(key=keys, probability=st.floats(0.01, 0.99))
def test_the_tensor_hash_is_the_one_written_out(key: int, probability: float) -> None:
    counter = torch.cat([torch.arange(40), torch.tensor([2**31 - 1, 10**9])]).int()
    expected = [kept_in_plain_python(place, key, probability) for place in counter.tolist()]
    assert keep_mask(counter, key, probability).tolist() == expected


def test_known_bits_do_not_change_between_releases() -> None:
    """A recorded run is replayed by later releases, so these numbers are part of the format."""
    assert mix64(1, 2, 3) == 0x6AE515C1C0AC7E37
    bits = keep_mask(torch.arange(16, dtype=torch.int32), mix64(7, 1), 0.5)
    assert "".join(str(int(bit)) for bit in bits) == "1100101101111010"
