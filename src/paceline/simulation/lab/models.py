"""LeNet5 and the CNN for G runs at once, each with its own weights and batch; activations are [G, B, H, W, C]."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.randomness import MULTIPLIER_A, MULTIPLIER_B

Logits = Callable[[dict[str, Tensor], Tensor, "list[tuple[Tensor, Tensor]] | None"], Tensor]
"""(parameters by name [G, ...], images [G, B, H, W, C], dropout keys of each layer) -> log-probabilities [G, B, 10]"""


def patches(images: Tensor, size: int) -> Tensor:  # [G, B, H, W, C] -> [G, B H' W', size size C]
    """Return every `size` x `size` window as a row."""
    g, b, h, w, c = images.shape
    down, right = h - size + 1, w - size + 1
    strides = images.stride()
    windows = images.as_strided((g, b, down, right, size, size, c), (*strides[:4], *strides[2:4], strides[4]))
    return windows.reshape(g, b * down * right, size * size * c)


def convolve(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # weight [G, O, C, k, k]
    """Convolve without padding."""
    g, b, h, w, _ = images.shape
    outputs, size = weight.shape[1], weight.shape[-1]
    matrix = weight.permute(0, 3, 4, 2, 1).reshape(g, -1, outputs)
    product = torch.baddbmm(bias[:, None], patches(images, size), matrix)
    return product.view(g, b, h - size + 1, w - size + 1, outputs)


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


def lenet5(p: dict[str, Tensor], images: Tensor, keys: list[tuple[Tensor, Tensor]] | None) -> Tensor:
    x = pool(convolve(F.pad(images, (0, 0, 2, 2, 2, 2)), p["conv1.weight"], p["conv1.bias"]).relu())
    x = pool(convolve(x, p["conv2.weight"], p["conv2.bias"]).relu())
    x = linear(flat(x), p["fc1.weight"], p["fc1.bias"]).relu()
    x = linear(x, p["fc2.weight"], p["fc2.bias"]).relu()
    return F.log_softmax(linear(x, p["fc3.weight"], p["fc3.bias"]), dim=-1)


def cnn(p: dict[str, Tensor], images: Tensor, keys: list[tuple[Tensor, Tensor]] | None) -> Tensor:
    x = convolve(images, p["conv1.weight"], p["conv1.bias"]).relu()
    x = flat(pool(convolve(x, p["conv2.weight"], p["conv2.bias"])))
    if keys is not None:
        x = dropout(x, keys[0], 0.25)
    x = linear(x, p["fc1.weight"], p["fc1.bias"]).relu()
    if keys is not None:
        x = dropout(x, keys[1], 0.5)
    return F.log_softmax(linear(x, p["fc2.weight"], p["fc2.bias"]), dim=-1)


BATCHED: dict[str, Logits] = {"lenet5": lenet5, "cnn": cnn}
DROPOUT_LAYERS = {"lenet5": (), "cnn": (1, 2)}
