"""What `--rule auto` chooses: a pure function of what is known of a run before it starts, and why in one line."""

from __future__ import annotations

from dataclasses import dataclass

SKEWED = 0.3
"""From this distance on, workers see labels in very different shares."""
MOST_AT_FULL_STEP = 10
"""Workers that may push gradients before the step must become shorter: at 30 steps of a third still converge."""


@dataclass(frozen=True)
class Choice:
    """A rule that can be named, and from how many pushes under way its steps are shortened (0: never)."""

    rule: str
    most: int
    why: str

    def step(self, workers: int) -> float:
        """What the learning rate is multiplied by."""
        return min(1.0, self.most / workers) if self.most else 1.0

    def line(self, workers: int) -> str:
        """For the user."""
        shorter = f", steps x {self.step(workers):.2g}" if self.step(workers) < 1.0 else ""
        return f"rule auto: {self.rule}{shorter} ({self.why})"


def choose(workers: int, skew: float | None, optimizer: str) -> Choice:
    """The rule for so many workers, whose labels are `skew` from the whole (None: unknown), under an optimizer.

    Chosen on a validation split of Fashion-MNIST (docs/rules.md): farsight is best or level with the best on even and
    on skewed labels, at the user's own lr and momentum; where labels are skewed, the slow workers' must count as much
    as the others'. It is its own optimizer: under another one (Nesterov's momentum is another), labels that differ need
    the memory of `cached`.

    >>> [choose(workers, 0.9, optimizer).rule for workers, optimizer in ((10, "sgd"), (1, "sgd"), (4, "adam"))]
    ['farsight-fair', 'plain', 'cached']
    >>> choose(30, 0.0, "sgd").line(30)
    'rule auto: farsight, steps x 0.33 (30 workers, labels spread evenly)'
    """
    if workers == 1:
        return Choice("plain", 0, "one worker: nothing is stale")
    skewed = skew is None or skew >= SKEWED
    if skew is None:
        spread = "labels unknown"
    else:
        spread = f"labels {skew:.0%} from the whole" if skewed else "labels spread evenly"
    why = f"{workers} workers, {spread}"
    if optimizer == "sgd":
        return Choice("farsight-fair" if skewed else "farsight", MOST_AT_FULL_STEP, why)
    rule = "cached" if skewed else "plain"
    return Choice(rule, MOST_AT_FULL_STEP, f"{why}, {optimizer} inside")
