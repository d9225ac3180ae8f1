"""Processes of a run that have built different tasks are noticed, and told which part differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.assembly.task import build_of, why_builds_differ
from paceline.config import RunConfig
from paceline.tasks.supervised import SupervisedTask

Change = Callable[[dict[str, Any]], object]


def frozen_differently(parts: dict[str, Any]) -> None:
    parts["model"][1].weight.requires_grad_(False).add_(1.0)


def a_statistic_differently(parts: dict[str, Any]) -> None:
    parts["model"][2].running_mean.add_(1.0)


DIFFERENT: dict[str, tuple[Change, str]] = {
    "inputs": (lambda parts: parts["train"][0].add_(1e-3), "other data in each process (different inputs)"),
    "targets": (lambda parts: parts["train"][1].mul_(0), "other data in each process (different targets)"),
    "frozen": (frozen_differently, "another model in each process (different first weights)"),
    "statistic": (a_statistic_differently, "another model in each process (different first weights)"),
    "fewer": (
        lambda parts: parts.update(train=(parts["train"][0][:9], parts["train"][1][:9])),
        "other data in each process (different number of samples)",
    ),
    "model": (lambda parts: parts.update(model=nn.Linear(4, 2)), "another model in each process (different model)"),
}


def build(change: Change = lambda parts: None) -> SupervisedTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    parts: dict[str, Any] = {"model": model, "train": (torch.randn(1000, 4), torch.arange(1000) % 2)}
    parts["model"][1].weight.requires_grad_(False)
    with torch.no_grad():
        change(parts)
    return SupervisedTask(parts["model"], F.cross_entropy, parts["train"])


@pytest.mark.parametrize(("change", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_named(change: Change, said: str) -> None:
    config = RunConfig(task="mine:build")
    expected = f"build() returns {said}: give its random generators a fixed seed"
    assert why_builds_differ(config, build_of(build()), build_of(build(change))) == expected


def test_equal_builds_are_equal() -> None:
    assert why_builds_differ(RunConfig(task="mine:build"), build_of(build()), build_of(build())) is None


@pytest.mark.parametrize("samples", [1, 2, 31, 33, 100])
def test_few_inputs_are_compared_too(samples: int) -> None:
    ours, theirs = (SupervisedTask(nn.Linear(1, 1), F.mse_loss, (x, x)) for x in torch.zeros(2, samples, 1))
    theirs.train[0][0] = 1.0
    assert build_of(ours)["inputs"] != build_of(theirs)["inputs"]
