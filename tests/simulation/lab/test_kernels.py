"""The kernels against torch, through Triton's interpreter where it is installed; `benchmarks/lab.py` has a GPU."""

from __future__ import annotations

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


def some_inputs(model: str, runs: int, pushes: int, batch: int) -> tuple[BatchInputs, Layout]:
    """Random weights of three workers a run, images, arrivals and dropout keys, at the second of three updates."""
    torch.manual_seed(0)
    updates, places, num_samples, samples = 3, 3, 32, pushes * batch
    parameters = make_model(model, (1, 28, 28)).named_parameters()
    layout = pack([(name, tuple(parameter.shape), True) for name, parameter in parameters])
    images = torch.randint(0, 256, (num_samples, 28, 28, 1), dtype=torch.uint8)
    data = Images(images, torch.randint(0, 10, (num_samples,)), torch.tensor([1 / 90]), torch.tensor([-0.8]))
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
