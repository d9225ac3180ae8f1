"""What a Task takes as data: pairs, arrays, map-style data sets and loaders; the rest is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import paceline
from paceline.assembly.preflight import announce_batches
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.tasks.own import samples
from paceline.tasks.own.samples import read_samples

X, Y = torch.arange(600.0).view(300, 2), torch.arange(300) % 3


class Rows(Dataset[Any]):
    """A map-style data set whose samples a function makes."""

    def __init__(self, sample: Any, length: int = 300) -> None:
        self.sample, self.length = sample, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        return self.sample(row)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], Y[0])])


PAIR = Rows(lambda row: (X[row], int(Y[row])))


def padded(batch: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([one[0] for one in batch]) + 1.0, torch.tensor([one[1] for one in batch])


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        [X, Y],
        TensorDataset(X, Y),
        PAIR,
        Subset(TensorDataset(X, Y), range(300)),
        [(X[row], Y[row]) for row in range(300)],
        DataLoader(PAIR, batch_size=32, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=7),
        DataLoader(Rows(lambda row: (X[row] - 1.0, int(Y[row]))), collate_fn=padded),
    ],
    ids=["pair", "arrays", "list", "TensorDataset", "Dataset", "Subset", "samples", "loader", "tensors", "collate"],
)
def test_the_same_samples_come_out_of_everything(given: Any) -> None:
    task = paceline.Task(nn.Linear(2, 3), nn.functional.cross_entropy, train=given, test=given)
    for inputs, targets in filter(None, (task.train, task.test)):
        assert torch.equal(inputs, X) and torch.equal(targets, Y)


def test_samples_may_be_nested_or_have_no_target() -> None:
    inputs, targets = read_samples("train", Rows(lambda row: ({"a": X[row], "b": (X[row], row)}, Y[row]))).pair
    assert torch.equal(inputs["a"], X) and torch.equal(inputs["b"][1], torch.arange(300)) and torch.equal(targets, Y)
    inputs, targets = read_samples("train", Rows(lambda row: {"ids": X[row], "labels": Y[row]})).pair
    assert [*inputs] == ["ids", "labels"] and targets is None


class Broken(Rows):
    """A data set of several shapes."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X, "train data: Tensor; give a pair"),
        ((X, Y, Y), "train data: a tuple of 3; give a pair"),
        ({"x": X}, "train data: dict; give a pair"),
        (3, "train data: int; give a pair"),
        ((X[:0], Y[:0]), "train data: the inputs have no rows"),
        ((X, Y[:9]), "300 inputs but 9 targets"),
        ((np.array(["a", "b"]), Y[:2]), "an array of <U1"),
        (TensorDataset(X[:0], Y[:0]), "TensorDataset has no samples"),
        (TensorDataset(X, X, Y), "samples have 3 parts"),
        (Rows(lambda row: (torch.rand(2), 0)), "differ from one reading to the next.*give augment="),
        (Rows(lambda row: (torch.ones(row + 1), 0)), r"float32 \[1\], int\) and .*pad or crop them"),
        (Rows(lambda row: (torch.ones(2 + row // 290), 0)), r"float32 \[2\], int\) and .*pad or crop"),
        (Rows(lambda row: (object(), 0)), r"a sample of Rows is \(object, int\), of which no batch can be made"),
        (Stream(), "Stream is a stream.*paceline.join"),
        (DataLoader(Stream()), "Stream is a stream"),
        (DataLoader(PAIR, drop_last=True), "drop_last=True.*give its dataset"),
        (DataLoader(PAIR, sampler=WeightedRandomSampler([1.0] * 300, 300)), "draws with WeightedRandomSampler"),
        (DataLoader(PAIR, batch_size=None), "has its own batch_sampler or none"),
        (DataLoader(PAIR, collate_fn=lambda batch: (X[:3], Y[:3])), "16 samples of Rows make a batch of 3 rows"),
    ],
)
def test_other_data_is_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        paceline.Task(nn.Linear(2, 3), nn.functional.cross_entropy, train=given)
    assert "\n" not in str(caught.value)


def test_data_that_does_not_fit_into_memory_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr("paceline.system.memory.available_memory", lambda: 1000)
    with pytest.raises(UserError, match="the train data Rows of a process needs"):
        read_samples("train", Rows(lambda row: (read.append(row), X[row])[1]))  # type: ignore[func-returns-value]
    assert len(read) <= 2 * samples.READ_TWICE


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ((X.double(), Y), r"train inputs are float32 \[300, 2\], the test inputs float64 \[300, 2\]"),
        ((X, Y.view(-1, 1)), "the test targets int64 .300, 1."),
        (({"x": X}, Y), "the test inputs {x: float32 .300, 2.}"),
    ],
)
def test_test_data_is_like_the_train_data(test: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        paceline.Task(nn.Linear(2, 3), nn.functional.cross_entropy, (X, Y), test)


@pytest.mark.parametrize(("batch_size", "shuffle", "notes"), [(32, True, 0), (64, True, 1), (32, False, 1)])
def test_one_line_says_what_becomes_of_a_loaders_batches(batch_size: int, shuffle: bool, notes: int) -> None:
    given = read_samples("train", DataLoader(PAIR, batch_size, shuffle=shuffle))
    said: list[dict[str, Any]] = []
    announce_batches(RunConfig(), given.batch_size, given.shuffles, said.append)
    assert len(said) == notes
    assert not notes or (f"has batches of {batch_size}" in said[0]["text"] and "(--batch-size)" in said[0]["text"])
