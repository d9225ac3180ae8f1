"""Convolution followed by a norm: the building block of the ResNets and Inception nets."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

GROUP_SIZE = 16  # channels per group in group norm; it divides the widths of all nets here

Norm = Callable[[int], nn.Module]


class SteadyBatchNorm(nn.BatchNorm2d):
    """Batch norm that falls back to its running statistics for one value per channel, where torch raises an error.

    The last batch of an epoch may hold a single image, and after four halvings a small image is a single pixel.
    """

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W]
        if self.training and images.numel() == self.num_features:
            return F.batch_norm(images, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(images)


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group norm: it normalises each image by itself, independent of batch and worker."""
    return nn.GroupNorm(channels // GROUP_SIZE, channels)


class ConvNorm(nn.Module):
    """A convolution that keeps the size (or divides it by `stride`, rounding up), then a norm.

    Batch norm removes any constant that a convolution adds, so the gradient of a bias before it is rounding noise. If
    the published net has such a bias, this net has it too, frozen at zero, where exact arithmetic would leave it.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, bias: bool = False, norm: Norm = SteadyBatchNorm
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
        self.norm = norm(outputs)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)
            self.conv.bias.requires_grad_(not isinstance(self.norm, nn.BatchNorm2d))

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, outputs, H/stride, W/stride]
        normed: Tensor = self.norm(self.conv(images))
        return normed


class ConvNormReLU(ConvNorm):
    """`ConvNorm` followed by ReLU."""

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(super().forward(images), inplace=True)
