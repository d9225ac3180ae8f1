"""Splits cover and do not overlap, are functions of their seed, and name what they cannot do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.data.partition import Split, hold_out, hold_out_fold, parse_fold, parse_split, partition
from paceline.errors import UserError
from paceline.randomness import rng

BALANCED = np.arange(1000) % 10
seeds = st.integers(0, 2**64 - 1)
skewed_labels = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0)


def labels_of(counts: list[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed % 2**32).permutation(np.repeat(np.arange(len(counts)), counts))


def test_parse() -> None:
    assert [parse_split(text) for text in ("full", "iid", "labels")] == [Split("full"), Split("iid"), Split("labels")]
    assert parse_split("dirichlet:0.3") == Split("dirichlet", 0.3) and str(Split("dirichlet", 0.3)) == "dirichlet:0.3"


BAD_ALPHAS = ["dirichlet", *(f"dirichlet:{alpha}" for alpha in ("", "0", "-1", "nan", "inf", "x"))]


@pytest.mark.parametrize("text", ["", "lables", "iid:2", "full:", *BAD_ALPHAS])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UserError, match=f"split '{text}'"):
        parse_split(text)


@given(
    counts=skewed_labels,
    weights=st.one_of(st.integers(1, 12), st.lists(st.floats(0.01, 100), min_size=1, max_size=12)),
    split=st.sampled_from([Split("iid"), Split("labels"), Split("dirichlet", 0.05), Split("dirichlet", 5.0)]),
    seed=seeds,
)
@settings(max_examples=300, deadline=None)
@pytest.mark.long
def test_splits_cover_and_do_not_overlap(
    counts: list[int], weights: int | list[float], split: Split, seed: int
) -> None:
    labels = labels_of(counts, seed)
    num_workers = weights if isinstance(weights, int) else len(weights)
    given_weights = None if isinstance(weights, int) else weights
    try:
        shards = partition(labels, num_workers, split, seed, given_weights)
    except UserError as error:
        assert "with none" in str(error)
        assume(False)
    assert len(shards) == num_workers and all(len(shard) and shard.dtype == np.int64 for shard in shards)
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(len(labels)))
    again = partition(labels, num_workers, split, seed, given_weights)
    assert all(np.array_equal(left, right) for left, right in zip(shards, again, strict=True))


@given(size=st.integers(1, 500), num_workers=st.integers(1, 40), seed=seeds)
@settings(max_examples=100, deadline=None)
def test_equal_iid_sizes_differ_by_at_most_one(size: int, num_workers: int, seed: int) -> None:
    assume(size >= num_workers)
    for split in (Split("iid"), Split("labels")):
        sizes = [len(shard) for shard in partition(np.arange(size) % 10, num_workers, split, seed)]
        assert max(sizes) - min(sizes) <= 1


def test_weights_set_sizes() -> None:
    for split in (Split("iid"), Split("labels")):
        assert [len(shard) for shard in partition(BALANCED, 3, split, 0, [1, 2, 7])] == [100, 200, 700]
    shards = partition(BALANCED, 3, Split("dirichlet", 1e300), 0, [1, 2, 7])
    assert [len(shard) for shard in shards] == [100, 200, 700]


def test_full_gives_everyone_everything() -> None:
    shards = partition(BALANCED, 3, Split("full"), 0)
    assert all(np.array_equal(shard, np.arange(1000)) for shard in shards) and len(shards) == 3


def test_seed_matters() -> None:
    for split in (Split("iid"), Split("labels"), Split("dirichlet", 1.0)):
        left, right = partition(BALANCED, 4, split, 1), partition(BALANCED, 4, split, 2)
        assert any(not np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("num_workers", "classes_each"), [(10, 1), (5, 2), (2, 5)])
def test_labels_deals_whole_classes(num_workers: int, classes_each: int) -> None:
    held = [set(BALANCED[shard]) for shard in partition(BALANCED, num_workers, Split("labels"), 7)]
    assert all(len(classes) == classes_each for classes in held) and set.union(*held) == set(range(10))


def test_labels_with_more_workers_than_classes_cuts_classes() -> None:
    shards = partition(BALANCED, 25, Split("labels"), 3)
    assert [len(shard) for shard in shards] == [40] * 25
    assert all(len(set(BALANCED[shard])) <= 2 for shard in shards)


def test_labels_shuffles_within_a_class() -> None:
    """Two workers of one class hold a mix of early and late samples, not its two halves."""
    shards = partition(np.zeros(1000, dtype=int), 2, Split("labels"), 0)
    assert abs(float(shards[0].mean()) - float(shards[1].mean())) < 100


def test_smaller_alpha_is_less_even() -> None:
    def unevenness(alpha: float) -> float:
        shards = partition(np.arange(10_000) % 10, 4, Split("dirichlet", alpha), 5)
        return float(np.mean([np.bincount(np.arange(10_000)[s] % 10, minlength=10).std() for s in shards]))

    assert unevenness(0.3) > 2 * unevenness(30.0) > 2 * unevenness(3000.0)


def test_vanishing_alpha_deals_whole_classes() -> None:
    labels = np.arange(3000) % 300
    shards = partition(labels, 2, Split("dirichlet", 1e-300), 0)
    assert not set(labels[shards[0]]) & set(labels[shards[1]])


def test_empty_worker_is_named() -> None:
    with pytest.raises(UserError, match=r"split dirichlet:0.001 of 1000 samples over 30 workers leaves worker \d+"):
        partition(BALANCED, 30, Split("dirichlet", 0.001), 0)
    with pytest.raises(UserError, match=r"leaves worker .*use fewer workers"):
        partition(BALANCED[:3], 4, Split("iid"), 0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(UserError, match="weight"):
        partition(BALANCED, 2, Split("iid"), 0, weights)


def test_weights_with_full_and_no_workers() -> None:
    with pytest.raises(UserError, match="full"):
        partition(BALANCED, 2, Split("full"), 0, [1.0, 2.0])
    with pytest.raises(UserError, match="0 workers"):
        partition(BALANCED, 0, Split("iid"), 0)


@given(counts=skewed_labels, fraction=st.floats(0, 0.999), seed=seeds)
@settings(max_examples=200, deadline=None)
def test_hold_out_is_stratified_and_covers(counts: list[int], fraction: float, seed: int) -> None:
    labels = labels_of(counts, seed)
    try:
        train, validation = hold_out(labels, fraction, seed)
    except UserError:
        assume(False)
    assert np.array_equal(np.sort(np.concatenate([train, validation])), np.arange(len(labels)))
    for label, count in enumerate(counts):
        assert abs(int((labels[validation] == label).sum()) - fraction * count) <= 1
    assert abs(len(validation) - fraction * len(labels)) <= 0.5 + 1e-6


def test_hold_out_edges() -> None:
    train, validation = hold_out(100, 0.1, 4)
    assert len(train) == 90 and len(validation) == 10 and np.array_equal(validation, hold_out(100, 0.1, 4)[1])
    assert len(hold_out(BALANCED, 0, 4)[1]) == 0
    for fraction in (-0.1, 1.0, float("nan"), 0.999, 0.001):
        with pytest.raises(UserError):
            hold_out(BALANCED[:10], fraction, 0)


def test_addresses_are_distinct_and_stable() -> None:
    addresses = [(0,), (0, 0), (0, 0, 0), (1,), (2**32,), (0, 1), (1, 0)]
    drawn = {int(rng(address[0], "purpose", *address[1:]).integers(2**62)) for address in addresses}
    assert len(drawn) == len(addresses)
    assert rng(0, "one").integers(2**62) != rng(0, "two").integers(2**62)
    with pytest.raises(UserError, match="2\\^64"):
        rng(-1, "purpose")


@pytest.mark.parametrize("seed", range(3))
def test_folds_are_disjoint_cover_all_and_have_their_due_of_every_class(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 4, 203)
    parts = [hold_out_fold(labels, number, 5, seed) for number in range(1, 6)]
    assert np.array_equal(np.sort(np.concatenate([held for _, held in parts])), np.arange(203))
    for train, held in parts:
        assert np.array_equal(np.sort(np.concatenate([train, held])), np.arange(203))
        due = np.bincount(labels, minlength=4) / 5
        assert (abs(np.bincount(labels[held], minlength=4) - due) < 1).all()
    again = hold_out_fold(labels, 3, 5, seed)[1]
    assert np.array_equal(again, parts[2][1])
    assert not np.array_equal(again, hold_out_fold(labels, 3, 5, seed + 1)[1])


@pytest.mark.parametrize("text", ["5", "0/5", "6/5", "1/1", "a/5", "2/", "-1/5"])
def test_a_fold_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match="as in 2/5"):
        parse_fold(text)


def test_more_folds_than_samples() -> None:
    with pytest.raises(UserError, match="use fewer folds"):
        hold_out_fold(np.zeros(3, np.int64), 1, 4, 0)
