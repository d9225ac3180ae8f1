"""How a step is computed: in parts, compiled, captured, in bf16 or with channels last, it stays the same step."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.assembly.core import make_model
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.interfaces import Batch
from paceline.models.dropout import AddressedDropout
from paceline.settings.resolve import resolve
from paceline.tasks.step import StepSettings
from paceline.tasks.supervised import SupervisedTask

IMAGES = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(10)


class Small(nn.Module):
    """A convolution, batch norm where asked for, and dropout on both sides of a linear layer."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4) if batch_norm else nn.Identity()
        self.fc1, self.fc2 = nn.Linear(144, 16), nn.Linear(16, 10)
        self.drop1, self.drop2 = AddressedDropout(0.25, 1), AddressedDropout(0.5, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.drop1(F.relu(self.norm(self.conv(images))))
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(x.flatten(1))))), dim=1)


def bound(settings: StepSettings, model: nn.Module | None = None, device: str = "cpu") -> tuple[SupervisedTask, Tensor]:
    """A task that steps so, and the gradient it fills."""
    torch.manual_seed(1)
    task = SupervisedTask(model or Small(), F.nll_loss, (IMAGES, LABELS), (IMAGES, LABELS)).to(torch.device(device))
    task.configure_step(settings)
    gradient = torch.zeros(task.layout.size, device=device)
    task.bind(task.initial(), gradient, torch.zeros(task.state_size, device=device))
    return task, gradient


def steps(settings: StepSettings, model: nn.Module | None = None, device: str = "cpu") -> list[tuple[float, Tensor]]:
    """Loss and gradient of four batches, the third of them shorter."""
    task, gradient = bound(settings, model, device)
    found = []
    for key, size in ((5, 10), (2**63 + 1, 10), (6, 7), (7, 10)):
        batch = Batch(IMAGES[:size].to(device), LABELS[:size].to(device), size, key)
        found.append((task.gradient(batch), gradient.clone()))
    return found


def assert_same(found: list[tuple[float, Tensor]], expected: list[tuple[float, Tensor]], within: float) -> None:
    for (loss, gradient), (right_loss, right) in zip(found, expected, strict=True):
        assert loss == pytest.approx(right_loss, rel=within)
        assert (gradient - right).norm() <= within * right.norm()


@pytest.mark.parametrize("parts", [2, 3, 4, 10])
def test_parts_of_a_batch_add_up_to_the_whole_dropout_included(parts: int) -> None:
    assert_same(steps(StepSettings(accumulate=parts)), steps(StepSettings()), 1e-5)


def test_parts_under_another_mask_would_not_add_up() -> None:
    task, gradient = bound(StepSettings())
    batch = Batch(IMAGES, LABELS, 10, 5)
    task.gradient(batch)
    whole = gradient.clone()
    halves = []
    for start in (0, 5):
        task.gradient(Batch(IMAGES[start : start + 5], LABELS[start : start + 5], 5, 5))
        halves.append(gradient.clone())
    assert (sum(halves) / 2 - whole).norm() > 0.1 * whole.norm()


def test_channels_last_is_the_same_step_to_rounding() -> None:
    assert_same(steps(StepSettings(channels_last=True)), steps(StepSettings()), 1e-5)


def test_one_channel_counts_as_last_too() -> None:
    seen: list[bool] = []
    model = Small()
    model.conv.register_forward_hook(
        lambda module, inputs, output: seen.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    bound(StepSettings(channels_last=True), model)[0].gradient(Batch(IMAGES, LABELS, 10, 1))
    assert seen == [True]


def test_running_statistics_are_bound_after_the_model_was_moved() -> None:
    """Moving a module to a device makes new buffers, as a change of type and back does."""
    torch.manual_seed(1)
    task = SupervisedTask(Small(batch_norm=True), F.nll_loss, (IMAGES, LABELS))
    task.model.double().float()
    state = torch.zeros(task.state_size)
    task.bind(task.initial(), torch.zeros(task.layout.size), state)
    before = state.clone()
    task.gradient(Batch(IMAGES, LABELS, 10, 1))
    assert not torch.equal(state, before), "a step changes them"


def test_bf16_is_near_fp32_over_weights_that_stay_fp32() -> None:
    found, exact = steps(StepSettings("bf16")), steps(StepSettings())
    assert_same(found, exact, 0.05)
    assert found[0][0] != exact[0][0]
    task, gradient = bound(StepSettings("bf16"))
    assert {p.dtype for p in task.model.parameters()} == {torch.float32} == {gradient.dtype}


def test_evaluation_is_in_bf16_too() -> None:
    exact, task = bound(StepSettings())[0], bound(StepSettings("bf16"))[0]
    right, found = (t.evaluate(t.initial(), None, (IMAGES, LABELS)) for t in (exact, task))
    assert found.loss != right.loss
    assert found.loss == pytest.approx(right.loss, rel=0.02)


@pytest.mark.parametrize("name", ["lenet5", "cnn", "inception-28-small"])
def test_a_loss_in_bf16_has_more_digits_than_bf16(name: str) -> None:
    task, _ = bound(StepSettings("bf16"), make_model(name, (1, 28, 28)))
    outputs = task._step.outputs(IMAGES)
    assert outputs.dtype == torch.float32
    assert not torch.equal(outputs, outputs.bfloat16().float())


@pytest.mark.real
def test_a_compiled_step_has_each_batchs_masks_and_is_compiled_once_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for real; the kernels are torch's own, as it takes a minute to compile others."""
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    assert_same(steps(StepSettings(compile=True)), steps(StepSettings()), 1e-5)
    assert 2 <= len(traced) <= 3, "a new key is no reason to compile again; a new size is"


@pytest.mark.real
def test_a_model_that_cannot_be_compiled_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    with pytest.raises(UserError, match="cannot compile this model here") as caught:
        steps(StepSettings(compile=True))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [StepSettings(capture=True), StepSettings(capture=True, accumulate=2)])
def test_a_captured_step_is_the_step(settings: StepSettings) -> None:
    plain = StepSettings(**{**asdict(settings), "capture": False})
    for batch_norm in (False, True):
        torch.manual_seed(4)
        found = steps(settings, Small(batch_norm), "cuda")
        torch.manual_seed(4)
        assert_same(found, steps(plain, Small(batch_norm), "cuda"), 1e-5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"accumulate": 0}, "--accumulate must be at least 1"),
        ({"accumulate": 64, "batch_size": 32}, "--accumulate 64 parts of a batch of 32"),
        ({"capture": True}, "--capture is for a GPU"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        resolve(RunConfig(**settings))  # type: ignore[arg-type]


def test_channels_go_last_by_themselves_where_tensor_cores_want_it() -> None:
    asked = [("cuda", "bf16", None), ("cuda", "fp32", None), ("cpu", "bf16", None), ("cuda", "bf16", False)]
    chosen = [resolve(RunConfig(device=d, precision=p, channels_last=c)).channels_last for d, p, c in asked]
    assert chosen == [True, False, False, False]
