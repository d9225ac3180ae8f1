"""Loss of many weight vectors on one part of a task's data, several vectors in parallel on a CPU.

One batched product for many vectors (simulation/lab/models.py) is 7 times slower on a CPU, no faster on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.randomness import rng
from paceline.system.cpu import cores
from paceline.tasks.flat import sharing_parameters
from paceline.tasks.metrics import weigh
from paceline.tasks.nested import device_of, each, num_samples, outputs_of, rows_of
from paceline.tasks.supervised import Pair, SupervisedTask

Point = tuple[Tensor, Tensor | None]  # flat weights and flat running statistics
BATCHES = {"cpu": 100, "cuda": 8192}  # samples per batch: enough to fill a GPU, few enough for a core's cache
MIN_BATCH = 32
MAX_THREADS = 8  # more threads wait for Python's GIL: on 16 cores, 16 were slower than 8
QUEUED_POINTS = 2  # queued points per thread


def chosen_rows(total: int, wanted: int) -> Tensor:
    """Choose `wanted` of `total` rows (or all), the same at every call."""
    rows = rng(0, "landscape", total).permutation(total)[:wanted]
    rows.sort()
    return torch.from_numpy(rows)


class Losses:
    """Computes the mean loss of weights on the chosen rows of `data`, in evaluation mode; takes over the task.

    With `side_by_side` it evaluates several points at once, one per thread: threads that share a point wait for each
    other, up to ten times as long on a busy machine. The task's model must be copyable and its loss stateless.
    """

    def __init__(self, task: SupervisedTask, data: Pair, wanted: int, side_by_side: bool = False) -> None:
        inputs, targets = data
        self._task, self.device = task, device_of(inputs)
        rows = chosen_rows(num_samples(inputs), wanted).to(self.device)
        chosen = each(lambda tensor: tensor.index_select(0, rows), inputs)
        self._inputs = task.transform(chosen) if task.transform is not None else chosen
        self._targets = each(lambda tensor: tensor.index_select(0, rows), targets)
        self._batch = BATCHES[self.device.type]
        self.num_samples = len(rows)
        task.model.eval()
        self._num_threads = min(cores(), MAX_THREADS) if side_by_side and self.device.type == "cpu" else 1
        self._models: SimpleQueue[nn.Module] = SimpleQueue()
        for _ in range(self._num_threads):
            self._models.put(sharing_parameters(task.model) if self._num_threads > 1 else task.model)

    def __call__(self, points: Iterable[Point], passed: Callable[[], None] = lambda: None) -> Tensor:
        """Return one loss per point, in double precision on the CPU, and call `passed` after each."""
        found: list[Tensor] = []
        waiting: deque[Future[Tensor]] = deque()
        threads = 1 if self._num_threads > 1 else cores()

        def collect() -> None:
            found.append(waiting.popleft().result())
            passed()

        with ThreadPoolExecutor(self._num_threads, "losses", torch.set_num_threads, (threads,)) as pool:
            for weights, state in points:
                waiting.append(pool.submit(self._loss, weights, state))
                if len(waiting) > QUEUED_POINTS * self._num_threads:
                    collect()
            while waiting:
                collect()
        return torch.stack(found).cpu()

    @torch.inference_mode()
    def _loss(self, weights: Tensor, state: Tensor | None) -> Tensor:
        placed = state.to(self.device) if state is not None else None
        tensors = self._task.flat.tensors(weights.to(self.device), placed)
        model = self._models.get()
        try:
            return self._loss_in_memory(model, tensors)
        finally:
            self._models.put(model)

    def _loss_in_memory(self, model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
        """Return the mean loss; halve the batch size each time the device runs out of memory."""
        while True:
            try:
                return self._mean(model, tensors)
            except torch.OutOfMemoryError:
                if self._batch <= MIN_BATCH:
                    found = f"{self.device} has too little memory to evaluate {MIN_BATCH} samples"
                    raise UserError(f"{found}: free some of it, or use --device cpu") from None
                self._batch //= 2

    def _mean(self, model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
        total, weights = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        for start in range(0, self.num_samples, self._batch):
            part = slice(start, start + self._batch)
            x, y = rows_of(self._inputs, part), rows_of(self._targets, part)
            weight = weigh(self._task.weight, y, num_samples(x))
            total += self._task.loss(outputs_of(model, x, tensors), y).double() * weight
            weights += weight
        return total / weights
