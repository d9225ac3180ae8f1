"""A task whose mistake is the name of the function that builds it."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

x, y = torch.rand(100, 2), torch.arange(100) % 2
loss = nn.functional.cross_entropy


def no_samples() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), loss, train=(x[:0], y[:0]), test=(x, y))


def fewer_targets() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), loss, train=(x, y[:90]), test=(x, y))


def wrong_width() -> paceline.Task:
    return paceline.Task(nn.Linear(3, 2), loss, train=(x, y), test=(x, y))


def too_many_classes() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), loss, train=(x, y + 5), test=(x, y))


def loss_per_sample() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), nn.CrossEntropyLoss(reduction="none"), train=(x, y), test=(x, y))


def loss_is_a_class() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), nn.CrossEntropyLoss, train=(x, y), test=(x, y))


def model_is_a_class() -> paceline.Task:
    return paceline.Task(nn.Linear, loss, train=(x, y), test=(x, y))


def no_parameters() -> paceline.Task:
    return paceline.Task(nn.ReLU(), loss, train=(x, y), test=(x, y))


def double_data() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), loss, train=(x.double(), y), test=(x.double(), y))


def a_stream() -> paceline.Task:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(TensorDataset(x, y))

    return paceline.Task(nn.Linear(2, 2), loss, train=Stream(), test=(x, y))


def nan_data() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), loss, train=(x * float("nan"), y), test=(x, y))


def misspelt() -> paceline.Task:
    return paceline.Task(nn.Linear(2, 2), loss, training=(x, y), test=(x, y))


def nothing() -> None:
    paceline.Task(nn.Linear(2, 2), loss, train=(x, y), test=(x, y))


if __name__ == "__main__":
    try:
        paceline.train(globals()[sys.argv[1]], strategy=sys.argv[2], workers=2, epochs=1)
    except paceline.UserError as error:
        sys.exit(f"UserError: {error}")
