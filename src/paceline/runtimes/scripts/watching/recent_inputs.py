"""The inputs of a script's newest training batches: running statistics of the final weights are estimated from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.tasks.norm_statistics import norm_layers, reestimate

KEPT_INPUTS = 16
"""Training batches that running statistics are estimated from: the newest ones of this worker."""


class ForwardHook:
    """Calls a function before a model that is trained. In copies and pickles of the model it does nothing."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None]) -> None:
        self._call = call

    def __call__(self, model: nn.Module, arguments: Any, named: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._call(model, arguments, named)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class RecentInputs:
    """The inputs of the newest training batches of a model, if it has running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.records = False  # only between a batch and its step
        self._model = model
        self._inputs: deque[tuple[list[Any], dict[str, Any]]] = deque(maxlen=KEPT_INPUTS)
        self._layers: list[_NormBase] = []  # that followed the data in the newest call whose gradients were pushed
        self._called: list[_NormBase] | None = None  # those in the newest call since then
        self._autocast: tuple[str, torch.dtype, bool] | None = None
        norms = (part for part in model.modules() if isinstance(part, _NormBase))
        self.has_statistics = any(part.running_mean is not None for part in norms)

    def record(self, arguments: Any, named: Any) -> None:
        """Keep the inputs of a call, unless no statistics follow them: in evaluation mode, say."""
        if not self.records or not self.has_statistics:
            return
        self._called = norm_layers(self._model)
        if self._called:
            kind = next(self._model.parameters()).device.type
            self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            kept = [_detached(value) for value in arguments], {name: _detached(value) for name, value in named.items()}
            self._inputs.append(kept)

    def push(self) -> None:
        """Note that the gradients of the newest call are pushed; a call without a push is an evaluation."""
        self.records = False
        if self._called is not None:
            self._layers, self._called = self._called, None

    def estimate(self) -> bool:
        """Replace the model's running statistics by those of its current weights; False if no inputs are known."""
        if not self._inputs or self._autocast is None:
            return False
        kind, dtype, enabled = self._autocast
        with torch.autocast(kind, dtype, enabled):
            reestimate(self._model, self._layers, self._inputs, lambda inputs: self._model(*inputs[0], **inputs[1]))
        return True


def _detached(value: Any) -> Any:
    """An argument without its graph; anything but a tensor stays what the model expects."""
    return value.detach() if isinstance(value, Tensor) else value
