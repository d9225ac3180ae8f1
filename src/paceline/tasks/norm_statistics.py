"""Estimate the running statistics of norm layers again, for weights that no worker has computed on.

Averaged weights, and weights made from the pushes of several workers, have activations of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Inputs = TypeVar("Inputs")


def norm_layers(module: nn.Module) -> list[_NormBase]:
    """Return the layers whose running statistics follow the data: norms that track them and are in training mode.

    A norm layer that the user has put into evaluation mode keeps the statistics it was given. So does a SyncBatchNorm,
    whose ranks estimate them together.
    """
    return [layer for layer in module.modules() if isinstance(layer, _NormBase) and _follows(layer)]


def _follows(layer: _NormBase) -> bool:
    tracks = layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None
    return tracks and layer.training and not isinstance(layer, nn.SyncBatchNorm)


@torch.no_grad()
def reestimate(
    module: nn.Module, layers: Sequence[_NormBase], batches: Iterable[Inputs], forward: Callable[[Inputs], Any]
) -> None:
    """Replace the running statistics of `layers` by their plain mean over `batches`; `forward` calls the module.

    Only `layers` are in training mode, so dropout is off: they see what they will see in an evaluation. (torch's
    `update_bn` leaves dropout on; the variances then belong to a noisier net and depend on a random generator.)
    A layer that no batch reaches keeps its statistics. Modes, momenta and batch counters are restored.
    """
    with ExitStack() as restored:
        for part in module.modules():
            restored.callback(setattr, part, "training", part.training)
        module.eval()
        for layer in layers:
            restored.callback(setattr, layer, "momentum", layer.momentum)
            if layer.num_batches_tracked is not None:
                restored.callback(layer.num_batches_tracked.copy_, layer.num_batches_tracked.clone())
            layer.training = True
            restored.callback(layer.register_forward_pre_hook(_RunningMean()).remove)
        for batch in batches:
            forward(batch)


class _RunningMean:
    """Before call k of a layer (from 0), sets the weight of the new batch to 1/(k+1).

    `momentum=None` does the same for batch norm, but stops an instance norm from learning at all.
    """

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, layer: _NormBase, _: Any) -> None:
        if not self._calls:  # a weight of 0 would not remove a NaN
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.zero_()
            layer.running_var.zero_()
        self._calls += 1
        layer.momentum = 1.0 / self._calls
