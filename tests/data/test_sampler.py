"""Batches by address: any order of asking, every epoch covered, counts that agree with what is dealt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampler import Batches
from paceline.errors import UserError

sizes = st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@pytest.mark.parametrize(
    ("multiple_of", "sizes"), [(1, [6, 6, 6, 5]), (2, [6, 6, 6, 4]), (3, [6, 6, 6, 3]), (6, [6, 6, 6])]
)
def test_an_epoch_leaves_out_what_makes_no_multiple(multiple_of: int, sizes: list[int]) -> None:
    batches = Batches(np.arange(23, dtype=np.int64), 6, 1, 2, multiple_of=multiple_of)
    assert batches.per_epoch == len(sizes) and batches.num_samples == sum(sizes)
    for epoch in range(3):
        numbers = range(epoch * len(sizes), (epoch + 1) * len(sizes))
        parts = [batches.indices(number) for number in numbers]
        assert [len(part) for part in parts] == sizes and len(np.unique(np.concatenate(parts))) == sum(sizes)
    assert batches.samples_before(2 * len(sizes) + 1) == 2 * sum(sizes) + 6


@given(sizes=sizes, seed=st.integers(0, 1000), worker=st.integers(0, 50), order=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_any_order_of_asking_and_whole_epochs(sizes: tuple[int, int], seed: int, worker: int, order: object) -> None:
    size, batch_size = sizes
    shard = np.arange(size, dtype=np.int64) * 3 + 5
    batches = Batches(shard, batch_size, seed, worker)
    assert batches.num_samples == size and batches.per_epoch == -(-size // batch_size)
    numbers = list(range(3 * batches.per_epoch))
    forward = [batches.indices(number) for number in numbers]
    for epoch in range(3):
        epoch_batches = forward[epoch * batches.per_epoch : (epoch + 1) * batches.per_epoch]
        assert np.array_equal(np.sort(np.concatenate(epoch_batches)), shard)
        assert all(len(batch) == batch_size for batch in epoch_batches[:-1])
    order.shuffle(numbers)  # type: ignore[attr-defined]
    other = Batches(shard, batch_size, seed, worker)
    assert all(np.array_equal(other.indices(number), forward[number]) for number in numbers)
    counts = np.cumsum([0] + [len(batch) for batch in forward])
    assert [batches.samples_before(number) for number in range(len(forward) + 1)] == counts.tolist()


def test_epochs_workers_and_seeds_differ() -> None:
    shard = np.arange(100, dtype=np.int64)
    reference = Batches(shard, 10, 1, 0)
    assert not np.array_equal(reference.indices(0), reference.indices(10))
    assert not np.array_equal(reference.indices(0), Batches(shard, 10, 1, 1).indices(0))
    assert not np.array_equal(reference.indices(0), Batches(shard, 10, 2, 0).indices(0))


def test_the_address_is_stable_across_versions() -> None:
    """Changing these numbers changes every run that was ever recorded."""
    assert Batches(np.arange(10, dtype=np.int64), 5, 1, 2).indices(3).tolist() == [0, 7, 8, 3, 6]


def test_a_batch_can_be_written_to() -> None:
    batches = Batches(np.arange(10, dtype=np.int64), 5, 1, 2)
    first = batches.indices(0)
    before = first.copy()
    first[:] = -1
    assert np.array_equal(batches.indices(0), before)


@pytest.mark.parametrize("batch_size", [0, -1, 11])
def test_bad_batch_size(batch_size: int) -> None:
    with pytest.raises(UserError, match=f"batch size {batch_size} was asked for, but worker 2 has 10 samples"):
        Batches(np.arange(10, dtype=np.int64), batch_size, 1, 2)
