"""Augment whole batches of images on their device: random crops and mirroring, and centre crops.

Every choice is an integer hash of the batch's key, as in dropout: the same on CPU, on GPU and in a replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.randomness import mix64, scramble

PURPOSE = 0xA06
NUM_CHOICES = 3  # of an image: the top and the left of its window, and whether it is mirrored
_KEPT_BITS = 24


class Augment:
    """Crop each image at a random place after padding with `padding` black pixels; mirror half of the images."""

    def __init__(self, size: tuple[int, int] | None, padding: int, mirror: bool) -> None:
        self.size, self.padding, self.mirror = size, padding, mirror

    def __call__(self, images: Tensor, key: int) -> Tensor:  # uint8 [B, C, H, W] -> uint8 [B, C, *size]
        top, left, mirrored = _hashes(len(images), mix64(key, PURPOSE), images.device)
        rows = torch.arange(len(images), device=images.device)
        if self.size is not None and self.padding:
            images = F.pad(images, (self.padding,) * 4)
        if self.mirror:  # append the mirrored images, so that one gather selects both kinds
            rows = rows + len(images) * below(mirrored, 2)
            images = torch.cat([images, images.flip(3)])
        if self.size is None:
            return images[rows]
        windows = images.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)  # a view: [B, C, tops, lefts, *size]
        return windows[rows, :, below(top, windows.shape[2]), below(left, windows.shape[3])]


class CentreCrop:
    """Crop the centre of each image, then apply `then` to the batch; images of that size stay whole.

    >>> CentreCrop((2, 2), lambda images: images)(torch.arange(16).view(1, 1, 4, 4)).flatten().tolist()
    [5, 6, 9, 10]
    """

    def __init__(self, size: tuple[int, ...], then: Callable[[Tensor], Tensor]) -> None:
        self.size, self.then = size, then

    def __call__(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C, *size]
        top, left = ((whole - part) // 2 for whole, part in zip(images.shape[2:], self.size, strict=True))
        return self.then(images[:, :, top : top + self.size[0], left : left + self.size[1]])


def _hashes(count: int, key: int, device: torch.device) -> Tensor:  # int32 [3, count]
    """Return three hashes per image, which depend on its place in the batch but not on the batch size."""
    counter = torch.arange(NUM_CHOICES * count, dtype=torch.int32, device=device).view(count, NUM_CHOICES)
    return scramble(counter, key, torch.empty_like(counter), torch.empty_like(counter)).T


def below(hashes: Tensor, bound: int) -> Tensor:
    """Map each hash to a number from 0 to `bound` - 1, by its upper bits, which are mixed best."""
    upper = (hashes >> (32 - _KEPT_BITS)) & ((1 << _KEPT_BITS) - 1)
    return (upper.to(torch.int64) * bound) >> _KEPT_BITS
