"""Losses other than classification's, inputs that are several tensors, and metrics of one's own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.assembly.run import work_of
from paceline.assembly.task import identity_of
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.interfaces import Batch
from paceline.settings.resolve import resolve
from paceline.settings.stopping import StoppingGoal, check_goals, parse_goal, parse_measure, require_measured
from paceline.tasks.step import StepSettings
from paceline.tasks.supervised import SupervisedTask

COUNT = 1203
"""Not a multiple of an evaluation's batches."""


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


class WorstError:
    """No mean over batches."""

    def reset(self) -> None:
        self.worst = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.worst = max(self.worst, (outputs - targets).abs().max().item())

    def compute(self) -> Tensor:
        return torch.tensor(self.worst)


def regression(**others: Any) -> SupervisedTask:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, 5, generator=generator)
    return SupervisedTask(nn.Linear(5, 1), F.mse_loss, (x, x.sum(1, keepdim=True)), (x, x[:, :1]), **others)


def test_a_regression_has_its_loss_and_metrics_and_no_accuracy() -> None:
    task = regression(metrics={"mae": mean_absolute_error, "worst": WorstError()})
    inputs, targets = task.train
    outputs = task.model(inputs).detach()
    for _ in range(2):  # a metric starts anew each time
        scores = task.evaluate(task.initial(), None, task.train)
    assert scores.loss == pytest.approx(F.mse_loss(outputs, targets).item(), rel=1e-5)
    assert scores.metrics["mae"] == pytest.approx(mean_absolute_error(outputs, targets).item(), rel=1e-5)
    assert scores.metrics["worst"] == pytest.approx((outputs - targets).abs().max().item(), rel=1e-5)
    assert scores.value("accuracy") is None and scores.value("mae") == scores.metrics["mae"]
    assert task.metric_names == ("loss", "mae", "worst")


class Two(nn.Module):
    """Takes its inputs as arguments, or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(torch.cat([left, right], 1))


@pytest.mark.parametrize("kind", [tuple, dict])
@pytest.mark.parametrize("settings", [StepSettings(), StepSettings(accumulate=3), StepSettings(compile=False)])
def test_several_inputs_are_arguments_or_named_ones(kind: type, settings: StepSettings) -> None:
    torch.manual_seed(4)
    model, x, y = Two(), torch.randn(20, 5), torch.randint(0, 3, (20,))
    parts: Any = (x[:, :2], x[:, 2:]) if kind is tuple else {"right": x[:, 2:], "left": x[:, :2]}
    plain = SupervisedTask(model.layer, F.cross_entropy, (x, y))
    task = SupervisedTask(model, F.cross_entropy, (parts, y), (parts, y))
    task.configure_step(settings)
    found = []
    for one in (plain, task):
        gradient = torch.zeros(one.layout.size)
        one.bind(one.initial(), gradient, torch.zeros(0))
        loader = one.loader(work_of(one, resolve(RunConfig(batch_size=8))).batches(0, RunConfig(batch_size=8)), 1, 0)
        found.append((one.gradient(loader.batch(1)), gradient, one.evaluate(one.initial(), None, one.train)))
    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    assert identity_of(plain)["targets"] == identity_of(task)["targets"]


def test_a_language_model_is_judged_by_perplexity_over_tokens_that_count() -> None:
    torch.manual_seed(5)
    ids = torch.randint(1, 9, (7, 6))
    for row, length in enumerate((6, 5, 4, 3, 2, 2, 6)):
        ids[row, length:] = 0
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)

    data = ids[:, :-1], ids[:, 1:]
    task = SupervisedTask(model, loss, data, data, metrics={"perplexity": paceline.Perplexity(ignored=0)})
    scores = task.evaluate(task.initial(), None, data)
    likely = model(data[0]).log_softmax(-1).gather(-1, data[1][..., None])[data[1] > 0]
    assert scores.metrics["perplexity"] == pytest.approx(math.exp(-likely.mean().item()), rel=1e-5)
    assert not scores.per_class


def test_several_labels_a_sample_and_targets_inside_the_inputs() -> None:
    torch.manual_seed(6)
    x, y = torch.randn(40, 5), (torch.rand(40, 4) < 0.3).float()

    def exact(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0.5)).all(1).float().mean()

    task = SupervisedTask(nn.Linear(5, 4), F.binary_cross_entropy_with_logits, (x, y), metrics={"exact": exact})
    scores = task.evaluate(task.initial(), None, task.train)
    assert 0.0 <= scores.metrics["exact"] <= 1.0 and not scores.per_class

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=F.binary_cross_entropy_with_logits(self.layer(x), labels))

    local_state = SupervisedTask(Own(), lambda outputs, _: outputs.loss, ({"x": x, "labels": y}, None))
    local_state.bind(local_state.initial(), torch.zeros(local_state.layout.size), torch.zeros(0))
    assert local_state.gradient(Batch({"x": x, "labels": y}, None, 40, 1)) > 0.0
    assert (
        local_state.evaluate(local_state.initial(), None, local_state.train).total
        == 40
        == identity_of(local_state)["num_samples"]
    )


def test_whole_numbers_that_are_no_classes_are_not_counted() -> None:
    counts = torch.tensor([0, 3, 1, 5])
    task = SupervisedTask(nn.Linear(2, 1), lambda o, t: F.mse_loss(o[:, 0], t.float()), (torch.ones(4, 2), counts))
    assert not task.evaluate(task.initial(), None, task.train).per_class


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": mean_absolute_error}, "other than loss and accuracy"),
        ({"a b": mean_absolute_error}, "a name of letters and digits"),
        ({"mae": 3.0}, "'mae' is float"),
        ({"mae": lambda outputs, targets: outputs - targets}, "'mae' returned a tensor of shape"),
    ],
)
def test_a_metric_that_is_none_is_one_clear_line(metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task = regression(metrics=metrics)
        task.evaluate(task.initial(), None, task.train)


def test_data_that_does_not_fit_together_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="tensors of 3 and 4 inputs"):
        SupervisedTask(Two(), F.cross_entropy, ((torch.ones(3, 2), torch.ones(4, 3)), torch.zeros(3)))
    with pytest.raises(UserError, match="3 inputs but 2 targets"):
        SupervisedTask(Two(), F.cross_entropy, ({"left": torch.ones(3, 2)}, torch.zeros(2)))
    with pytest.raises(UserError, match="no tensor"):
        SupervisedTask(Two(), F.cross_entropy, ({}, None))


class Shifted(dict[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        return super().__getitem__(key) + 1000


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(3, 2), {1, 2, 3}), "set among the tensors, which has no rows"),
        ({"left": torch.ones(3, 2), "right": [1, 2, 3]}, "int among the tensors"),
        (Shifted(left=torch.ones(3, 2), right=torch.ones(3, 3)), "Shifted has a __getitem__ of its own"),
    ],
)
def test_data_that_batches_would_not_be_taken_from_is_refused(inputs: Any, message: str) -> None:
    """A set would go whole into every batch, and a dict's own indexing would not be called."""
    with pytest.raises(UserError, match=message):
        SupervisedTask(Two(), F.cross_entropy, (inputs, torch.zeros(3)))


def test_goals_are_read_as_they_are_written() -> None:
    assert parse_goal("mae <= 1e-2") == StoppingGoal("mae", True, 0.01) and parse_goal("f1>.9") == StoppingGoal(
        "f1", False, 0.9
    )
    assert StoppingGoal("mae", True, 0.2).is_met(0.2) and not StoppingGoal("mae", True, 0.2).is_met(0.3)
    assert not StoppingGoal("mae", True, 0.2).is_met(math.nan) and not StoppingGoal("mae", True, 0.2).is_met(None)


@pytest.mark.parametrize("text", ["mae", "mae=0.2", "<=0.2", "mae<=x", "mae<=nan", "mae<=", "0<=1", "mae<=0.1<=2"])
def test_a_goal_that_is_none_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="write METRIC<=VALUE"):
        parse_goal(text)


@pytest.mark.parametrize("text", ["mae", "least:mae", "min:", "max:a b"])
def test_a_measure_that_is_none_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="write min:METRIC"):
        parse_measure(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "mae<=1", "target_accuracy": 90.0}, "leave one out"),
        ({"target": "mae<=1"}, "--target is checked at evaluations only"),
        ({"best": "min:mae"}, "--best is checked at evaluations only"),
    ],
)
def test_goals_that_nobody_looks_at_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_goals(RunConfig(**settings), in_script=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_accuracy": 90.0}, "no accuracy, as its targets are no class numbers; it measures loss, mae"),
        ({"target": "rmse<=1"}, r"--target 'rmse<=1': this task has no rmse; it measures loss, mae"),
        ({"best": "max:f1"}, r"--best max:f1: this task has no f1.*--best min:mae"),
    ],
)
def test_what_a_task_does_not_measure_cannot_be_reached(settings: dict[str, Any], message: str) -> None:
    known = regression(metrics={"mae": mean_absolute_error}).metric_names
    with pytest.raises(UserError, match=message):
        require_measured(RunConfig(**settings), known, has_test=True)
    with pytest.raises(UserError, match="no test data"):
        require_measured(RunConfig(**settings), known, has_test=False)
    require_measured(RunConfig(target="mae<=1", best="max:loss"), known, has_test=True)
