"""Notes to a user's own loop on standard error, about mistakes that do not end its run."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def note_first_step(worker: int, steps_before: int, ignores_loaders: bool) -> None:
    """Say so if the loop may count from 0 again after a restart, or reads other loaders than those of the session.

    `steps_before` are those of earlier incarnations, 0 if the loop has a loader or a budget, or has asked for them.
    """
    if steps_before:
        what = f"worker {worker} goes on after {steps_before} steps, and its loop has not asked for them"
        print(f"{what}: one that counts its steps starts at session.iteration", file=sys.stderr)
    if ignores_loaders and worker == 0:
        what = "a step, and no batch came from what session.prepare(...) returned for the loader"
        print(f"{what}: every worker reads all data; let the loop read that one", file=sys.stderr)


def note_end(worker: int) -> None:
    """Say that the script ends because its loop goes on after training."""
    if worker == 0:
        what = "training is over, and the loop goes on: the script ends here"
        print(f"{what}; leave the loop when session.finished is true to run what follows it", file=sys.stderr)


def note_unfinished(worker: int) -> None:
    """Say that the script has ended without `session.finish()`."""
    if worker == 0:
        what = "the script ended without session.finish(): its model holds the weights of its last step"
        print(f"{what}, not the run's final ones", file=sys.stderr)


class FirstGradients:
    """Looks at the gradients of the first steps, and says once if there are none: the loop calls no backward."""

    def __init__(self) -> None:
        self._looks_left = 3  # at gradients of zeros, which one batch may have

    def look(self, parameters: Iterable[Tensor]) -> None:
        """Look at the gradients with which a step begins."""
        if not self._looks_left:
            return
        gradients = [one.grad for one in parameters if one.grad is not None]
        if any(one.layout is not torch.strided or bool(one.any()) for one in gradients):
            self._looks_left = 0
            return
        self._looks_left = self._looks_left - 1 if gradients else 0
        if not self._looks_left:
            what = "the gradients of the first 3 steps are all 0" if gradients else "the first step found no gradient"
            print(
                f"{what}: nothing is trained without loss.backward() between zero_grad() and the step", file=sys.stderr
            )
