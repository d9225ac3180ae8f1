"""A script's model in memory that the server shares, and the inputs that its running statistics are estimated from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.core.buffers import BufferSizes
from paceline.errors import UserError
from paceline.tasks.flat import FlatModule
from paceline.tasks.norm_statistics import norm_layers, reestimate
from paceline.transports.shared_memory import SharedBuffers

KEPT_INPUTS = 16
"""Training batches that running statistics are estimated from: the newest ones of this worker."""


class RecentInputs:
    """The inputs of the newest training batches, kept by a hook on the model if it has running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.records = False  # only between a batch and its step
        self._model = model
        self._inputs: deque[tuple[list[Any], dict[str, Any]]] = deque(maxlen=KEPT_INPUTS)
        self._layers: list[_NormBase] = []  # that followed the data in the newest of them
        self._autocast: tuple[str, torch.dtype, bool] | None = None
        if any(isinstance(part, _NormBase) and part.running_mean is not None for part in model.modules()):
            model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, model: nn.Module, arguments: Any, named: Any) -> None:
        if torch.compiler.is_compiling() or not self.records or not torch.is_grad_enabled():
            return
        self._layers = norm_layers(model)
        if self._layers:
            kind = next(model.parameters()).device.type
            self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            kept = [_detached(value) for value in arguments], {name: _detached(value) for name, value in named.items()}
            self._inputs.append(kept)

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


class BoundModel:
    """A model bound to shared buffers, or to a copy of them on the GPU if the model is there."""

    def __init__(self, flat: FlatModule, device: torch.device) -> None:
        self.flat, self.inputs = flat, RecentInputs(flat.module)
        self.slot = SharedBuffers.create(BufferSizes(flat.layout.size, flat.state_size))
        self.slot.weights.copy_(flat.initial())
        shared = self.slot.weights, self.slot.update, self.slot.state
        self._own = shared if device.type == "cpu" else tuple(tensor.to(device, copy=True) for tensor in shared)
        flat.bind(*self._own)
        places = {part.name for part in flat.layout.parameters}
        self._parameters = {name: p for name, p in flat.module.named_parameters() if name in places}
        self._marks: dict[str, tuple[int, int]] = {}

    def _current_marks(self) -> dict[str, tuple[int, int]]:
        """Where each parameter lies, and torch's count of the changes made to it in place."""
        return {name: (p.data_ptr(), p._version) for name, p in self._parameters.items()}

    def require_unchanged(self) -> None:
        """Raise UserError if the script has changed the weights itself, which the server would not see."""
        for name, mark in self._current_marks().items():
            if mark != self._marks[name]:
                what = f"parameter {name} was changed or moved between two steps"
                why = "the server holds the weights, and only gradients reach it"
                instead = "change or move the model before session.prepare(...), and use no max_norm or clamping"
                raise UserError(f"{what}: {why}; {instead}")

    @property
    def _is_copy(self) -> bool:
        return self._own[0] is not self.slot.weights

    def collect(self) -> None:
        """After backward: copy gradient and running statistics to where the server reads them."""
        self.flat.collect()
        if self._is_copy:
            self.slot.update.copy_(self._own[1])
        self.send_state()

    def renew(self) -> None:
        """After a reply: compute on the weights that the server wrote."""
        self.load_weights()
        self.flat.clear()
        self._marks = self._current_marks()

    def load_weights(self) -> None:
        """Use the weights that the server wrote."""
        if self._is_copy:
            self._own[0].copy_(self.slot.weights)

    def send_state(self) -> None:
        """Copy the running statistics to where the server reads them."""
        if self._is_copy:
            self.slot.state.copy_(self._own[2])

    def load_state(self) -> None:
        """Use the running statistics that the server wrote."""
        if self._is_copy:
            self._own[2].copy_(self.slot.state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever happens inside: weights, buffers and modes are afterwards as they were."""
        model, weights = self.flat.module, self.slot.weights.clone()
        with ExitStack() as after:
            for part in model.modules():
                after.callback(setattr, part, "training", part.training)
            for buffer in model.buffers():
                after.callback(buffer.data.copy_, buffer.clone())
            after.callback(self._restore_weights, weights)
            yield

    def _restore_weights(self, weights: Tensor) -> None:
        self.slot.weights.copy_(weights)
        self.load_weights()
        self._marks = self._current_marks()
