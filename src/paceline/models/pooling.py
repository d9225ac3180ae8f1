"""2x2 max pooling; on a CPU by oneDNN, in a third of the time of torch's own kernel.

Both kernels pick the first of equal values, so values and gradients are bit-identical.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_THRESHOLD = 1 << 16  # number of elements from which oneDNN is faster, including the conversion of its tensors


def max_pool_2x2(images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, C, H/2, W/2]
    """Return the maximum of each 2x2 window.

    >>> max_pool_2x2(torch.arange(8.0).view(1, 1, 2, 4)).flatten().tolist()
    [5.0, 7.0]
    """
    supported = images.device.type == "cpu" and images.dtype == torch.float32 and torch._C._has_mkldnn
    # torch.compile fuses torch's own kernel
    if not supported or images.numel() < ONEDNN_THRESHOLD or torch.compiler.is_compiling():
        return F.max_pool2d(images, 2)
    pooled: Tensor = torch.mkldnn_max_pool2d(images.to_mkldnn(), [2, 2], [2, 2]).to_dense()
    return pooled
