"""How many samples the steps of a user's own loop count for, in budgets, schedules and the mean of a round."""

from __future__ import annotations


class StepSamples:
    """The samples of each optimizer's pushes: those drawn since its last one, so that each is counted once.

    Another step on the same batch counts 0, and weighs as much as the last one in the mean of a round. A loop that
    draws its batches itself counts 1 per step.

    >>> steps = StepSamples()
    >>> steps.draw(20), steps.take(0), steps.take(0)
    (None, (20, None), (0, 20.0))
    """

    def __init__(self, num_optimizers: int = 1) -> None:
        self._new = [0] * num_optimizers
        self._last: list[int | None] = [None] * num_optimizers
        self._steps = [0] * num_optimizers  # on the newest batch
        self.most_steps = 1
        """The steps of one optimizer on one batch."""

    def draw(self, samples: int) -> None:
        """Note the samples that the loop has drawn since the last push of any optimizer."""
        self._new = [count + samples for count in self._new]

    def take(self, number: int) -> tuple[int, float | None]:
        """Return the samples of an optimizer's push, and its weight in the mean; None: by its samples."""
        new, self._new[number] = self._new[number], 0
        last = self._last[number]
        if not new and last is None:
            return 1, None
        if new:
            self._last[number], self._steps[number] = new, 1
            return new, None
        self._steps[number] += 1
        self.most_steps = max(self.most_steps, self._steps[number])
        return 0, float(last or 0)
