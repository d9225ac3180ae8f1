"""Workers share a stream: each batch comes to one of them, and a resumed worker goes on where it was."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from paceline.errors import UserError
from tests.support.shared_loaders import CountingSession, equal, one_pass, shared

pytestmark = pytest.mark.long


class Shuffled(IterableDataset[Tensor]):
    """A stream that shuffles with global generators, and divides itself over loader processes."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        numbers = list(range(40) if info is None else range(info.id, 40, info.num_workers))
        random.shuffle(numbers)
        for number in numbers:
            yield torch.tensor([number, np.random.rand(), torch.rand(())])


class Sized(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in range(10))


class Batches:
    """A pipeline that yields batches: neither a data set of torch nor indexed."""

    def __iter__(self) -> Iterator[Any]:
        return ({"x": torch.full((size + 1, 1), float(size))} for size in range(5))


def numbers_of(batches: list[Tensor]) -> list[int]:
    return torch.cat(batches)[:, 0].int().tolist()


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_batches_of_all_workers_are_those_of_one(workers: int, processes: int) -> None:
    def make(worker: int, workers: int) -> Any:
        return shared(DataLoader(Shuffled(), 4, num_workers=processes), worker, workers)

    alone, shares = make(0, 1), [make(worker, workers) for worker in range(workers)]
    passes = []
    for _ in range(2):
        passes.append(list(alone))
        for worker, share in enumerate(shares):
            assert equal([[x] for x in share], [[x] for x in passes[-1][worker::workers]])
        assert sorted(numbers_of(passes[-1])) == list(range(40))
    assert numbers_of(passes[0]) != numbers_of(passes[1])
    assert (shares[0].facts.note is None) == (workers == 1)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_resumed_stream_goes_on_where_it_was(processes: int) -> None:
    def make() -> Any:
        return shared(DataLoader(Shuffled(), 4, num_workers=processes), 1, 2)

    went_on, resumed = make(), make()
    expected = [list(went_on) for _ in range(3)]
    resumed.resume_at(1, 2)
    assert list(resumed) == []
    assert equal([[x] for x in resumed], [[x] for x in expected[1][2:]]) and resumed.position == (1, 5)
    assert equal([[x] for x in resumed], [[x] for x in expected[2]])
    assert "it must yield the same data again" in str(resumed.facts.unresumable) and resumed.state() is None


def test_a_pass_that_was_left_is_followed_by_the_next() -> None:
    whole, left = (shared(DataLoader(Shuffled(), 4)) for _ in range(2))
    expected = [list(whole) for _ in range(2)]
    assert equal([[next(iter(left))]], [[expected[0][0]]])
    assert equal([[x] for x in left], [[x] for x in expected[1]]) and left.position == (1, 10)


def test_under_full_each_worker_takes_the_whole_stream() -> None:
    passes = [list(shared(DataLoader(Shuffled(), 4), worker, 2, split="full")) for worker in range(2)]
    assert all(sorted(numbers_of(batches)) == list(range(40)) for batches in passes)
    assert numbers_of(passes[0]) != numbers_of(passes[1])


def test_the_length_is_known_if_the_stream_has_one() -> None:
    loaders = [shared(DataLoader(Sized(), 3), worker, 3) for worker in range(3)]
    assert [len(loader) for loader in loaders] == [len(one_pass(loader)) for loader in loaders] == [2, 1, 1]
    assert [(loader.facts.epoch_samples, loader.facts.batches) for loader in loaders] == [(10, 2), (10, 1), (10, 1)]
    assert len(shared(DataLoader(Sized(), 3, drop_last=True))) == 3
    unknown = shared(DataLoader(Shuffled(), 3))
    assert (unknown.facts.epoch_samples, unknown.facts.batches, unknown.facts.batch_size) == (None, None, 3)
    with pytest.raises(TypeError):
        len(unknown)


def test_a_bare_stream_yields_batches_unless_a_size_is_given() -> None:
    session = CountingSession()
    loader = shared(Batches(), 1, 2, session)
    assert [len(batch["x"]) for batch in loader] == [2, 4]
    assert [one.samples for one in loader.handed_out.waiting] == [2, 4] and len(session.begun) == 2
    assert isinstance(loader, DataLoader) and isinstance(loader.dataset, Batches)
    assert [len(x) for x in shared(Sized(), batch_size=4)] == [4, 4, 2]
    assert [x.shape for x in shared(Sized())] == [(1,)] * 10
    with pytest.raises(UserError, match="Batches yields batches: leave batch_size out"):
        shared(Batches(), batch_size=3)


def test_a_stream_that_is_not_in_passes_goes_on_until_training_is_over() -> None:
    loader = shared(Batches(), session=CountingSession(limit=12), in_passes=False)
    assert len(list(loader)) == 12 and loader.position == (2, 2)
    resumed = shared(Batches(), session=CountingSession(limit=3), in_passes=False)
    resumed.resume_at(1, 4)
    assert [len(batch["x"]) for batch in resumed] == [5, 1, 2]


def test_a_stream_without_a_batch_is_told_so() -> None:
    with pytest.raises(UserError, match="pass 1 over generator has no batch"):
        list(shared((x for x in ()), in_passes=False))


@pytest.mark.parametrize("settings", [{"split": "labels"}, {"validation": 0.1}], ids=str)
def test_what_chooses_samples_beside_a_stream_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the stream Sized decides what is trained on") as error:
        shared(DataLoader(Sized(), 2), **settings)
    assert "\n" not in str(error.value)


class Resumable(IterableDataset[Tensor]):
    """A stream that keeps its place, and counts what it reads."""

    def __init__(self, extra: Any = None) -> None:
        self.place, self.reads, self.extra = 0, 0, extra

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 40:
            self.reads, self.place = self.reads + 1, self.place + 1
            yield torch.tensor([self.place - 1.0, torch.rand(())])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("batches", [0, 1, 3, 5])
def test_a_stream_with_a_state_is_not_read_again(batches: int) -> None:
    whole, cut = (shared(DataLoader(Resumable(), 4), 1, 2) for _ in range(2))
    expected = [[[x] for x in whole] for _ in range(3)]
    list(cut)
    iterator = iter(cut)
    for _ in range(batches):
        next(iterator)
    state = cut.state()
    assert state is not None and cut.facts.unresumable is None
    dataset = Resumable()
    resumed = shared(DataLoader(dataset, 4), 1, 2)
    resumed.resume_at(*cut.position)
    resumed.load_state(state)
    assert [x for x in resumed] == []  # in a loop
    assert equal([[x] for x in resumed], expected[1][batches:])
    assert dataset.reads == 40 - max(0, 8 * batches)
    assert equal([[x] for x in resumed], expected[2])


def test_a_state_at_the_end_of_a_pass_begins_the_next() -> None:
    whole, cut = (shared(DataLoader(Resumable(), 4)) for _ in range(2))
    expected = [[[x] for x in whole] for _ in range(2)]
    list(cut)
    resumed = shared(DataLoader(Resumable(), 4))
    resumed.resume_at(*cut.position)
    resumed.load_state(cut.state() or {})
    assert [list(resumed), equal([[x] for x in resumed], expected[1])] == [[], True]


def test_a_state_that_cannot_be_saved_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"the state_dict\(\) of Resumable holds set: keep numbers") as error:
        shared(DataLoader(Resumable({1}), 4))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("batches", [2, 5])
def test_a_stateful_loader_goes_on_from_its_state(processes: int, batches: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        return shared(stateful(Resumable(), 4, num_workers=processes), 1, 2)

    whole, cut, resumed = make(), make(), make()
    expected = [[[x] for x in whole] for _ in range(2)]
    iterator = iter(cut)
    for _ in range(batches):
        next(iterator)
    resumed.resume_at(*cut.position)
    resumed.load_state(cut.state())
    places = [[x[:, 0].tolist() for (x,) in seen] for seen in (expected[0][batches:], [[x] for x in resumed])]
    assert places[0] == places[1]
    assert len(list(resumed)) == len(expected[1])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
def test_a_stateful_loader_of_numbered_samples_is_a_loader() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = TensorDataset(torch.arange(100.0)[:, None])
    shares = [shared(stateful(data, 8, shuffle=True), worker, 2) for worker in range(2)]
    assert sorted(itertools.chain(*(itertools.chain(*one_pass(share)) for share in shares))) == list(range(100))


class Divisible(Sized):
    """What stands for a stream of Hugging Face `datasets`: it can be divided, and has epochs."""

    def __init__(self, numbers: range, epoch: list[int]) -> None:
        self.numbers, self._epoch = numbers, epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = epoch

    def __len__(self) -> int:
        raise TypeError

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number + 100.0 * self._epoch[0]]) for number in self.numbers)


def test_a_stream_that_can_be_divided_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def split_dataset_by_node(dataset: Divisible, rank: int, world_size: int) -> Divisible:
        return Divisible(dataset.numbers[rank::world_size], [0])

    module, distributed = types.ModuleType("datasets"), types.ModuleType("datasets.distributed")
    vars(module)["IterableDataset"], vars(distributed)["split_dataset_by_node"] = Divisible, split_dataset_by_node
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setitem(sys.modules, "datasets.distributed", distributed)
    dataset = Divisible(range(10), [0])
    for make in (lambda: DataLoader(dataset, 2), lambda: dataset):
        dataset.set_epoch(0)
        loaders = [shared(make(), worker, 2) for worker in range(2)]
        assert [list(itertools.chain(*one_pass(loader))) for loader in loaders] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
        dataset.set_epoch(1)
        assert list(itertools.chain(*one_pass(loaders[0]))) == [100, 102, 104, 106, 108]
        assert loaders[0].facts.note is None
