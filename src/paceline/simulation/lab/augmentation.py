"""Random crops and mirrored images for many runs at once: the choices of `tasks.augmentation`, by the same keys."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.randomness import scramble
from paceline.settings.preprocessing import PADDING
from paceline.tasks.augmentation import NUM_CHOICES, below


def hashes_of(low: Tensor, high: Tensor, batch: int) -> Tensor:  # keys int32 [..., pushes] -> int32 [3, ..., pushes, B]
    """Return the hashes of each image that choose its window's top and left and whether it is mirrored."""
    counter = torch.arange(NUM_CHOICES * batch, dtype=torch.int32, device=low.device).view(batch, NUM_CHOICES)
    counter = counter.expand(*low.shape, batch, NUM_CHOICES).contiguous()
    key = torch.stack([low, high])[..., None, None]
    return scramble(counter, key, torch.empty_like(counter), torch.empty_like(counter)).movedim(-1, 0)


def augmented(images: Tensor, hashes: Tensor, ways: tuple[str, ...]) -> Tensor:  # uint8 [N, H, W, C], int32 [3, N]
    """Crop each image at a random place after padding it with black pixels, and mirror half of them."""
    number, height, width, _ = images.shape
    top, left, mirrored = hashes.unbind()
    rows = torch.arange(height, device=images.device).expand(number, -1)
    columns = torch.arange(width, device=images.device).expand(number, -1)
    if "crop" in ways:
        rows = rows + below(top, 2 * PADDING + 1)[:, None] - PADDING
        columns = columns + below(left, 2 * PADDING + 1)[:, None] - PADDING
    if "mirror" in ways:
        columns = torch.where(below(mirrored, 2)[:, None] == 1, width - 1 - columns, columns)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
    place = torch.arange(number, device=images.device)[:, None, None]
    found = images[place, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None]]
    return found * inside[..., None]
