"""ResNet-20 (`models/resnet20.py`) for G runs at once, by torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from paceline.models.resnet20 import BLOCKS_PER_STAGE, WIDTHS
from paceline.simulation.lab.nets.layers import Pass, batch_norm, convolve_same, linear


class BlockShape(NamedTuple):
    """One block: its name in the model, its channels and its stride."""

    name: str
    inputs: int
    width: int
    stride: int


def block_shapes() -> Iterator[BlockShape]:
    """Return the blocks in order."""
    inputs, number = WIDTHS[0], 0
    for width in WIDTHS:
        for _ in range(BLOCKS_PER_STAGE):
            yield BlockShape(f"blocks.{number}", inputs, width, 1 if width == inputs else 2)
            inputs, number = width, number + 1


def norm_names() -> list[str]:
    """Return the names of the norms in the order of a forward pass."""
    convolutions = [f"{block.name}.{part}" for block in block_shapes() for part in ("conv1", "conv2")]
    return [f"{name}.norm" for name in ("stem", *convolutions)]


def resnet20(p: dict[str, Tensor], images: Tensor, how: Pass) -> Tensor:
    def normed(x: Tensor, name: str, stride: int = 1) -> Tensor:
        y = convolve_same(x, p[f"{name}.conv.weight"], stride)
        return batch_norm(y, p[f"{name}.norm.weight"], p[f"{name}.norm.bias"], how)

    x = normed(images, "stem").relu()
    for block in block_shapes():
        branch = normed(normed(x, f"{block.name}.conv1", block.stride).relu(), f"{block.name}.conv2")
        if block.stride > 1:
            half = (block.width - block.inputs) // 2
            x = F.pad(x[:, :, :: block.stride, :: block.stride], (half, half))
        x = (branch + x).relu()
    return F.log_softmax(linear(x.mean((2, 3)), p["fc.weight"], p["fc.bias"]), dim=-1)
