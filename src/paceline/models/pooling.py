"""Max pooling of 2x2 windows: on a CPU by oneDNN, which takes a third of the time of torch's own kernel.

Both pick the first of equal values, so values and gradients are the same bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORTH_CONVERTING = 1 << 16
"""Elements from which on oneDNN is faster, although its tensors have to be converted there and back."""


def max_pool_2x2(images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C, H/2, W/2]
    """The largest of each 2x2 window.

    >>> max_pool_2x2(torch.arange(8.0).view(1, 1, 2, 4)).flatten().tolist()
    [5.0, 7.0]
    """
    here = images.device.type == "cpu" and images.dtype == torch.float32 and torch._C._has_mkldnn
    if not here or images.numel() < WORTH_CONVERTING or torch.compiler.is_compiling():  # which fuses torch's own
        return F.max_pool2d(images, 2)
    pooled: Tensor = torch.mkldnn_max_pool2d(images.to_mkldnn(), [2, 2], [2, 2]).to_dense()
    return pooled
