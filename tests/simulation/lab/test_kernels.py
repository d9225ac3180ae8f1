"""The kernels against torch, through Triton's interpreter where it is installed; `benchmarks/lab.py` has a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from paceline.assembly.core import make_model
from paceline.interfaces import Layout, pack
from paceline.simulation.lab.gradients import Autograd
from paceline.simulation.lab.inputs import BatchInputs, Images

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def some_inputs(
    model: str, runs: int, pushes: int, batch: int, shape: tuple[int, int, int] = (1, 28, 28)
) -> tuple[BatchInputs, Layout]:
    """Random weights of three workers a run, images, arrivals and dropout keys, at the second of three updates."""
    torch.manual_seed(0)
    updates, places, num_samples, samples = 3, 3, 32, pushes * batch
    parameters = make_model(model, shape).named_parameters()
    layout = pack([(name, tuple(parameter.shape), True) for name, parameter in parameters])
    channels, height, width = shape
    images = torch.randint(0, 256, (num_samples, height, width, channels), dtype=torch.uint8)
    scale, shift = torch.full((channels,), 1 / 90), torch.linspace(-0.8, -0.6, channels)
    data = Images(images, torch.randint(0, 10, (num_samples,)), scale, shift)
    halves = [torch.randint(-(2**31), 2**31, (updates, runs, pushes)).to(torch.int32) for _ in range(4)]
    weights = torch.rand(updates, runs, samples)
    owner = torch.randint(0, places, (updates, runs)) + torch.arange(runs) * places
    return (
        BatchInputs(
            data,
            torch.tensor([1]),
            torch.randint(0, num_samples, (updates, runs, samples), dtype=torch.int32),
            weights / weights.sum(-1, keepdim=True),
            [(halves[0], halves[1]), (halves[2], halves[3])],
            owner,
            torch.randn(runs * places, layout.size) * 0.05,
            batch,
        ),
        layout,
    )


@pytest.mark.parametrize(("model", "pushes"), [("lenet5", 1), ("lenet5", 3), ("cnn", 1)])
def test_the_kernels_gradients_are_torchs(model: str, pushes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from paceline.simulation.lab.fused_gradients import FUSED

    inputs, layout = some_inputs(model, runs=2, pushes=pushes, batch=5)
    wanted, found = torch.zeros(2, layout.size), torch.zeros(2, layout.size)
    losses, ours = torch.zeros(2), torch.zeros(2)
    Autograd(model, inputs, layout, wanted, losses)()
    FUSED[model](inputs, layout, found, ours, "ieee")()  # type: ignore[call-arg]
    torch.testing.assert_close(ours, losses)
    for parameter in layout.parameters:
        place = slice(parameter.offset, parameter.offset + parameter.size)
        apart = (found[:, place] - wanted[:, place]).norm() / wanted[:, place].norm()
        assert apart < 1e-5, parameter.name


@pytest.mark.parametrize(("pushes", "precision"), [(1, "ieee"), (2, "ieee"), (1, "fp16")])
def test_the_residual_nets_gradients_are_torchs(pushes: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of unequal size, cropped and mirrored; with 16 bits nearly (the interpreter has no bfloat16)."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from paceline.simulation.lab.nets.fused_resnet20 import FusedResNet20

    inputs, layout = some_inputs("resnet20", 2, pushes, batch=4, shape=(3, 8, 8))
    inputs.weights[:, 0, 3], inputs.held[:] = 0.0, initial(layout) + inputs.held / 3.0
    inputs = dataclasses.replace(inputs, keys=[], ways=("crop", "mirror"), choices=inputs.keys[0])
    wanted, found = torch.zeros(2, layout.size), torch.zeros(2, layout.size)
    losses, ours = torch.zeros(2), torch.zeros(2)
    Autograd("resnet20", inputs, layout, wanted, losses)()
    FusedResNet20(inputs, layout, found, ours, precision)()
    near = 1e-4 if precision == "ieee" else 0.3
    torch.testing.assert_close(ours, losses, rtol=near / 10, atol=0.0)
    for parameter in layout.parameters:
        place = slice(parameter.offset, parameter.offset + parameter.size)
        apart = (found[:, place] - wanted[:, place]).norm() / wanted[:, place].norm()
        assert apart < near, parameter.name


def initial(layout: Layout) -> torch.Tensor:
    """Return the weights that the model begins with."""
    flat = torch.zeros(layout.size)
    views, parameters = layout.views(flat), make_model("resnet20", (3, 8, 8)).named_parameters()
    for name, parameter in parameters:
        views[name].copy_(parameter.detach())
    return flat
