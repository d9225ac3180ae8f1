"""What an update reads, and how its gradients are found by torch itself; `fused` has them as kernels of our own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.interfaces import Layout
from paceline.simulation.lab.models import BATCHED


@dataclass(frozen=True)
class Images:
    """A data set on the device, as bytes."""

    images: Tensor  # uint8 [N, H, W, C]
    labels: Tensor  # int64 [N]
    scale: Tensor
    shift: Tensor
    _padded: dict[int, Tensor] = field(default_factory=dict)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of the samples `rows`, whatever its shape."""
        flat = rows.flatten()
        images = torch.addcmul(self.shift, self.images.index_select(0, flat).to(torch.float32), self.scale)
        return images.view(*rows.shape, *images.shape[1:]), self.labels.index_select(0, flat).view(rows.shape)

    def padded(self, margin: int) -> Tensor:
        """All images normalised, with `margin` zeros around each, ready to be read; made once."""
        if margin not in self._padded:
            images = torch.addcmul(self.shift, self.images.to(torch.float32), self.scale)
            wide = F.pad(images, (0, 0, margin, margin, margin, margin))
            behind = 8 * wide[0, 0].numel() + 1024  # room for a kernel's tile that reads past the last patch
            self._padded[margin] = F.pad(wide.flatten(), (0, behind))[: wide.numel()].view(wide.shape)
        return self._padded[margin]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What R runs read at each of T updates; `at` says which update it is."""

    data: Images
    at: Tensor  # int64 [1]
    samples: Tensor  # int32 [T, R, S]: S = pushes x batch
    weights: Tensor  # [T, R, S]: of each sample in its update
    keys: list[tuple[Tensor, Tensor]]  # of each dropout layer, int32 [T, R, pushes], low and high halves
    owner: Tensor  # int64 [T or 1, R]: the row of `held` that the gradient is of
    held: Tensor  # [rows, P]: weights that workers hold
    batch: int

    @property
    def owners_now(self) -> Tensor:
        return self.owner[0] if len(self.owner) == 1 else self.owner.index_select(0, self.at)[0]


Gradients = Callable[[], None]
"""Fills the family's gradient and losses from its inputs."""


class Autograd:
    """The gradients of every run by torch, through the models of `batched`."""

    def __init__(self, model: str, inputs: Inputs, layout: Layout, gradient: Tensor, losses: Tensor) -> None:
        self._logits, self._inputs, self._losses = BATCHED[model], inputs, losses
        self._held = torch.empty_like(gradient)
        self._leaves = {name: view.requires_grad_() for name, view in views(layout, self._held).items()}
        self._targets = views(layout, gradient)

    def __call__(self) -> None:
        inputs, at = self._inputs, self._inputs.at
        with torch.no_grad():
            torch.index_select(inputs.held, 0, inputs.owners_now, out=self._held.detach())
        images, labels = inputs.data.take(inputs.samples.index_select(0, at)[0])
        weights = inputs.weights.index_select(0, at)[0]
        keys = [(low.index_select(0, at)[0], high.index_select(0, at)[0]) for low, high in inputs.keys]
        found = self._logits(self._leaves, images, keys)
        losses = -(found.gather(-1, labels[..., None]).squeeze(-1) * weights).sum(-1)
        gradients = torch.autograd.grad(losses.sum(), list(self._leaves.values()))
        with torch.no_grad():
            self._losses.copy_(losses)
            for target, gradient in zip(self._targets.values(), gradients, strict=True):
                target.copy_(gradient)


def gradients_for(model: str, inputs: Inputs, layout: Layout, gradient: Tensor, losses: Tensor) -> Gradients:
    """Kernels of our own on a GPU that Triton can compile for, torch's everywhere else."""
    if gradient.is_cuda and importlib.util.find_spec("triton") is not None:
        from paceline.simulation.lab.fused_gradients import FUSED

        return FUSED[model](inputs, layout, gradient, losses)
    return Autograd(model, inputs, layout, gradient, losses)


def views(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """Each parameter of every row by name, as a view into `flat` [R, P]."""
    return {p.name: flat[:, p.offset : p.offset + p.size].view(-1, *p.shape) for p in layout.parameters}
