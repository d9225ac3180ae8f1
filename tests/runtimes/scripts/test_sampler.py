"""A loop sees the batches that its `DataLoader` would have given it: which samples, how often, in which sizes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.config import RunConfig

NUMBERS = TensorDataset(torch.arange(100.0)[:, None])
HELD = torch.arange(80, 100)


class Backwards(Sampler[int]):
    """A user's own sampler, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(99, -1, -1))


class Pairs(Sampler[list[int]]):
    """A user's own batch sampler: neighbours belong together, and the last batch is a triple."""

    def __iter__(self) -> Iterator[list[int]]:
        firsts = torch.randperm(10).tolist()
        yield from ([2 * first, 2 * first + 1] for first in firsts)
        yield [97, 98, 99]


def looped(loader: Any, epochs: int = 2, accumulate: int = 1, model: Any = None, **settings: Any) -> list[list[Tensor]]:
    """The batches of each pass of a loop on one worker, as they are seen there."""
    net = model or nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    session = paceline.join(RunConfig(strategy="classic", **settings))
    _, _, loader = session.prepare(net, optimizer, loader, epochs=epochs, accumulate=accumulate)
    passes = []
    for _ in range(epochs):
        passes.append([])
        for number, (x, *_) in enumerate(loader):
            passes[-1].append(x.clone())
            (net(x).mean() / accumulate).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert len(passes[-1]) == len(loader)
    assert session.finished
    return passes


def numbers_of(batches: list[Tensor]) -> list[int]:
    return torch.cat(batches).flatten().int().tolist()


def test_held_out_samples_stay_out_and_the_rest_come_once_a_pass() -> None:
    first, second = looped(DataLoader(NUMBERS, 32, sampler=SubsetRandomSampler(range(80))))
    assert sorted(numbers_of(first)) == sorted(numbers_of(second)) == list(range(80))
    assert numbers_of(first) != numbers_of(second), "each pass has its own order"
    assert [len(batch) for batch in first] == [32, 32, 16]


def test_weights_of_a_sampler_hold() -> None:
    weights = torch.zeros(100).index_fill(0, HELD, 1.0)
    (drawn,) = looped(DataLoader(NUMBERS, 10, sampler=WeightedRandomSampler(weights.tolist(), 250)), epochs=1)
    assert len(drawn) == 25 and set(numbers_of(drawn)) <= set(HELD.tolist())


def test_a_loader_that_does_not_shuffle_keeps_its_order() -> None:
    for batches in looped(DataLoader(NUMBERS, 32)):
        assert numbers_of(batches) == list(range(100)) and len(batches) == 4


def test_a_sampler_of_ones_own_decides_the_order() -> None:
    for batches in looped(DataLoader(NUMBERS, 32, sampler=Backwards())):
        assert numbers_of(batches) == list(range(99, -1, -1))


@pytest.mark.parametrize(("replacement", "draws"), [(True, 150), (False, 40), (False, 150)])
def test_a_pass_is_as_long_as_a_random_sampler_draws(replacement: bool, draws: int) -> None:
    sampler = RandomSampler(NUMBERS, replacement, draws)
    (drawn,) = looped(DataLoader(NUMBERS, 10, sampler=sampler), epochs=1)
    times = np.bincount(numbers_of(drawn), minlength=100)
    assert len(numbers_of(drawn)) == draws
    assert times.max() > 2 if replacement else times.max() == -(-draws // 100)


@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_out_the_short_batch(shuffle: bool) -> None:
    """With one sample too many, batch norm would have a batch of one."""
    data = TensorDataset(torch.arange(65.0)[:, None])
    norm = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    first, second = looped(DataLoader(data, 32, shuffle=shuffle, drop_last=True), model=norm)
    assert [len(batch) for batch in first + second] == [32] * 4
    assert len(set(numbers_of(first))) == 64
    assert (numbers_of(first) == list(range(64))) is not shuffle


def test_whole_batches_of_a_batch_sampler_come_as_they_are() -> None:
    first, second = looped(DataLoader(NUMBERS, batch_sampler=Pairs()))
    for batches in (first, second):
        assert [len(batch) for batch in batches] == [2] * 10 + [3]
        assert all(numbers_of([batch])[1] - numbers_of([batch])[0] == 1 for batch in batches)
        assert sorted(numbers_of(batches)) == [*range(20), 97, 98, 99]
    assert numbers_of(first) != numbers_of(second)


def test_a_plain_batch_sampler_is_its_sampler_and_its_size() -> None:
    batches = BatchSampler(SequentialSampler(range(40)), 12, drop_last=True)
    for drawn in looped(DataLoader(NUMBERS, batch_sampler=batches)):
        assert numbers_of(drawn) == list(range(36)) and [len(batch) for batch in drawn] == [12] * 3


def test_drawing_leaves_the_users_generators_as_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(NUMBERS, 10, sampler=RandomSampler(NUMBERS, True, generator=generator))
    net = nn.Linear(1, 1)
    states = torch.get_rng_state(), generator.get_state()
    paceline.join().prepare(net, loader, torch.optim.SGD(net.parameters(), 0.1), epochs=1)
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], generator.get_state())


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class EndlessBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0, 1]


class Stream(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(8, 1))


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([2 * x] for (x,) in super().__iter__())


class Growing(Sampler[int]):
    """Draws more in each pass."""

    length = 10

    def __iter__(self) -> Iterator[int]:
        self.length += 10
        return iter(range(self.length))


REFUSED: dict[str, tuple[Any, str]] = {
    "one worker's sampler": (
        lambda: DataLoader(NUMBERS, 8, sampler=DistributedSampler(NUMBERS, 2, 0)),
        "DistributedSampler picks the samples of one worker, but Paceline divides them itself",
    ),
    "inside a batch sampler": (
        lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(DistributedSampler(NUMBERS, 2, 0), 8, False)),
        "Paceline divides them itself",
    ),
    "an endless sampler": (lambda: DataLoader(NUMBERS, 8, sampler=Endless()), "went on after 10,000 draws"),
    "endless batches": (lambda: DataLoader(NUMBERS, batch_sampler=EndlessBatches()), "went on after 10,000 draws"),
    "an empty batch": (lambda: DataLoader(NUMBERS, batch_sampler=[[1], []]), "list made an empty batch"),
    "too many draws": (
        lambda: DataLoader(NUMBERS, 8, sampler=RandomSampler(NUMBERS, True, 10**10)),
        "RandomSampler draws 10,000,000,000 times in a pass, and 100,000,000 is the most",
    ),
    "numbers of other data": (
        lambda: DataLoader(NUMBERS, 8, sampler=SubsetRandomSampler([3, 100])),
        "drew sample 100 of 100",
    ),
    "names of samples": (lambda: DataLoader(NUMBERS, 8, sampler=["a", "b"]), "must yield sample numbers"),
    "no batch": (lambda: DataLoader(NUMBERS, 8, sampler=range(7), drop_last=True), "makes 0 batches for 1 workers"),
    "other passes": (lambda: DataLoader(NUMBERS, 8, sampler=Growing()), "made 4 batches for pass 2, and 3 for"),
    "a stream with a length": (lambda: DataLoader(Stream(), 8), "Stream is a stream"),
    "batches changed on the way": (lambda: Doubling(NUMBERS, 8), "Doubling has an __iter__ of its own"),
    "columns": (lambda: DataLoader({"x": torch.zeros(8, 1)}, 4), "give the dict itself"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtimes.scripts.draws.MAX_DRAWS_UNSIZED", 10_000, raising=False)
    make, message = REFUSED[what]
    with pytest.raises(paceline.UserError, match=message) as error:
        looped(make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"split": "labels"}, {"split": "dirichlet:0.5"}, {"validation": 0.1}, {"shard_weights": [1.0]}],
    ids=["labels", "dirichlet", "validation", "weights"],
)
def test_what_chooses_samples_beside_a_sampler_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(paceline.UserError, match="the loader's SubsetRandomSampler decides what is trained on"):
        looped(DataLoader(NUMBERS, 8, sampler=SubsetRandomSampler(range(80))), **settings)


def test_a_worker_init_fn_is_said_not_to_be_called() -> None:
    with pytest.warns(UserWarning, match="worker_init_fn is not called"):
        looped(DataLoader(NUMBERS, 50, num_workers=1, worker_init_fn=print), epochs=1)


class Raised(TensorDataset):
    """A tensor data set with a transform."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor + 1000 for tensor in super().__getitem__(index))


class Whole(Dataset[Any]):
    """A data set that is asked for all samples of a batch at once."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("torch asks for the whole batch")

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [[torch.full((1,), 10.0 * number)] for number in numbers]


class Renamed(UserDict[int, Any]):
    """A mapping from sample numbers to samples."""

    def __getitem__(self, key: int) -> Any:
        return [super().__getitem__(key) + 7]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Raised(torch.arange(6.0)[:, None]), [1000, 1001, 1002, 1003, 1004, 1005]),
        (Subset(Raised(torch.arange(6.0)[:, None]), [4, 2]), [1004, 1002]),
        (Whole(), [0, 10, 20, 30, 40, 50]),
        (Renamed({number: torch.ones(1) * number for number in range(3)}), [7, 8, 9]),
        ({number: [torch.ones(1) * number] for number in range(3)}, [0, 1, 2]),
    ],
    ids=["tensors", "subset", "whole batches", "mapping", "dict of samples"],
)
def test_samples_are_what_indexing_returns(dataset: Any, expected: list[int]) -> None:
    for batches in looped(DataLoader(dataset, 4)):
        assert numbers_of(batches) == expected


def test_a_data_set_that_came_without_a_loader_is_indexed_too() -> None:
    _, batches = paceline.join().prepare(nn.Linear(1, 1), Raised(torch.arange(6.0)[:, None]), batch_size=3)
    assert next(iter(batches))[0].min() >= 1000


class Upper(dict[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        return super().__getitem__(key) + 1000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Upper(x=torch.zeros(8, 1)), "Upper is a mapping, but not a plain dict: give dict"),
        ({"x": torch.zeros(8, 1), "y": [0] * 8}, "int among the tensors"),
        ({"x": torch.zeros(8, 1), "y": np.zeros(8)}, "ndarray among the tensors"),
        ({"x": torch.zeros(8, 1), "y": torch.zeros(9)}, "tensors of 8 and 9 inputs"),
    ],
    ids=["subclass", "list", "array", "lengths"],
)
def test_a_mapping_whose_rows_are_unclear_is_refused(data: Any, message: str) -> None:
    with pytest.raises(paceline.UserError, match=message):
        paceline.join().prepare(nn.Linear(1, 1), data, batch_size=4)


class Relabelled(Subset[Any]):
    """Knows the targets of the whole data set, as a careless subclass does."""

    @property
    def targets(self) -> Tensor:
        return self.dataset.tensors[1]  # type: ignore[attr-defined,no-any-return]


CLASSES = TensorDataset(torch.arange(40.0)[:, None], torch.arange(40) // 20)


@pytest.mark.parametrize(
    "dataset",
    [Subset(CLASSES, list(range(39, -1, -2))), ConcatDataset([Subset(CLASSES, range(10)), Subset(CLASSES, [35, 36])])],
    ids=["subset", "concatenated"],
)
def test_labels_belong_to_their_samples(dataset: Any) -> None:
    from paceline.runtimes.scripts.adopt import sort_out
    from paceline.runtimes.scripts.sampler import targets_of

    targets = targets_of(sort_out(nn.Linear(1, 1), (dataset,), 4))
    assert targets is not None and targets.tolist() == [int(dataset[number][1]) for number in range(len(dataset))]


def test_labels_of_other_samples_are_not_taken() -> None:
    dataset = Relabelled(CLASSES, range(20, 40))
    with pytest.raises(paceline.UserError, match="needs class numbers"):
        looped(DataLoader(dataset, 4, shuffle=True), split="labels")


@pytest.mark.parametrize("samples", [9, 10, 11, 13, 15, 16])
@pytest.mark.parametrize("scheme", ["shuffle", "sampler", "batches", "tensors"])
def test_a_short_last_step_is_the_mean_over_its_samples(samples: int, scheme: str) -> None:
    """Four batches of two make a step; clipping sees the gradient of the whole step, before it is pushed."""
    x = torch.randn(samples, 3)
    data, epochs, size = TensorDataset(x), 2, 2
    batches = [list(range(start, min(start + 2, samples))) for start in range(0, samples, 2)]
    given: dict[str, Any] = {
        "shuffle": DataLoader(data, size, shuffle=True),
        "sampler": DataLoader(data, size),
        "batches": DataLoader(data, batch_sampler=batches),
        "tensors": (x,),
    }
    net, session = nn.Linear(3, 1, bias=False), paceline.join()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    options = {"batch_size": size} if scheme == "tensors" else {}
    _, _, loader = session.prepare(net, optimizer, given[scheme], epochs=epochs, accumulate=4, **options)
    for _ in range(epochs):
        seen: list[Tensor] = []
        for number, (part,) in enumerate(loader):
            seen.append(part)
            session.backward(net(part).mean() / 4)
            if (number + 1) % 4 == 0:
                rows = torch.cat(seen).unique(dim=0)
                torch.testing.assert_close(net.weight.grad, rows.mean(0, keepdim=True))
                torch.testing.assert_close(torch.tensor(session._loss), (rows @ net.weight.T).mean().detach())
                optimizer.step()
                optimizer.zero_grad()
                seen.clear()
        assert not seen and (number + 1) == len(loader)
    assert session.finished


def test_drop_last_with_accumulation_leaves_no_short_batch() -> None:
    for batches in looped(DataLoader(TensorDataset(torch.arange(23.0)[:, None]), 4, drop_last=True), accumulate=2):
        assert [len(batch) for batch in batches] == [4] * 6
        assert numbers_of(batches) == [*range(20), *range(16, 20)], "the last comes again, with weight 0"


def begun(epochs: int = 3) -> tuple[Any, Any, nn.Module]:
    session, net = paceline.join(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    _, _, loader = session.prepare(net, optimizer, DataLoader(NUMBERS, 25), epochs=epochs)
    return loader, optimizer, net


def test_a_loop_that_leaves_a_pass_and_begins_another_is_told_so() -> None:
    loader, optimizer, net = begun()
    for number, (x,) in enumerate(loader):
        net(x).mean().backward()
        optimizer.step()
        if number == 1:
            break
    with pytest.raises(paceline.UserError, match="left the loader after 2 of the 4 steps of a pass"):
        next(iter(loader))


def test_a_look_at_the_first_batch_and_a_break_at_the_last_shift_nothing() -> None:
    loader, optimizer, net = begun()
    assert numbers_of([next(iter(loader))[0]]) == list(range(25))
    held = iter(loader)
    next(held)
    for _ in range(3):
        seen = []
        for number, (x,) in enumerate(loader):
            seen.append(x)
            net(x).mean().backward()
            optimizer.step()
            if number + 1 == len(loader):
                break
        assert numbers_of(seen) == list(range(100))
    with pytest.raises(paceline.UserError, match="two loops over one loader"):
        next(held)
