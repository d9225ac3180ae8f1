"""Estimate the running statistics of norm layers again, for weights that no worker has computed on.

Averaged weights, and weights made from the pushes of several workers, have activations of their own.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.interfaces import Loader
from paceline.system.cpu import cores
from paceline.tasks.flat import FlatModule, sharing_parameters
from paceline.tasks.nested import Structure

Inputs = TypeVar("Inputs")
MAX_SAMPLES, MAX_BATCH = 2048, 128
"""Training samples that statistics are estimated on, and how many of them make a batch."""
MAX_THREADS = 8  # more wait for Python's GIL
KEPT = 2  # estimates to remember: of the averaged weights and of the live ones


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


Forward = Callable[[Structure, dict[str, Tensor], nn.Module], Any]
"""Calls a module on inputs, with the given tensors in place of its own."""


class StatisticsEstimator:
    """Estimates the running statistics of a module's norm layers for any flat weights.

    Each batch is computed on one core with one thread, and the statistics of all batches are summed in their order:
    equal weights give equal bits on any number of cores. On a GPU the batches follow each other.
    """

    def __init__(self, flat: FlatModule, forward: Forward) -> None:
        self._flat, self._forward = flat, forward
        self._lock = threading.Lock()
        self._found: dict[bytes, Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether the module has statistics to estimate."""
        return bool(norm_layers(self._flat.module))

    def __call__(self, weights: Tensor, state: Tensor, loader: Loader, num_batches: int) -> Tensor:
        """Return `state` with the statistics that belong to `weights`, from batches 0 to `num_batches` - 1."""
        key = _digest(weights, state)
        if key not in self._found:
            while len(self._found) >= KEPT:
                del self._found[next(iter(self._found))]
            self._found[key] = self._estimate(weights, state, loader, num_batches)
        return self._found[key]

    def _estimate(self, weights: Tensor, state: Tensor, loader: Loader, num_batches: int) -> Tensor:
        is_parallel = weights.device.type == "cpu"
        models = self._models(min(cores(), MAX_THREADS, num_batches) if is_parallel else 1)
        idle: SimpleQueue[nn.Module] = SimpleQueue()
        for model in models:
            idle.put(model)

        def on_batch(number: int) -> Tensor:
            with torch.inference_mode():  # of this thread
                with self._lock:  # a user's transform may not be safe in two threads
                    inputs = loader.batch(number).inputs
                model, found = idle.get(), state.clone()
                tensors = self._flat.tensors(weights, found)
                try:
                    reestimate(model, norm_layers(model), [inputs], lambda x: self._forward(x, tensors, model))
                finally:
                    idle.put(model)
                return found

        threads = torch.get_num_threads()
        try:
            if is_parallel:
                with ThreadPoolExecutor(len(models), "statistics", torch.set_num_threads, (1,)) as pool:
                    return self._merged(state, pool.map(on_batch, range(num_batches)), num_batches)
            return self._merged(state, map(on_batch, range(num_batches)), num_batches)
        finally:
            torch.set_num_threads(threads)  # a part of this setting is the process's, not the thread's

    def _models(self, count: int) -> list[nn.Module]:
        """Return a module for each thread: copies, because a call with other tensors changes a module meanwhile."""
        module = self._flat.module
        try:
            return [module, *(sharing_parameters(module) for _ in range(count - 1))]
        except Exception:  # a module may hold anything; one that cannot be copied is computed on one core
            return [module]

    def _merged(self, state: Tensor, found: Iterable[Tensor], num_batches: int) -> Tensor:
        """Return `state` with the mean of the statistics; other buffers stay as they are."""
        total = torch.zeros_like(state, dtype=torch.float64)
        for one in found:
            total += one
        merged, mean = state.clone(), (total / num_batches).to(state.dtype)
        layout, layers = self._flat.state_layout, set(norm_layers(self._flat.module))
        into, source = layout.views(merged), layout.views(mean)
        for prefix, module in self._flat.module.named_modules():
            if module in layers:
                for name in ("running_mean", "running_var"):
                    full = f"{prefix}.{name}" if prefix else name
                    into[full].copy_(source[full])
        return merged


def _digest(*tensors: Tensor) -> bytes:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(memoryview(tensor.detach().cpu().contiguous().numpy()))  # type: ignore[arg-type]
    return digest.digest()
