"""The loss of many weight vectors on one part of a task's data, one vector after another.

Evaluating many at once (`lab.batched`) was measured: 7 times slower on a CPU, no faster on a GPU with large batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.func import functional_call

from paceline.data.randomness import rng
from paceline.errors import UserError
from paceline.tasks.supervised import EVALUATION_BATCH, SupervisedTask

Point = tuple[Tensor, Tensor | None]
"""Weights and running statistics, flat."""
LARGE_BATCH = 8192
LEAST_BATCH = 32


def chosen_rows(total: int, wanted: int) -> Tensor:
    """`wanted` of `total` rows (or all), the same ones every time."""
    rows = rng(0, "landscape", total).permutation(total)[:wanted]
    rows.sort()
    return torch.from_numpy(rows)


class Losses:
    """Mean loss of weights on the chosen rows of `data`, in evaluation mode; the task is used up by it."""

    def __init__(self, task: SupervisedTask, data: tuple[Tensor, Tensor], wanted: int) -> None:
        inputs, targets = data
        rows = chosen_rows(len(inputs), wanted).to(inputs.device)
        self._task, self.device = task, inputs.device
        chosen = inputs.index_select(0, rows)
        self._inputs = task.transform(chosen) if task.transform is not None else chosen
        self._targets = targets.index_select(0, rows)
        self._batch = LARGE_BATCH if self.device.type == "cuda" else EVALUATION_BATCH
        self.num_samples = len(rows)
        task.model.eval()

    @torch.inference_mode()
    def __call__(self, points: Iterable[Point], passed: Callable[[], None] = lambda: None) -> Tensor:
        """One loss a point, in double precision on the CPU; `passed` is called after each."""
        found = []
        for weights, state in points:
            placed = state.to(self.device) if state is not None else None
            found.append(self._loss(weights.to(self.device), placed))
            passed()
        return torch.stack(found).cpu()

    def _loss(self, weights: Tensor, state: Tensor | None) -> Tensor:
        while True:
            try:
                return self._mean(self._task.flat.tensors(weights, state))
            except torch.OutOfMemoryError:
                if self._batch <= LEAST_BATCH:
                    raise UserError(
                        f"{self.device} has no room to evaluate {LEAST_BATCH} samples: free some of its memory, "
                        "or use --device cpu"
                    ) from None
                self._batch //= 2

    def _mean(self, tensors: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, self.num_samples, self._batch):
            x, y = self._inputs[start : start + self._batch], self._targets[start : start + self._batch]
            total += self._task.loss(functional_call(self._task.model, tensors, (x,)), y).double() * len(y)
        return total / self.num_samples
