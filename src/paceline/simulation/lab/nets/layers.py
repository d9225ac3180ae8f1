"""Layers for G runs at once, each with its own weights and batch; activations are [G, S, H, W, C]."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.randomness import MULTIPLIER_A, MULTIPLIER_B

EPSILON = 1e-5  # torch's default in batch norm and layer norm


@dataclass(frozen=True)
class Pass:
    """How a forward pass treats dropout and batch norm; by default as in an evaluation without batch norm."""

    keys: list[tuple[Tensor, Tensor]] | None = None  # dropout keys of each layer, [G, pushes] in 32-bit halves
    present: Tensor | None = None  # bool [G, pushes, B]: batch norm uses the statistics of these samples of each push
    statistics: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Running mean and variance [G, C] of each norm in order, if there are no batch statistics to use."""
    measured: list[tuple[Tensor, Tensor]] | None = None
    """Takes what torch would add to the running statistics: mean and unbiased variance [G, pushes, C] of each norm."""

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the running statistics of the next norm."""
        return self.statistics.pop(0)


def patches(images: Tensor, size: int, stride: int = 1) -> Tensor:  # [G, B, H, W, C] -> [G, B H' W', size size C]
    """Return every `size` x `size` window as a row."""
    g, b, h, w, c = images.shape
    down, right = (h - size) // stride + 1, (w - size) // stride + 1
    strides = images.stride()
    steps = strides[2] * stride, strides[3] * stride
    windows = images.as_strided((g, b, down, right, size, size, c), (*strides[:2], *steps, *strides[2:]))
    return windows.reshape(g, b * down * right, size * size * c)


def _as_matrix(weight: Tensor) -> Tensor:  # [G, O, C, k, k] -> [G, k k C, O]
    return weight.permute(0, 3, 4, 2, 1).reshape(len(weight), -1, weight.shape[1])


def convolve(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # weight [G, O, C, k, k]
    """Convolve without padding."""
    g, b, h, w, _ = images.shape
    outputs, size = weight.shape[1], weight.shape[-1]
    product = torch.baddbmm(bias[:, None], patches(images, size), _as_matrix(weight))
    return product.view(g, b, h - size + 1, w - size + 1, outputs)


def convolve_same(images: Tensor, weight: Tensor, stride: int = 1) -> Tensor:  # weight [G, O, C, 3, 3]
    """Convolve with a border of zeros and without a bias; a stride divides the size, rounding up."""
    g, b, h, w, _ = images.shape
    product = torch.bmm(patches(F.pad(images, (0, 0, 1, 1, 1, 1)), 3, stride), _as_matrix(weight))
    return product.view(g, b, (h - 1) // stride + 1, (w - 1) // stride + 1, -1)


def batch_norm(images: Tensor, weight: Tensor, bias: Tensor, how: Pass) -> Tensor:  # weight, bias [G, C]
    """Normalise each channel by the statistics of its push, or by running ones."""
    shape = images.shape
    if how.present is None:
        mean, variance = (tensor[:, None, None, None] for tensor in how.take())
    else:
        images = images.view(shape[0], how.present.shape[1], -1, shape[2] * shape[3], shape[4])  # [G, pushes, B, HW, C]
        there = how.present[..., None, None].to(images.dtype)
        count = (there.sum(2, keepdim=True) * images.shape[3]).clamp(min=1.0)
        mean = (images * there).sum((2, 3), keepdim=True) / count
        variance = ((images - mean).square() * there).sum((2, 3), keepdim=True) / count
        if how.measured is not None:
            unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
            how.measured.append((mean[:, :, 0, 0], unbiased[:, :, 0, 0]))
    weight, bias = weight[:, None, None, None], bias[:, None, None, None]
    return ((images - mean) * torch.rsqrt(variance + EPSILON) * weight + bias).view(shape)


def pool(images: Tensor) -> Tensor:
    """Return the maximum of each 2 x 2 window; equal maxima share the gradient."""
    g, b, h, w, c = images.shape
    return images.view(g, b, h // 2, 2, w // 2, 2, c).amax((3, 5))


def linear(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # [G, B, I], [G, O, I]
    return torch.baddbmm(bias[:, None], values, weight.transpose(1, 2))


def flat(images: Tensor) -> Tensor:
    """Flatten in the order of torch's [B, C, H, W]."""
    return images.permute(0, 1, 4, 2, 3).flatten(2)


def dropout(values: Tensor, key: tuple[Tensor, Tensor], probability: float) -> Tensor:
    """Apply the mask of `models.dropout.keep_mask` to values [G, pushes B, N]; keys [G, pushes] in 32-bit halves."""
    low, high = key
    g, pushes = low.shape
    each = values.view(g, pushes, -1)
    bits = torch.arange(each.shape[-1], dtype=torch.int32, device=values.device) ^ low[..., None]
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * MULTIPLIER_A
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = (bits + high[..., None]) * MULTIPLIER_B
    keep = bits >= -(1 << 31) + round(probability * (1 << 32))
    return (each * (keep.to(values.dtype) * (1.0 / (1.0 - probability)))).view(values.shape)
