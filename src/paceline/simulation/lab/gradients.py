"""Gradients of a batch of runs by torch autograd, or by the Triton kernels of fused_gradients.py."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from paceline.interfaces import Layout
from paceline.simulation.lab.inputs import BatchInputs, Gradients
from paceline.simulation.lab.models import BATCHED
from paceline.simulation.lab.nets.layers import Pass


class Autograd:
    """Computes the gradients of every run by autograd through the models of models.py."""

    def __init__(self, model: str, inputs: BatchInputs, layout: Layout, gradient: Tensor, losses: Tensor) -> None:
        self._logits, self._inputs, self._losses = BATCHED[model], inputs, losses
        self._held = torch.empty_like(gradient)
        self._leaves = {name: view.requires_grad_() for name, view in views(layout, self._held).items()}
        self._targets = views(layout, gradient)

    def __call__(self) -> None:
        inputs = self._inputs
        with torch.no_grad():
            torch.index_select(inputs.held, 0, inputs.owners_now, out=self._held.detach())
        images, labels, weights = inputs.batch_now()
        present = weights.view(len(weights), -1, inputs.batch) > 0
        found = self._logits(self._leaves, images, Pass([inputs.now(each) for each in inputs.keys], present))
        losses = -(found.gather(-1, labels[..., None]).squeeze(-1) * weights).sum(-1)
        gradients = torch.autograd.grad(losses.sum(), list(self._leaves.values()))
        with torch.no_grad():
            self._losses.copy_(losses)
            for target, gradient in zip(self._targets.values(), gradients, strict=True):
                target.copy_(gradient)


def gradients_for(model: str, inputs: BatchInputs, layout: Layout, gradient: Tensor, losses: Tensor) -> Gradients:
    """Return the Triton kernels of a model on a GPU if Triton is installed, otherwise `Autograd`.

    Those of ResNet-20 are left to `benchmarks/lab_resnet20.py`: their bfloat16 products were never compared on a GPU.
    """
    if gradient.is_cuda and importlib.util.find_spec("triton") is not None:
        from paceline.simulation.lab.fused_gradients import FUSED

        if model in FUSED:
            return FUSED[model](inputs, layout, gradient, losses)
    return Autograd(model, inputs, layout, gradient, losses)


def views(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """Return each parameter of every run by name, as a view into `flat` [R, P]."""
    return {p.name: flat[:, p.offset : p.offset + p.size].view(-1, *p.shape) for p in layout.parameters}
