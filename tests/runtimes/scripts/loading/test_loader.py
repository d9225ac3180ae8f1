"""A worker's loader is to the eye the user's: the same batches as in plain torch, read in the same way."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from paceline.errors import UserError
from paceline.randomness import mix64
from tests.support.shared_loaders import CountingSession, equal, one_pass, shared

pytestmark = pytest.mark.long

NUMBERS = TensorDataset(torch.arange(100.0)[:, None])


class Augmented(Dataset[Any]):
    """Each sample is changed by draws from every global generator."""

    offset = 0.0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(), self.offset])
        return torch.tensor([float(number)]), noise


class Backwards(Sampler[int]):
    """A user's own sampler, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(99, -1, -1))


class EveryThird(Sampler[list[int]]):
    """A user's own batch sampler, with a length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, 100, 3)) for start in range(3)])


def doubled(items: list[Any]) -> Any:
    return [torch.stack([x for (x,) in items]) * 2]


PLAIN: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 32},
    "without the short batch": {"batch_size": 32, "drop_last": True},
    "own sampler": {"batch_size": 32, "sampler": Backwards()},
    "own batches": {"batch_sampler": EveryThird()},
    "own collate_fn": {"batch_size": 7, "collate_fn": doubled},
    "in processes": {"batch_size": 9, "num_workers": 2},
    "pinned": {"batch_size": 32, "pin_memory": True},
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize("name", PLAIN)
def test_one_worker_sees_what_plain_torch_shows(name: str) -> None:
    plain: Any = DataLoader(NUMBERS, **PLAIN[name])
    loader = shared(DataLoader(NUMBERS, **PLAIN[name]))
    for _ in range(2):
        assert equal(list(loader), list(plain))
    if name != "own sampler":
        assert len(loader) == len(plain)


class MyLoader(DataLoader[Any]):
    """A loader with something beside."""

    def describe(self) -> str:
        return f"batches of {self.batch_size}"


def test_the_loader_looks_like_the_users() -> None:
    users = MyLoader(NUMBERS, 8, shuffle=True, collate_fn=doubled, num_workers=2, pin_memory=True, drop_last=True)
    loader: Any = shared(users, 0, 2)
    assert isinstance(loader, DataLoader) and loader.describe() == "batches of 8"
    names = [
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "drop_last",
        "num_workers",
        "collate_fn",
        "pin_memory",
    ]
    names += ["timeout", "worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context"]
    for name in [*names, "generator"]:
        assert getattr(loader, name) is getattr(users, name), name
    assert len(loader.dataset) == 100 and len(loader) == 6
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 4
    with pytest.raises(AttributeError):
        loader.nothing  # noqa: B018


@pytest.mark.parametrize("processes", [0, 2])
def test_augmented_batches_come_again_in_a_second_run_and_after_a_resume(processes: int) -> None:
    def passes(loader: Any, number: int) -> list[Any]:
        return [list(loader) for _ in range(number)]

    def make() -> Any:
        return shared(DataLoader(Augmented(), 4, shuffle=True, num_workers=processes), 1, 2)

    first, second, resumed = passes(make(), 2), passes(make(), 2), make()
    assert all(map(equal, first, second))
    assert not equal(first[0], first[1])
    resumed.resume_at(1, 3)
    assert passes(resumed, 1) == [[]] and equal(list(resumed), first[1][3:])
    noises = torch.cat([noise for batches in first for _, noise in batches])
    assert len(noises.unique(dim=0)) == len(noises)


def test_processes_change_no_draw() -> None:
    """The generators are seeded by the key of the batch, here and there."""
    loaders = [shared(DataLoader(Augmented(), 4, num_workers=processes)) for processes in (0, 1, 2)]
    here, one, two = (list(loader) for loader in loaders)
    assert equal(here, one) and equal(one, two)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_batch_begins_with_its_key_and_samples(processes: int) -> None:
    session = CountingSession()
    loader = shared(DataLoader(NUMBERS, 32, num_workers=processes), session=session, number=5, seed=3)
    for number, _ in enumerate(loader):
        assert len(session.begun) == number + 1, "not ahead of the loop"
        assert loader.position == (0, number + 1)
    list(loader)
    keys = [mix64(3, 0, 5, number, place) for number in range(2) for place in range(4)]
    assert session.begun == keys
    assert [one.samples for one in loader.handed_out.waiting] == [32, 32, 32, 4] * 2


def init_process(number: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Augmented) and info.id == number
    info.dataset.offset = 100.0 + number


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_is_called_with_the_users_data_set(context: str) -> None:
    options: dict[str, Any] = {"worker_init_fn": init_process, "multiprocessing_context": context}
    loader = shared(DataLoader(Augmented(), 10, num_workers=2, **options))
    assert [noise[0, 3].item() for _, noise in loader] == [100.0, 101.0, 100.0, 101.0]


def test_persistent_processes_stay_and_abandoned_ones_end() -> None:
    for persistent in (True, False):
        loader = shared(DataLoader(Augmented(), 4, num_workers=2, persistent_workers=persistent))
        seen = set()
        for number in range(3):
            assert [x[0].item() for x, _ in itertools.islice(loader, 3)] == [0.0, 4.0, 8.0]
            assert loader.position == (number, 3)
            if persistent:
                seen.add(tuple(sorted(child.pid or 0 for child in multiprocessing.active_children())))
            else:
                assert not multiprocessing.active_children()
        assert [len(ids) for ids in seen] == [2] * persistent, "always the same two"
        del loader
        assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [0, 2])
def test_a_pass_that_was_left_is_followed_by_the_next(processes: int) -> None:
    def make() -> Any:
        return shared(DataLoader(Augmented(), 4, shuffle=True, num_workers=processes))

    plain, left = make(), make()
    expected = [list(plain) for _ in range(3)]
    assert equal([next(iter(left))], expected[0][:1]), "a look at the first batch"
    assert equal(list(itertools.islice(left, 2)), expected[1][:2]) and left.position == (1, 2)
    assert equal(list(left), expected[2]) and left.position == (2, 10)


def test_two_iterations_at_a_time_are_two_passes() -> None:
    loader = shared(DataLoader(NUMBERS, 25, shuffle=True))
    again = shared(DataLoader(NUMBERS, 25, shuffle=True))
    pairs = [(one, other) for (one,), (other,) in zip(loader, loader, strict=True)]
    first, second = ([x for (x,) in again] for _ in range(2))
    assert equal([[one] for one, _ in pairs], [[x] for x in first])
    assert equal([[other] for _, other in pairs], [[x] for x in second])
    assert loader.position == (1, 4)


def test_training_that_is_over_ends_every_pass() -> None:
    session = CountingSession(limit=6)
    loader = shared(DataLoader(NUMBERS, 25), session=session)
    assert [len(list(loader)) for _ in range(3)] == [4, 2, 0]
    assert len(session.begun) == 6


@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_out_the_short_batch(shuffle: bool) -> None:
    """With one sample too many, batch norm would have a batch of one."""
    data = TensorDataset(torch.arange(65.0)[:, None])
    batches = one_pass(shared(DataLoader(data, 32, shuffle=shuffle, drop_last=True)))
    assert [len(batch) for batch in batches] == [32] * 2
    assert len(set(itertools.chain(*batches))) == 64
    assert (list(itertools.chain(*batches)) == list(range(64))) is not shuffle


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
        assert all(type(number) is int for number in numbers)
        return [[torch.full((1,), 10.0 * number)] for number in numbers]


class Renamed(UserDict[int, Any]):
    """A mapping from sample numbers to samples."""

    def __getitem__(self, key: int) -> Any:
        return [super().__getitem__(key) + 7]


class Unsized:
    """Samples without a length, which a sampler knows."""

    def __getitem__(self, number: int) -> Any:
        return [torch.tensor([number])]


@pytest.mark.parametrize("processes", [0, 1])
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
def test_samples_are_what_indexing_returns(dataset: Any, expected: list[int], processes: int) -> None:
    loader = shared(DataLoader(dataset, 4, num_workers=processes))
    assert list(itertools.chain(*one_pass(loader))) == expected
    shuffled = shared(DataLoader(dataset, 2, shuffle=True, num_workers=processes))
    assert sorted(itertools.chain(*one_pass(shuffled))) == sorted(expected)


def test_a_data_set_without_a_length_is_read_by_its_sampler() -> None:
    dataset: Any = Unsized()
    assert one_pass(shared(DataLoader(dataset, 2, sampler=[1000, 2, 7]))) == [[1000, 2], [7]]


class Batched(Dataset[Any]):
    """A data set that makes batches itself, of 1, 2, 3, ... samples."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        assert type(number) is int
        return {"x": torch.full((number + 1,), float(number)), "noise": torch.rand(1)}


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_may_make_batches_itself(shuffle: bool, processes: int) -> None:
    def batches(worker: int, workers: int) -> list[Any]:
        loader = shared(DataLoader(Batched(), batch_size=None, shuffle=shuffle, num_workers=processes), worker, workers)
        found = list(loader)
        assert [one.samples for one in loader.handed_out.waiting] == [len(batch["x"]) for batch in found]
        return found

    alone, shares = batches(0, 1), [batches(worker, 2) for worker in range(2)]
    assert sorted(len(batch["x"]) for batch in alone) == [1, 2, 3, 4, 5]
    assert sorted(len(batch["x"]) for batch in itertools.chain(*shares)) == [1, 2, 3, 4, 5]
    assert [batch["noise"] for batch in alone] == [batch["noise"] for batch in batches(0, 1)]


BARE: dict[str, Any] = {
    "tensor": NUMBERS.tensors[0],
    "tensors": NUMBERS.tensors,
    "data set": NUMBERS,
    "list": [[x] for x in NUMBERS.tensors[0]],
    "dict": {"x": NUMBERS.tensors[0], "more": (torch.zeros(100, 2), None)},
}


@pytest.mark.parametrize("kind", BARE)
def test_data_without_a_loader_is_one_endless_iteration(kind: str) -> None:
    def numbers(batch: Any) -> list[int]:
        x = batch["x"] if kind == "dict" else batch if kind == "tensor" else batch[0]
        return [int(number) for number in x.flatten()]

    loader = shared(BARE[kind], session=CountingSession(limit=10), batch_size=25)
    batches = [numbers(batch) for batch in loader]
    assert len(batches) == 10 and loader.position == (2, 2)
    assert sorted(itertools.chain(*batches[:4])) == sorted(itertools.chain(*batches[4:8])) == list(range(100))
    assert len(loader) == 4 and len(loader.dataset) == 100 and loader.batch_size == 25
    resumed = shared(BARE[kind], session=CountingSession(limit=5), batch_size=25)
    resumed.resume_at(1, 1)
    assert [numbers(batch) for batch in resumed] == batches[5:]
    in_passes = shared(BARE[kind], batch_size=25, in_passes=True)
    assert [[numbers(batch) for batch in in_passes] for _ in range(2)] == [batches[:4], batches[4:8]]


def test_a_data_set_that_came_without_a_loader_is_indexed_too() -> None:
    loader = shared(Raised(torch.arange(6.0)[:, None]), batch_size=3)
    assert next(iter(loader))[0].min() >= 1000


class Upper(dict[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        return super().__getitem__(key) + 1000


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([2 * x] for (x,) in super().__iter__())


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a subclass of dict": (Upper(x=torch.zeros(8, 1)), {}, "Upper is a mapping, but not a plain dict: give dict"),
    "a list in a dict": ({"x": torch.zeros(8, 1), "y": [0] * 8}, {}, "int among the tensors"),
    "an array in a dict": ({"x": torch.zeros(8, 1), "y": np.zeros(8)}, {}, "ndarray among the tensors"),
    "lengths in a dict": ({"x": torch.zeros(8, 1), "y": torch.zeros(9)}, {}, "tensors of 8 and 9 inputs"),
    "lengths of tensors": ((torch.zeros(8, 1), torch.zeros(9)), {}, "tensors of 8 and 9 inputs"),
    "no data": (torch.zeros(0, 1), {}, "Tensor with 0 samples: give data"),
    "batches of none": (torch.zeros(8, 1), {"batch_size": 0}, "batch_size=0"),
    "a number": (5, {}, "int has no length or cannot be indexed"),
    "no length": (Unsized(), {}, "Unsized has no length or cannot be indexed"),
    "too large a batch": (NUMBERS, {"batch_size": 101}, "batches of 101: there are only 100 samples"),
    "one sample": (torch.zeros(1, 1), {"batch_size": 2}, r"loader\): batches of 2: there is only 1 sample; use"),
    "batches changed on the way": (Doubling(NUMBERS, 8), {}, "Doubling has an __iter__ of its own"),
    "columns": (DataLoader({"x": torch.zeros(8, 1)}, 4), {}, "give the dict itself"),  # type: ignore[arg-type]
    "another size": (DataLoader(NUMBERS, 8), {"batch_size": 4}, "batch_size=4, and the loader has 8: leave it out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_refused_in_one_line(what: str) -> None:
    data, options, message = REFUSED[what]
    with pytest.raises(UserError, match=message) as error:
        shared(data, **options)
    assert "\n" not in str(error.value)
