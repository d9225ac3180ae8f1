"""One trial step finds a wrong model or loss before training, and changes nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.data.sampler import Batches
from paceline.errors import UserError

X, Y = torch.randn(40, 4), torch.arange(40) % 3


def tried(model: Any, loss: Any, train: Any = (X, Y), test: Any = None, **more: Any) -> None:
    """Build a task and try its step on 8 samples, as a run does."""
    task = paceline.Task(model, loss, train, test, **more)
    task.require_step(Batches(np.arange(40), 8, 0, 0), 0)


def linear(outputs: int = 3) -> nn.Linear:
    return nn.Linear(4, outputs)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


class Picky(nn.Module):
    """Draws random numbers, and changes its buffer and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = linear(), nn.BatchNorm1d(4), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.randn(()) + random.random() + float(np.random.rand())
        return torch.as_tensor(self.layer(self.norm(inputs)) + noise)


def overflowing() -> nn.Module:
    return nn.Sequential(linear(), nn.Hardtanh(), nn.Threshold(9.0, float("nan")))


CROSS = nn.functional.cross_entropy
LATE = (X, Y.clone())
LATE[1][39] = 7  # outside of the first batch
MISTAKES: dict[str, tuple[Any, ...]] = {
    "class of a model": (nn.Linear, CROSS, "the model is the class Linear: give an instance"),
    "model on meta": (nn.Linear(4, 3, device="meta"), CROSS, "weight is on device meta, which holds no values"),
    "no model": (abs, CROSS, "the model is builtin_function_or_method: give a torch.nn.Module"),
    "class of a loss": (
        linear(),
        nn.CrossEntropyLoss,
        r"the class CrossEntropyLoss: give an instance, CrossEntropyLoss",
    ),
    "no loss": (linear(), "mse", "the loss is str: give a function"),
    "no parameters": (nn.ReLU(), CROSS, "no parameter that requires a gradient"),
    "frozen": (frozen(), CROSS, "no parameter that requires a gradient"),
    "shape": (
        nn.Linear(5, 3),
        CROSS,
        r"model Linear cannot compute on the train inputs, float32 \[8, 4\]: RuntimeError",
    ),
    "float64": (linear(), CROSS, (X.double(), Y), "float64 .8, 4.: RuntimeError.*give inputs.float()"),
    "no scalar": (
        linear(),
        nn.CrossEntropyLoss(reduction="none"),
        r"a tensor of shape \[8\]: return one number, the mean",
    ),
    "sum": (linear(), nn.CrossEntropyLoss(reduction="sum"), "the loss of a batch is a sum over its samples"),
    "sum of squares": (linear(), lambda outputs, _: (outputs**2).sum(), "a sum over its samples.*return the mean"),
    "no tensor": (linear(), lambda outputs, targets: 3.0, "the loss returned float: return a tensor"),
    "detached": (linear(), lambda outputs, targets: CROSS(outputs.detach(), targets), "without detach"),
    "late target": (
        linear(),
        CROSS,
        LATE,
        r"targets int64 \[8\] \(from 0 to 7\) fails: model Linear scores 3 classes, so give labels from 0 to 2, or",
    ),
    "negative": (linear(), CROSS, (X, Y - 1), r"from -1 to 1\) fails: model Linear scores 3 classes"),
    "broadcast": (
        linear(1),
        nn.functional.mse_loss,
        (X, X[:, 0]),
        "every one with every other: give both the same shape",
    ),
    "NaN inputs": (
        linear(),
        CROSS,
        (X * float("nan"), Y),
        r"the train inputs of one batch, float32 \[8, 4\], hold a NaN or infinity",
    ),
    "NaN targets": (linear(), nn.functional.l1_loss, (X, X[:, :3] / 0.0), "the train targets of one batch"),
    "NaN of the model": (overflowing(), CROSS, "model Sequential gives a NaN or infinity for finite train inputs"),
    "NaN of the loss": (
        linear(),
        lambda outputs, targets: outputs.sum() * 0.0 - torch.log(torch.zeros(())),
        "the loss of finite outputs and train targets is inf: check for a logarithm of zero",
    ),
    "dict samples": (
        nn.Sequential(linear()),
        CROSS,
        [{"x": X[row], "y": Y[row]} for row in range(40)],
        r"keyword arguments of forward\(\): x, y; if one of them is the target, let samples be pairs",
    ),
    "test target": (linear(), CROSS, (X, Y), LATE, "and test targets int64 .*so give labels from 0 to 2"),
    "test shape": (linear(), CROSS, (X, Y), (X[:, :2], Y), r"on the test inputs, float32 \[8, 2\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_mistake_is_one_line(name: str) -> None:
    *parts, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as caught:
        tried(*parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: CROSS(outputs, targets) + (outputs**2).mean(),
        lambda outputs, targets: CROSS(outputs.view(8, 3), targets),  # of batches of 8 alone
        lambda outputs, targets: 0.0 * outputs.sum(),
        lambda outputs, targets: -torch.log_softmax(outputs @ outputs.T, 1).diagonal().mean(),
    ],
    ids=["mean", "one size", "zero", "contrastive"],
)
def test_other_losses_are_not_taken_for_sums(loss: Any) -> None:
    tried(linear(), loss)


class Counting:
    """A metric of the whole set, which needs more samples than a trial has."""

    def __init__(self) -> None:
        self.samples = 0

    def reset(self) -> None:
        self.samples = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.samples += len(outputs) + 0 * len(targets)

    def compute(self) -> float:
        if self.samples < 40:
            raise ValueError("too few samples")
        return 1.0


class Listing(Counting):
    def compute(self) -> Any:
        return [1.0, 2.0]


@pytest.mark.parametrize("test", [None, (X, Y)], ids=["train", "test"])
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, targets: outputs.argmax(1) == targets, r"metric 'mine' returned a tensor of shape \(8,\)"),
        (
            lambda outputs, targets: outputs @ targets,
            "metric 'mine' of outputs float32 .*targets int64 .*fails: Runtime",
        ),
        (Listing(), "metric 'mine' returned list: return one number"),
    ],
)
def test_a_metric_is_tried_too(metric: Any, message: str, test: Any) -> None:
    with pytest.raises(UserError, match=message):
        tried(linear(), CROSS, (X, Y), test, metrics={"mine": metric})


def test_a_metric_may_need_more_samples_than_a_trial_has() -> None:
    metric = Counting()
    tried(linear(), CROSS, metrics={"mine": metric})
    assert metric.samples == 0


def test_metrics_without_names_are_refused() -> None:
    with pytest.raises(UserError, match="metrics is list: give a dict of names and functions"):
        tried(linear(), CROSS, metrics=["acc"])


def test_test_data_that_holds_a_nan_can_be_trained_beside() -> None:
    tried(linear(), CROSS, (X, Y), (X * float("nan"), Y))


def test_a_trial_leaves_no_trace() -> None:
    model = Picky()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    tried(model, CROSS, (X, Y), (X, Y), transform=lambda inputs: inputs * 2.0)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert model.calls == 0 and model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
