"""Two Inception nets with batch norm: a small one for 28x28, and that of arXiv 1502.03167 for 224x224.

The small one has 1.65 M parameters. Both end in the mean over the image (the published 7x7 pool), for any image size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.convolution import ConvNormReLU


class BranchWidths(NamedTuple):
    """A row of the published table: the width of each branch, and the pool of the last branch."""

    name: str
    single: int  # 1x1; 0 for a block that halves the image, which has no such branch
    reduce: int  # 1x1 before the 3x3
    triple: int  # 3x3
    double_reduce: int  # 1x1 before the two 3x3
    double: int  # each of two 3x3
    pool: str  # "avg" or "max"
    project: int  # 1x1 after the pool; 0 for none

    @property
    def stride(self) -> int:
        """2 if the block halves the image, else 1."""
        return 1 if self.single else 2


INCEPTION_BN = (
    BranchWidths("3a", 64, 64, 64, 64, 96, "avg", 32),
    BranchWidths("3b", 64, 64, 96, 64, 96, "avg", 64),
    BranchWidths("3c", 0, 128, 160, 64, 96, "max", 0),
    BranchWidths("4a", 224, 64, 96, 96, 128, "avg", 128),
    BranchWidths("4b", 192, 96, 128, 96, 128, "avg", 128),
    BranchWidths("4c", 160, 128, 160, 128, 160, "avg", 128),
    BranchWidths("4d", 96, 128, 192, 160, 192, "avg", 128),
    BranchWidths("4e", 0, 128, 192, 192, 256, "max", 0),
    BranchWidths("5a", 352, 192, 320, 160, 224, "avg", 128),
    BranchWidths("5b", 352, 192, 320, 192, 224, "max", 128),
)
HALVE = 0  # marks a block that halves the image, in place of the width of its missing 1x1 branch
INCEPTION_28_SMALL = (
    (32, 32),
    (32, 48),
    (HALVE, 80),
    (112, 48),
    (96, 64),
    (80, 80),
    (48, 96),
    (HALVE, 96),
    (176, 160),
    (176, 160),
)
"""Widths (1x1, 3x3) of each block; the pool beside a halving 3x3 keeps the input width."""


def halving_pool(images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C, H/2, W/2], both rounded up
    """Max-pool 3x3 with stride 2, as published for even sizes; for odd sizes, with the shape of a 3x3/2 convolution.

    >>> [tuple(halving_pool(torch.zeros(1, 1, side, 28)).shape[2:]) for side in (28, 15, 2, 1)]
    [(14, 14), (8, 14), (1, 14), (1, 14)]
    """
    height, width = images.shape[2:]
    return F.max_pool2d(images, 3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)


class SmallBlock(nn.Module):
    """A 1x1 branch and a 3x3 branch; or a 3x3/2 branch and a 3x3/2 pool."""

    def __init__(self, inputs: int, single: int, triple: int) -> None:
        super().__init__()
        halves = single == HALVE
        self.single = None if halves else ConvNormReLU(inputs, single, 1, bias=True)
        self.triple = ConvNormReLU(inputs, triple, 3, 2 if halves else 1, bias=True)
        self.outputs = triple + (inputs if halves else single)

    def forward(self, images: Tensor) -> Tensor:
        if self.single is None:
            return torch.cat([self.triple(images), halving_pool(images)], dim=1)
        return torch.cat([self.single(images), self.triple(images)], dim=1)


class Inception28Small(nn.Module):
    """The published net for CIFAR-10 cropped to 28x28; returns log-probabilities."""

    def __init__(self, image_shape: tuple[int, ...] = (3, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        self.stem = ConvNormReLU(image_shape[0], 96, 3, bias=True)
        self.blocks, width = nn.Sequential(), 96
        for single, triple in INCEPTION_28_SMALL:
            block = SmallBlock(width, single, triple)
            self.blocks.append(block)
            width = block.outputs
        self.fc = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.log_softmax(self.fc(x).float(), dim=1)


class Block(nn.Module):
    """Four parallel branches: 1x1, 3x3, two 3x3, and a pool."""

    def __init__(self, inputs: int, row: BranchWidths) -> None:
        super().__init__()
        self._halves, self._pool = row.stride == 2, row.pool
        self.single = None if self._halves else ConvNormReLU(inputs, row.single, 1, bias=True)
        self.triple = nn.Sequential(
            ConvNormReLU(inputs, row.reduce, 1, bias=True),
            ConvNormReLU(row.reduce, row.triple, 3, row.stride, bias=True),
        )
        self.twice = nn.Sequential(
            ConvNormReLU(inputs, row.double_reduce, 1, bias=True),
            ConvNormReLU(row.double_reduce, row.double, 3, bias=True),
            ConvNormReLU(row.double, row.double, 3, row.stride, bias=True),
        )
        self.project = ConvNormReLU(inputs, row.project, 1, bias=True) if row.project else nn.Identity()
        self.outputs = row.single + row.triple + row.double + (row.project or inputs)

    def forward(self, images: Tensor) -> Tensor:
        branches = [] if self.single is None else [self.single(images)]
        branches += [self.triple(images), self.twice(images), self.project(self._pooled(images))]
        return torch.cat(branches, dim=1)

    def _pooled(self, images: Tensor) -> Tensor:
        if self._halves:
            return halving_pool(images)
        pool = F.avg_pool2d if self._pool == "avg" else F.max_pool2d
        pooled: Tensor = pool(images, 3, stride=1, padding=1)
        return pooled


class InceptionBN(nn.Module):
    """The published net for ILSVRC12; returns log-probabilities."""

    def __init__(self, image_shape: tuple[int, ...] = (3, 224, 224), num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = ConvNormReLU(image_shape[0], 64, 7, 2, bias=True)
        self.conv2 = nn.Sequential(ConvNormReLU(64, 64, 1, bias=True), ConvNormReLU(64, 192, 3, bias=True))
        self.blocks, width = nn.Sequential(), 192
        for row in INCEPTION_BN:
            block = Block(width, row)
            self.blocks.append(block)
            width = block.outputs
        self.fc = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        x = self.conv2(halving_pool(self.conv1(images)))
        x = self.blocks(halving_pool(x)).mean((2, 3))
        return F.log_softmax(self.fc(x).float(), dim=1)
