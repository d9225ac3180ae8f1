"""All workers draw the same pass of a sampler, share its batches, and find their place in it again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.errors import UserError
from paceline.runtimes.scripts.loading import drawn
from paceline.runtimes.scripts.loading.shuffled import targets_of
from tests.support.shared_loaders import CountingSession, one_pass, shared

DATA = TensorDataset(torch.arange(100.0)[:, None])


class Mixed(Sampler[int]):
    """Draws from every global generator, and from one of its own that goes on from pass to pass."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(50):
            yield int(random.random() * 20 + np.random.rand() * 20 + torch.rand(()) * 20 + self.own.random() * 20)


class Pairs(Sampler[list[int]]):
    """A user's own batch sampler: neighbours belong together, and the last batch is a triple."""

    def __iter__(self) -> Iterator[list[int]]:
        firsts = torch.randperm(10).tolist()
        yield from ([2 * first, 2 * first + 1] for first in firsts)
        yield [97, 98, 99]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, 8),
    "subset": lambda: DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(80))),
    "with replacement": lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, True, 77), drop_last=True),
    "own": lambda: DataLoader(DATA, 8, sampler=Mixed()),
    "whole batches": lambda: DataLoader(DATA, batch_sampler=[[1, 2], [3], [4, 5, 6], [7], [8, 9]]),
    "own batches": lambda: DataLoader(DATA, batch_sampler=Pairs()),
    "own generator": lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, True, generator=torch.Generator())),
    "shuffled": lambda: DataLoader(DATA, 8, shuffle=True),
}
DRAWN = [name for name in LOADERS if name != "shuffled"]


@pytest.fixture(params=[drawn.CHUNK_BATCHES, 3], ids=["whole", "chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(drawn, "CHUNK_BATCHES", request.param)
    return int(request.param)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", DRAWN)
def test_the_batches_of_all_workers_are_those_of_one(name: str, workers: int, chunk: int) -> None:
    alone = shared(LOADERS[name]())
    shares = [shared(LOADERS[name](), worker, workers) for worker in range(workers)]
    for _ in range(3):
        whole, parts = one_pass(alone), [one_pass(share) for share in shares]
        for worker, part in enumerate(parts):
            assert part == whole[worker::workers]
    assert {share.facts.order for share in shares} == {alone.facts.order}
    if chunk > 3:
        assert {share.facts.epoch_samples for share in shares} == {sum(map(len, whole))}
        assert [share.facts.batches for share in shares] == [len(part) for part in parts]


@pytest.mark.parametrize("name", LOADERS)
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shared(LOADERS[name]())
    expected = [one_pass(whole) for _ in range(2)]
    monkeypatch.setattr(drawn, "CHUNK_BATCHES", 2)
    chunks = shared(LOADERS[name]())
    seen = []
    for _ in range(2):
        seen.append([])
        for (x,) in chunks:
            random.random(), np.random.rand(), torch.rand(3)
            seen[-1].append(x.flatten().int().tolist())
    assert seen == expected


def test_shuffled_shards_are_disjoint_and_together_the_data() -> None:
    shares = [shared(LOADERS["shuffled"](), worker, 3) for worker in range(3)]
    first, second = ([one_pass(share) for share in shares] for _ in range(2))
    for passes in (first, second):
        assert sorted(itertools.chain(*itertools.chain(*passes))) == list(range(100))
    assert first != second and {share.facts.epoch_samples for share in shares} == {100}
    assert {share.facts.order for share in shares} == {None}


class Counting:
    """A sampler that keeps a state: each pass begins one sample later."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(self.passes - 1, self.passes + 23))


def test_a_sampler_with_a_state_is_drawn_once_for_each_pass() -> None:
    loader = shared(DataLoader(DATA, 8, sampler=Counting()))
    assert [one_pass(loader)[0][0] for _ in range(3)] == [0, 1, 2]


def test_each_pass_and_each_seed_has_its_own_draw() -> None:
    first, other = shared(LOADERS["subset"](), seed=1), shared(LOADERS["subset"](), seed=2)
    passes = [one_pass(first), one_pass(first), one_pass(other)]
    assert passes[0] != passes[1] and passes[0] != passes[2]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_loop_finds_the_same_batches(name: str, place: int, chunk: int) -> None:
    """It draws the finished passes of a sampler with a state of its own, which so comes to the same one."""
    went_on, resumed = (shared(LOADERS[name](), 1, 2) for _ in range(2))
    expected = [one_pass(went_on) for _ in range(4)][2:]
    resumed.resume_at(2, place)
    assert resumed.position == (2, place)
    assert one_pass(resumed) == one_pass(resumed) == [], "finished passes are run through"
    assert [one_pass(resumed), one_pass(resumed)] == [expected[0][place:], expected[1]]


def test_under_full_each_worker_draws_all() -> None:
    passes = [one_pass(shared(LOADERS["subset"](), worker, 3, split="full")) for worker in range(3)]
    assert all(sorted(itertools.chain(*seen)) == list(range(80)) for seen in passes)
    assert passes[0] != passes[1] != passes[2]


class Counted(RandomSampler):
    """Counts what was drawn of it."""

    draws = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.draws += 1
            yield number


def test_ten_billion_draws_are_drawn_when_they_are_needed() -> None:
    sampler = Counted(DATA, True, 10**10)
    loader = shared(DataLoader(DATA, 8, sampler=sampler), 1, 2)
    (x,) = next(iter(loader))
    assert sampler.draws == 8 * drawn.CHUNK_BATCHES
    assert len(x) == 8 and len(loader) == loader.facts.batches == 625_000_000
    assert loader.facts.epoch_samples == 10**10


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(100))


class EndlessBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0, 1, 2]


@pytest.mark.parametrize(
    "options", [{"batch_size": 4, "sampler": Endless()}, {"batch_sampler": EndlessBatches()}], ids=["draws", "batches"]
)
def test_an_endless_sampler_runs_until_training_is_over(options: dict[str, Any]) -> None:
    session = CountingSession(limit=700)
    loader = shared(DataLoader(DATA, **options), session=session)
    assert len(one_pass(loader)) == 700 and session.finished
    assert one_pass(loader) == []
    assert loader.facts.batches is loader.facts.epoch_samples is None
    with pytest.raises(TypeError, match="has no len"):
        len(loader)


class Growing(Sampler[int]):
    """Draws more in each pass."""

    length = 10

    def __iter__(self) -> Iterator[int]:
        self.length += 10
        return iter(range(self.length))


def test_passes_may_differ_in_length() -> None:
    loader = shared(DataLoader(DATA, 10, sampler=Growing()))
    assert [len(one_pass(loader)) for _ in range(3)] == [2, 3, 4]


def test_weights_of_a_sampler_hold() -> None:
    weights = torch.zeros(100).index_fill(0, torch.arange(80, 100), 1.0)
    batches = one_pass(shared(DataLoader(DATA, 10, sampler=WeightedRandomSampler(weights.tolist(), 250))))
    assert len(batches) == 25 and set(itertools.chain(*batches)) <= set(range(80, 100))


@pytest.mark.parametrize(("replacement", "draws"), [(True, 150), (False, 40), (False, 150)])
def test_a_pass_is_as_long_as_a_random_sampler_draws(replacement: bool, draws: int) -> None:
    numbers = list(
        itertools.chain(*one_pass(shared(DataLoader(DATA, 10, sampler=RandomSampler(DATA, replacement, draws)))))
    )
    times = np.bincount(numbers, minlength=100)
    assert len(numbers) == draws
    assert times.max() > 2 if replacement else times.max() == -(-draws // 100)


def test_a_plain_batch_sampler_is_its_sampler_and_its_size() -> None:
    in_order = shared(DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(range(40)), 12, drop_last=True)))
    assert one_pass(in_order) == [list(range(start, start + 12)) for start in (0, 12, 24)]
    assert in_order.facts.epoch_samples == 36
    shuffled = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 12, drop_last=True))
    batches = one_pass(shared(shuffled, batch_size=12))
    assert [len(batch) for batch in batches] == [12] * 8 and len(set(itertools.chain(*batches))) == 96


def test_drawing_leaves_the_users_generators_as_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(DATA, 10, sampler=RandomSampler(DATA, True, generator=generator))
    before = torch.get_rng_state(), generator.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    iter(shared(loader))
    assert torch.equal(before[0], torch.get_rng_state()) and torch.equal(before[1], generator.get_state())
    assert before[2:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_samples_may_be_named_otherwise_than_by_numbers() -> None:
    class Scaled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            number, scale = index
            return tuple(tensor * scale for tensor in super().__getitem__(number))

    batches = [[(3, 1), (4, 10)], [(5, 2)]]
    assert one_pass(shared(DataLoader(Scaled(*DATA.tensors), batch_sampler=batches))) == [[3, 40], [10]]


REFUSED: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {
    "one worker's sampler": (
        lambda: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 2, 0)),
        "DistributedSampler picks the samples of one worker, but Paceline divides them itself",
    ),
    "inside a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 0), 8, False)),
        "Paceline divides them itself",
    ),
    "an empty batch": (lambda: DataLoader(DATA, batch_sampler=[[1], []]), "list made an empty batch"),
    "numbers of other data": (
        lambda: DataLoader(DATA, 8, sampler=SubsetRandomSampler([3, 100])),
        "drew sample 100 of 100",
    ),
    "numbers below 0": (lambda: DataLoader(DATA, 2, sampler=[3, -1]), "drew sample -1 of 100"),
    "batches that are none": (lambda: DataLoader(DATA, batch_sampler=[1, 2]), "must yield sample numbers"),
    "no batch": (lambda: DataLoader(DATA, 8, sampler=range(7), drop_last=True), "makes 0 batches for 1 worker:"),
    "no sample": (lambda: DataLoader(TensorDataset(torch.zeros(0, 1)), 8), "the loader has no samples: its Sequential"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(UserError, match=message) as error:
        shared(make())
    assert "\n" not in str(error.value)


def test_a_wrong_number_that_is_drawn_late_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "CHUNK_BATCHES", 2)
    loader = shared(DataLoader(DATA, 4, sampler=range(90, 110)))
    with pytest.raises(UserError, match="drew sample 101 of 100"):
        one_pass(loader)


def test_more_workers_than_batches_are_told_so() -> None:
    with pytest.raises(UserError, match="SequentialSampler makes 2 batches for 3 workers"):
        shared(DataLoader(DATA, 50), 0, 3)


def test_a_batch_size_beside_a_batch_sampler_is_one_too_many() -> None:
    with pytest.raises(UserError, match="batch_size=4, and the loader has list, which makes batches itself"):
        shared(LOADERS["whole batches"](), batch_size=4)


@pytest.mark.parametrize(
    "settings",
    [{"split": "labels"}, {"split": "dirichlet:0.5"}, {"validation": 0.1}, {"shard_weights": [1.0]}],
    ids=["labels", "dirichlet", "validation", "weights"],
)
def test_what_chooses_samples_beside_a_sampler_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the loader's SubsetRandomSampler decides what is trained on"):
        shared(LOADERS["subset"](), **settings)


@pytest.mark.parametrize("name", LOADERS)
def test_no_batch_has_more_samples_than_its_loader_declares(name: str) -> None:
    loader = shared(LOADERS[name](), 0, 2)
    assert max(map(len, one_pass(loader))) <= loader.facts.max_samples


class Relabelled(Subset[Any]):
    """Knows the targets of the whole data set, as a careless subclass does."""

    @property
    def targets(self) -> Any:
        return self.dataset.tensors[1]  # type: ignore[attr-defined]


CLASSES = TensorDataset(torch.arange(40.0)[:, None], torch.arange(40) // 20)


@pytest.mark.parametrize(
    "dataset",
    [Subset(CLASSES, list(range(39, -1, -2))), ConcatDataset([Subset(CLASSES, range(10)), Subset(CLASSES, [35, 36])])],
    ids=["subset", "concatenated"],
)
def test_labels_belong_to_their_samples(dataset: Any) -> None:
    targets = targets_of(dataset)
    assert targets is not None and targets.tolist() == [int(dataset[number][1]) for number in range(len(dataset))]


def test_labels_of_other_samples_are_not_taken() -> None:
    with pytest.raises(UserError, match="needs class numbers"):
        shared(DataLoader(Relabelled(CLASSES, range(20, 40)), 4, shuffle=True), split="labels")


def test_labels_divide_the_data_of_a_dict() -> None:
    columns = {"x": CLASSES.tensors[0], "labels": CLASSES.tensors[1]}
    shares = [shared(columns, worker, 2, split="labels", batch_size=4, in_passes=True) for worker in range(2)]
    seen = [{int(label) for batch in share for label in batch["labels"]} for share in shares]
    assert sorted(map(sorted, seen)) == [[0], [1]] and shares[0].facts.skew == 0.5
