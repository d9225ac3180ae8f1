"""Finds runs that learned nothing: they predict no better than the class frequencies, or far worse than untrained."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunConfig, is_script
from paceline.core.messages import Disposition
from paceline.core.server import Server
from paceline.interfaces import Scores
from paceline.runs.arrival_log import scan_log
from paceline.runs.folder import TIME_IS_UP
from paceline.runs.result import is_far_above_default, lower_lr, staleness_summary
from paceline.settings.strategies import strategy_of
from paceline.system.terminal import counted

COLLAPSED = "collapsed"
TOLERANCE = 0.001
"""Part of the constant loss. A constant prediction is never below it, however its data is drawn."""
LEFT_CHANCE = 0.99
"""A mean training loss below this part of the constant loss has left it; single batches vary."""
STANDARD_ERRORS, MAX_NOISE = 3.0, 0.02
"""Noise of an accuracy, and the most of it with which predictions of several classes can be judged."""
ONE_CLASS = 1.0
"""Percent of a class that may be predicted otherwise if nearly all predictions are one class."""
ABOVE = 0.05
"""Part of the constant loss by which a loss is clearly above it."""
EXPLODED = 3.0
"""A mean training loss so many times that of the initial weights, or the constant one, comes from steps too long."""
FAR_EXPLODED = 100.0
"""The same, of runs without classes: without a constant prediction to compare with, one batch stands for the start."""
PEAK_PUSHES = 3
"""Pushes over which an explosion is a mean: it may pass within a window, and one batch alone may be a hard one."""
MIN_STEPS = 20
"""Optimizer steps, local ones counted, before a run is judged: with large batches an epoch may have fewer."""
MAX_WINDOWS = 50
RAISED = 10.0
"""Times which lr may have been too low, if the loss never left that of a constant prediction."""


@dataclass(frozen=True)
class LossCourse:
    """The training loss of a run, as means over windows of consecutive pushes."""

    lowest: float
    last: float
    noise: float  # standard error of a window's mean, from the differences of consecutive losses
    falls: bool = False  # whether the last third is below the first, by more than noise
    first: float = math.nan  # that of the first push, by the initial weights
    highest: float = math.nan  # mean of consecutive pushes, fewer than a window has

    @staticmethod
    def of(losses: Sequence[float]) -> LossCourse | None:
        """Return the course of these losses; None if there are none that are finite.

        >>> LossCourse.of([2.0, 2.0] * 50 + [1.0, 1.0] * 50)
        LossCourse(lowest=1.0, last=1.0, noise=0.025, falls=True, first=2.0, highest=2.0)
        """
        found = [loss for loss in losses if math.isfinite(loss)]
        if not found:
            return None
        width = -(-len(found) // MAX_WINDOWS)
        means = [statistics.fmean(found[at : at + width]) for at in range(0, len(found), width)]
        squares = sum((later - earlier) ** 2 for earlier, later in itertools.pairwise(found))
        noise = math.sqrt(squares / (2 * len(found) * width))
        third = max(1, len(means) // 3)
        drop = statistics.fmean(means[:third]) - statistics.fmean(means[-third:])
        falls = drop > STANDARD_ERRORS * noise * math.sqrt(2 / third)
        few = min(PEAK_PUSHES, len(found))
        highest = max(statistics.fmean(found[at : at + few]) for at in range(len(found) - few + 1))
        return LossCourse(min(means), means[-1], noise, falls, found[0], highest)

    def has_exploded(self, constant: float | None) -> bool:
        """Whether the loss rose far above that of the initial weights, and above the constant one if there is one."""
        if constant is None:
            return 0.0 < FAR_EXPLODED * self.first < self.highest
        return self.highest > EXPLODED * max(self.first, abs(constant))


def logged_losses(path: Path, config: RunConfig) -> list[float]:
    """Return the losses of the pushes that count, in the order of the log."""
    records = scan_log(path, config).effective_records
    return [one.loss for one in records if one.kind == "push" and one.disposition == Disposition.TAKEN]


def _num_steps(server: Server) -> int:
    return server.version * (server.inside.steps if server.inside is not None else 1)


def why_untrained(config: RunConfig, server: Server) -> str | None:
    """Say that every push of a finished run was zero, and the likely cause.

    None if a push was not zero, if pushes were not measured, or after too few steps to tell.
    """
    if server.guard is None or _num_steps(server) < MIN_STEPS:
        return None  # without a guard no push is measured, but those of a log before a resume
    if not all(one.norms.are_all_zero for one in server.by_optimizer):
        return None
    what = f"training collapsed: every push in {counted(server.version, 'update')} was 0, so nothing was trained"
    instead = "call loss.backward() between zero_grad() and step()" if is_script(config) else "check the task's loss"
    return f"{what}: {instead}, and give a learning rate above 0"


def why_collapsed(
    config: RunConfig,
    server: Server,
    stop_reason: str | None,
    scores: dict[str, Scores | None],
    losses: Callable[[], Sequence[float]],
) -> str | None:
    """Say that a finished run learned nothing, and what to try; None if it learned something or nobody can tell.

    Its loss on the train data is that of a constant prediction or above, and either it predicts one class only, or its
    accuracy is within noise of that of the most frequent class, or its training loss never left the constant one.
    Without scores of the train data, the training loss must also have ended there: on other data, overfitted weights
    score the same. Runs of less than an epoch or of a few steps are not judged, nor those that were stopped, or that
    reached their target, nor those whose training loss still falls towards the constant one from above. A run
    whose loss exploded needs no epoch to be judged. One without classes has collapsed if its loss exploded and ended
    far above that of its first push.
    """
    if _num_steps(server) < MIN_STEPS or stop_reason not in (None, TIME_IS_UP):
        return None
    part = next((part for part in ("train", "validation", "test") if scores.get(part) is not None), None)
    found = scores[part] if part is not None else None
    if part is None or found is None or (found.per_class and found.constant_correct == found.total):
        return None
    what = f"training collapsed: after {counted(server.samples, 'sample')} the weights score"
    constant = found.constant_loss
    if constant is None:
        course = LossCourse.of(losses())
        if course is None or not (course.has_exploded(None) and found.loss > FAR_EXPLODED * course.first):
            return None
        what = f"{what} a loss of {found.loss:.4g} on the {part} data"
        return f"{what}. {_course(course, None)}{_advice(config, server, 0.1)}"
    if found.loss < constant - TOLERANCE * abs(constant):
        return None
    course, left = LossCourse.of(losses()), constant - (1.0 - LEFT_CHANCE) * abs(constant)
    never_left = course is not None and not course.lowest < left
    is_above = found.loss > constant + ABOVE * abs(constant)
    has_exploded = course is not None and course.has_exploded(constant)
    if server.samples < server.budget.epoch_samples and not has_exploded:
        return None
    if course is not None and never_left and course.falls and is_above and not has_exploded:
        return None  # it comes down from above, as with few samples of a class or a low lr, and has not arrived yet
    share = found.constant_correct / found.total
    noise = STANDARD_ERRORS * math.sqrt(share * (1.0 - share) / found.total)
    is_constant = _is_one_class(found.per_class)
    is_chance = noise <= MAX_NOISE and (never_left or found.correct / found.total <= share + noise)
    if not (is_constant or is_chance) or (part != "train" and (course is None or course.last < left)):
        return None
    what = (
        f"{what} {found.accuracy:.2f} % on the {part} data with a loss of {found.loss:.4f}; always predicting the "
        f"class frequencies scores {100 * share:.2f} % with {constant:.4f}"
    )
    may_be_too_low = never_left and (is_above or not is_constant) and not is_far_above_default(config, RAISED)
    factor = 0.1 if has_exploded else RAISED if may_be_too_low else 0.5
    return f"{what}. {_course(course, constant)}{_advice(config, server, factor)}"


def _is_one_class(per_class: Sequence[float | None]) -> bool:
    """Whether nearly all predictions are one class, by the accuracy of each class in percent.

    >>> _is_one_class([0.0, 99.5, None, 0.2]), _is_one_class([10.0, 90.0]), _is_one_class([0.0, 0.0])
    (True, False, False)
    """
    *others, top = sorted(value for value in per_class if value is not None) or [0.0]
    return top >= 100.0 - ONE_CLASS and max(others, default=0.0) <= ONE_CLASS


def _course(course: LossCourse | None, constant: float | None) -> str:
    if course is None:
        return ""
    if constant is None or course.has_exploded(constant):
        return f"The training loss rose from {course.first:.4g} to {course.highest:.4g}: "
    left = constant - max((1.0 - LEFT_CHANCE) * abs(constant), STANDARD_ERRORS * course.noise)
    if not course.lowest < left:
        return "The training loss never left that level: "
    if course.last < left:
        where = "the averaged weights or the running statistics do not fit"
        return f"The training loss was {course.last:.4f} at the end, so {where}: "
    return f"The training loss had fallen to {course.lowest:.4f} and came back: "


def _advice(config: RunConfig, server: Server, factor: float) -> str:
    """What to change: the learning rate by `factor`, and what else helps in that direction."""
    lr = config.lr or 0.0
    if factor > 1.0:
        return f"try --lr {factor * lr:g} (now {lr:g}) or more --epochs"
    ways = [lower_lr(config, factor)]
    if is_far_above_default(config):
        return f"try {ways[0]}"  # nothing else helps there
    if not config.warmup:
        ways.append("--warmup 0.05")
    if strategy_of(config).is_stale and server.num_workers > 1:
        stale = staleness_summary(server.staleness)["mean"]
        ways.append(f"fewer --workers (now {server.num_workers}, staleness {stale:.1f} on average)")
        if config.rule == "plain":
            ways.append("--rule auto, which allows for staleness")
    if config.outer_lr is not None:
        ways.append(f"--outer-lr {config.outer_lr / 2:g} (now {config.outer_lr:g})")
    return f"try {', '.join(ways[:-1])}{' or ' if len(ways) > 1 else ''}{ways[-1]}"
