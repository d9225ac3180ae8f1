"""Forward and backward of one batch: precision, accumulation, torch.compile and CUDA graph capture.

With all settings, parameters stay views into flat fp32 memory and gradients are added to the bound gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UserError
from paceline.interfaces import Batch
from paceline.models.dropout import AddressedDropout
from paceline.tasks.flat import FlatModule
from paceline.tasks.metrics import Weight, weigh
from paceline.tasks.nested import Structure, device_of, each, num_samples, outputs_of, rows_of, tensors_of

WARM_UP_STEPS = 3  # steps before a capture, in which libraries choose kernels and allocate memory
MAX_SHAPES = 4  # batch shapes that are captured; sentences have many shapes, and each graph holds memory

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepSettings:
    """Options of a training step; the command line flags of the same names explain them."""

    precision: str = "fp32"
    compile: bool = False
    capture: bool = False
    channels_last: bool = False
    accumulate: int = 1


class TrainingStep:
    """Forward and backward of one batch."""

    def __init__(self, flat: FlatModule, loss: Loss, settings: StepSettings, weight: Weight | None = None) -> None:
        self._flat, self._model, self._loss, self._settings = flat, flat.module, loss, settings
        self._weight_of = weight
        self._dropouts = [module for module in self._model.modules() if isinstance(module, AddressedDropout)]
        self._around, self._weight = self._model, 1.0
        self._forward: Loss = self._compiled() if settings.compile else self._loss_of
        self._captured: dict[tuple[torch.Size, ...], CapturedStep] = {}

    @property
    def starts_slowly(self) -> bool:
        """Whether the first step is slow, because it compiles or captures."""
        return self._settings.compile or self._settings.capture

    def __call__(self, batch: Batch, around: nn.Module, weight: float = 1.0) -> Tensor:
        """Add the gradient of the batch's mean loss, times `weight`, to the bound gradient; return the loss.

        `around` is the model, or a wrapper that exchanges gradients during backward (DDP).
        """
        self._around, self._weight = around, weight
        for dropout in self._dropouts:
            dropout.key = batch.key
        inputs, targets = self._placed(batch.inputs), batch.targets
        if not (self._settings.capture and device_of(inputs).type == "cuda"):
            return self._passes(inputs, targets)
        shapes = tuple(tensor.shape for tensor in tensors_of((inputs, targets)))
        if shapes not in self._captured:
            if len(self._captured) == MAX_SHAPES:
                return self._passes(inputs, targets)
            self._captured[shapes] = CapturedStep(self._passes, self._flat, inputs, targets)
        return self._captured[shapes](inputs, targets)

    def outputs(
        self, inputs: Structure, tensors: dict[str, Tensor] | None = None, model: nn.Module | None = None
    ) -> Any:
        """Return the outputs of the model (or of a copy, `model`), with `tensors` in place of its own if given."""
        inputs = self._placed(inputs)
        with self._precision(inputs):
            found = outputs_of(self._around if tensors is None else model or self._model, inputs, tensors)
        return found.float() if isinstance(found, Tensor) and found.dtype == torch.bfloat16 else found

    def _precision(self, inputs: Structure) -> Any:
        if self._settings.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(device_of(inputs).type, torch.bfloat16)

    def _placed(self, inputs: Structure) -> Structure:
        """Convert images to channels-last if set, also with one channel, which torch's `contiguous` leaves as it is."""
        return each(_channels_last, inputs) if self._settings.channels_last else inputs

    def _loss_of(self, inputs: Structure, targets: Structure) -> Tensor:
        return self._loss(self.outputs(inputs), targets)

    def _passes(self, inputs: Structure, targets: Structure) -> Tensor:
        """Run backward on each part of the batch, weighted by its share of the samples, or of the task's weight."""
        whole = num_samples(inputs)
        size = -(-whole // self._settings.accumulate)
        if size == whole:
            return self._backward(inputs, targets, 0, 1.0)
        losses, total = [], weigh(self._weight_of, targets, whole)
        for start in range(0, whole, size):
            part = slice(start, start + size)
            with contextlib.nullcontext() if part.stop >= whole else self._no_sync():
                x, y = rows_of(inputs, part), rows_of(targets, part)
                losses.append(self._backward(x, y, start, weigh(self._weight_of, y, num_samples(x)) / total))
        return torch.stack(losses).sum()

    def _no_sync(self) -> Any:
        """Return a context in which backward does not exchange gradients, for all parts but the last."""
        return self._around.no_sync() if isinstance(self._around, DistributedDataParallel) else contextlib.nullcontext()

    def _backward(self, inputs: Structure, targets: Structure, first: int, share: float) -> Tensor:
        for dropout in self._dropouts:
            dropout.first = first
        loss = self._forward(inputs, targets)
        if share != 1.0:
            loss = loss * share
        weighted = loss if self._weight == 1.0 else loss * self._weight
        weighted.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _compiled(self) -> Loss:
        """Return the loss compiled for static shapes; it raises UserError if torch cannot compile the model."""
        fast = torch.compile(self._loss_of, dynamic=False)

        def loss_of(inputs: Structure, targets: Structure) -> Tensor:
            try:
                return fast(inputs, targets)
            except Exception as error:
                if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    raise
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(f"--compile: torch cannot compile this model here ({why}): leave it out") from error

        return loss_of


def _channels_last(inputs: Tensor) -> Tensor:
    if inputs.dim() != 4:
        return inputs
    return torch.empty_like(inputs, memory_format=torch.channels_last).copy_(inputs)


class CapturedStep:
    """A step captured as one CUDA graph: the same kernels on the same memory, in one launch.

    The addresses of weights, gradient and dropout keys never change.
    """

    def __init__(self, passes: Loss, flat: FlatModule, inputs: Structure, targets: Structure) -> None:
        self._inputs = each(lambda tensor: torch.empty_like(tensor).copy_(tensor), inputs)
        self._targets = each(torch.clone, targets)
        buffers = list(flat.module.buffers())
        dropouts = [module for module in flat.module.modules() if isinstance(module, AddressedDropout)]
        saved = [buffer.clone() for buffer in buffers]
        try:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    passes(self._inputs, self._targets)
            torch.cuda.current_stream().wait_stream(stream)
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)
            flat.clear()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = passes(self._inputs, self._targets)
            # The graph reads these counters; a larger batch replaces them in the module.
            self._counters = [dropout.counter for dropout in dropouts]
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0]
            raise UserError(f"--capture: this model's step cannot be captured ({why}): leave it out") from error

    def __call__(self, inputs: Structure, targets: Structure) -> Tensor:
        static, given = tensors_of((self._inputs, self._targets)), tensors_of((inputs, targets))
        for buffer, tensor in zip(static, given, strict=True):
            buffer.copy_(tensor)
        self._graph.replay()
        return self._loss
