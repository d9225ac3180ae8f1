"""Random and mutated messages into every decoder: each ends in a message, or in an error that blames its sender."""

from __future__ import annotations

import random

import fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TARGETS = fuzz.make_targets()


def assert_contained(name: str, data: bytes) -> None:
    outcomes = fuzz.Outcomes()
    outcomes.feed(name, TARGETS[name], data)
    assert not outcomes.escapes


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_read(name: str) -> None:
    for valid in TARGETS[name].valid:
        if valid != fuzz.REFUSED:
            assert TARGETS[name].feed(valid) is not None or valid[5:6] == bytes([fuzz.FrameKind.BYE])


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), noise=st.binary(max_size=100))
def test_what_is_wrong_is_its_senders_fault(name: str, seed: int, noise: bytes) -> None:
    order, target = random.Random(seed), TARGETS[name]
    valid = order.choice(target.valid)
    for data in (fuzz.mutate(order, valid), noise, valid[: order.randrange(len(valid) + 1)] + noise):
        assert_contained(name, data)


def test_the_fuzzer_sees_what_escapes() -> None:
    def fails(data: bytes) -> object:
        raise KeyError(data)

    outcomes = fuzz.Outcomes()
    outcomes.feed("a decoder", fuzz.Target([], fails), b"x")
    assert outcomes.counts == {"ESCAPED KeyError": 1} and outcomes.escapes == {"a decoder: KeyError: b'x'": "78"}
