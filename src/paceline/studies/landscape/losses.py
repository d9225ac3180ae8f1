"""The loss of many weight vectors on one part of a task's data; each vector alone, several side by side on a CPU.

Evaluating many in one product (`lab.batched`) was measured: 7 times slower on a CPU, no faster on a GPU.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.randomness import rng
from paceline.system.cpu import cores
from paceline.tasks.nested import device_of, each, num_samples, outputs_of, rows_of
from paceline.tasks.supervised import Pair, SupervisedTask

Point = tuple[Tensor, Tensor | None]
"""Weights and running statistics, flat."""
BATCHES = {"cpu": 100, "cuda": 8192}
"""Samples in a batch: those that fit a core's cache, those that fill a GPU."""
LEAST_BATCH = 32
MOST_THREADS = 8
"""More wait for Python's own lock: on 16 cores, 16 were slower than 8."""
AHEAD = 2
"""Points that wait for each thread."""


def chosen_rows(total: int, wanted: int) -> Tensor:
    """`wanted` of `total` rows (or all), the same ones every time."""
    rows = rng(0, "landscape", total).permutation(total)[:wanted]
    rows.sort()
    return torch.from_numpy(rows)


class Losses:
    """Mean loss of weights on the chosen rows of `data`, in evaluation mode; the task is used up by it.

    With `side_by_side`, as many points at once as there are cores, each on one thread: threads that share a point
    wait for each other, which on a machine that others use costs up to ten times. It asks of the task that its model
    can be copied and that its loss keeps nothing between calls.
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
        self._num_threads = min(cores(), MOST_THREADS) if side_by_side and self.device.type == "cpu" else 1
        self._models: SimpleQueue[nn.Module] = SimpleQueue()
        for _ in range(self._num_threads):
            self._models.put(_sharing_tensors(task.model) if self._num_threads > 1 else task.model)

    def __call__(self, points: Iterable[Point], passed: Callable[[], None] = lambda: None) -> Tensor:
        """One loss a point, in double precision on the CPU; `passed` is called after each."""
        found: list[Tensor] = []
        waiting: deque[Future[Tensor]] = deque()
        threads = 1 if self._num_threads > 1 else cores()

        def take() -> None:
            found.append(waiting.popleft().result())
            passed()

        with ThreadPoolExecutor(self._num_threads, "losses", torch.set_num_threads, (threads,)) as pool:
            for weights, state in points:
                waiting.append(pool.submit(self._loss, weights, state))
                if len(waiting) > AHEAD * self._num_threads:
                    take()
            while waiting:
                take()
        return torch.stack(found).cpu()

    @torch.inference_mode()
    def _loss(self, weights: Tensor, state: Tensor | None) -> Tensor:
        placed = state.to(self.device) if state is not None else None
        tensors = self._task.flat.tensors(weights.to(self.device), placed)
        model = self._models.get()
        try:
            return self._with_room(model, tensors)
        finally:
            self._models.put(model)

    def _with_room(self, model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
        """The mean loss, in smaller batches where the device has no room for larger ones."""
        while True:
            try:
                return self._mean(model, tensors)
            except torch.OutOfMemoryError:
                if self._batch <= LEAST_BATCH:
                    raise UserError(
                        f"{self.device} has no room to evaluate {LEAST_BATCH} samples: free some of its memory, "
                        "or use --device cpu"
                    ) from None
                self._batch //= 2

    def _mean(self, model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, self.num_samples, self._batch):
            part = slice(start, start + self._batch)
            x, y = rows_of(self._inputs, part), rows_of(self._targets, part)
            total += self._task.loss(outputs_of(model, x, tensors), y).double() * num_samples(x)
        return total / self.num_samples


def _sharing_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules, which functional_call changes for a moment, around the same tensors."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)
