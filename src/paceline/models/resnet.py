"""ResNets of 18, 34, 50 and 101 layers (He et al., arXiv 1512.03385) for images of any size.

The stem is 7x7/2 and a 3x3/2 pool at every size, as published: a 28x28 image is one pixel in the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.convolution import ConvNorm, ConvNormReLU, Norm, SteadyBatchNorm, group_norm

STEM_WIDTH = 64


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1
    biased = False

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = ConvNormReLU(inputs, width, 3, stride, norm=norm)
        self.conv2 = ConvNorm(width, width, 3, norm=norm)
        self.shortcut = _shortcut(inputs, width, stride, False, norm)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.conv2(self.conv1(images)) + self.shortcut(images), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; each has a bias, as in the published count of 23.55 M."""

    expansion = 4
    biased = True

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = ConvNormReLU(inputs, width, 1, bias=True, norm=norm)
        self.conv2 = ConvNormReLU(width, width, 3, stride, bias=True, norm=norm)
        self.conv3 = ConvNorm(width, outputs, 1, bias=True, norm=norm)
        self.shortcut = _shortcut(inputs, outputs, stride, True, norm)

    def forward(self, images: Tensor) -> Tensor:
        branch = self.conv3(self.conv2(self.conv1(images)))
        return F.relu(branch + self.shortcut(images), inplace=True)


class ResNet(nn.Module):
    """A stem, four stages of blocks, the mean over the image and one linear layer; returns log-probabilities."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        image_shape: tuple[int, ...] = (1, 28, 28),
        num_classes: int = 10,
        norm: Norm = SteadyBatchNorm,
    ) -> None:
        super().__init__()
        self.stem = ConvNormReLU(image_shape[0], STEM_WIDTH, 7, 2, bias=block.biased, norm=norm)
        blocks: list[nn.Module] = []
        inputs = STEM_WIDTH
        for stage, depth in enumerate(depths):
            width = STEM_WIDTH << stage
            for number in range(depth):
                blocks.append(block(inputs, width, 2 if stage and not number else 1, norm))
                inputs = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        x = F.max_pool2d(self.stem(images), 3, stride=2, padding=1)
        x = self.blocks(x).mean((2, 3))
        return F.log_softmax(self.fc(x).float(), dim=1)


def _shortcut(inputs: int, outputs: int, stride: int, bias: bool, norm: Norm) -> nn.Module:
    """Return the identity, or a 1x1 convolution if the shape changes."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return ConvNorm(inputs, outputs, 1, stride, bias=bias, norm=norm)


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet18_gn = partial(resnet18, norm=group_norm)
resnet34_gn = partial(resnet34, norm=group_norm)
resnet50_gn = partial(resnet50, norm=group_norm)
resnet101_gn = partial(resnet101, norm=group_norm)
