"""ResNet of 20 layers for small images (He et al., arXiv 1512.03385, section 4.2): 0.27 M parameters.

The stem is 3x3 without a pool. A shortcut that changes the shape takes every second pixel and pads with zero channels.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.convolution import ConvNorm, ConvNormReLU, Norm, SteadyBatchNorm, group_norm

WIDTHS = (16, 32, 64)
BLOCKS_PER_STAGE = 3


class PaddedShortcutBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters.

    >>> import torch
    >>> PaddedShortcutBlock(16, 32, 2)(torch.zeros(1, 16, 7, 5)).shape
    torch.Size([1, 32, 4, 3])
    """

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm = SteadyBatchNorm) -> None:
        super().__init__()
        self.stride, self.missing = stride, width - inputs
        self.conv1 = ConvNormReLU(inputs, width, 3, stride, norm=norm)
        self.conv2 = ConvNorm(width, width, 3, norm=norm)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, width, H/stride, W/stride], rounded up
        shortcut = images
        if self.missing:
            half = self.missing // 2
            shortcut = F.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return F.relu(self.conv2(self.conv1(images)) + shortcut, inplace=True)


class ResNet20(nn.Module):
    """A stem, three stages of three blocks, the mean over the image and one linear layer; returns log-probabilities."""

    def __init__(
        self, image_shape: tuple[int, ...] = (3, 32, 32), num_classes: int = 10, norm: Norm = SteadyBatchNorm
    ) -> None:
        super().__init__()
        self.stem = ConvNormReLU(image_shape[0], WIDTHS[0], 3, norm=norm)
        blocks: list[nn.Module] = []
        inputs = WIDTHS[0]
        for width in WIDTHS:
            for _ in range(BLOCKS_PER_STAGE):
                blocks.append(PaddedShortcutBlock(inputs, width, 1 if width == inputs else 2, norm))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        x = self.blocks(self.stem(images)).mean((2, 3))
        return F.log_softmax(self.fc(x).float(), dim=1)


resnet20_gn = partial(ResNet20, norm=group_norm)
