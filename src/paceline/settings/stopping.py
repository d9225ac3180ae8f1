"""The goal that stops a run, and the metric that chooses its best weights: `--target mae<=0.2`, `--best min:mae`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.config import RunConfig, is_script
from paceline.errors import UserError, nearest_names

BUILT_IN_METRICS = ("loss", "accuracy")
"""What built-in models are scored by."""
_GOAL = re.compile(r"\s*([A-Za-z_]\w*)\s*(<=|>=|=<|=>|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class StoppingGoal:
    """A metric of an evaluation, or of a script's reports, and the value that it has to reach."""

    metric: str
    lower: bool  # whether a lower value is better
    value: float

    def is_met(self, value: float | None) -> bool:
        return value is not None and (value <= self.value if self.lower else value >= self.value)

    @property
    def reason(self) -> str:
        """The reason that the run ended, for the result."""
        if self.metric == "accuracy":
            return f"target accuracy {self.value:g} % reached"
        return f"target {self.metric} {'<=' if self.lower else '>='} {self.value:g} reached"


@dataclass(frozen=True)
class BestMetric:
    """The metric that chooses the best weights."""

    metric: str
    lower: bool

    @property
    def text(self) -> str:
        """As the user writes it."""
        return f"{'min' if self.lower else 'max'}:{self.metric}"


_LOWER = re.compile(r"loss|perplexity|ppl|error|mae|r?mse|mape|nll|wer|cer|fid|bpb|bpc|seconds")
_HIGHER = re.compile(
    r"accuracy|acc|acc[1-5]|top[1-5]|f1|auc|auroc|precision|recall|bleu|rouge|m?iou|m?ap|dice|psnr|ssim|r2"
)


def is_lower_better(metric: str) -> bool | None:
    """Whether lower values of a metric are better, by the words of its name; None if they do not tell.

    >>> is_lower_better("val_loss"), is_lower_better("accuracy"), is_lower_better("reward")
    (True, False, None)
    """
    words = metric.lower().split("_")
    found = {lower for word in words for lower, known in ((True, _LOWER), (False, _HIGHER)) if known.fullmatch(word)}
    return found.pop() if len(found) == 1 else None


@cache
def parse_goal(text: str) -> StoppingGoal:
    """Parse `METRIC<=VALUE` or `METRIC>=VALUE`, once for each text.

    >>> parse_goal("mae<=0.2")
    StoppingGoal(metric='mae', lower=True, value=0.2)
    """
    found = _GOAL.fullmatch(text)
    try:
        value = float(found[3]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not math.isfinite(value):
        how = f"write METRIC<=VALUE or METRIC>=VALUE in quotes, as in '{_example(text)}'"
        raise UserError(f"--target '{text}': {how}")
    return StoppingGoal(found[1], "<" in found[2], value)


def _example(text: str) -> str:
    """A goal that is written well: of one with a lone `=`, what it most likely means.

    >>> _example("accuracy=90"), _example("loss == .2"), _example("loss")
    ('accuracy>=90', 'loss<=.2', 'mae<=0.2')
    """
    metric, _, value = (part.strip() for part in text.replace("==", "=").partition("="))
    is_near = metric.isidentifier() and re.fullmatch(r"[\d.]+", value) is not None
    return f"{metric}{_direction(metric)}{value}" if is_near else "mae<=0.2"


def _direction(metric: str) -> str:
    return ">=" if is_lower_better(metric) is False else "<="


@cache
def parse_measure(text: str) -> BestMetric:
    """Parse `min:METRIC` or `max:METRIC`, once for each text.

    >>> parse_measure("max:f1")
    BestMetric(metric='f1', lower=False)
    """
    way, _, metric = text.partition(":")
    if way not in ("min", "max") or not metric.isidentifier():
        raise UserError(f"--best '{text}': write min:METRIC or max:METRIC, as in min:mae")
    return BestMetric(metric, way == "min")


def goal_of(config: RunConfig) -> StoppingGoal | None:
    """The goal of a run, if it has one."""
    if config.target is not None:
        return parse_goal(config.target)
    return StoppingGoal("accuracy", False, config.target_accuracy) if config.target_accuracy is not None else None


def measure_of(config: RunConfig) -> BestMetric | None:
    """The metric that chooses the best weights of a run; None: accuracy, else loss."""
    if config.best is not None:
        return parse_measure(config.best)
    goal = goal_of(config) if config.target is not None else None
    return BestMetric(goal.metric, goal.lower) if goal is not None else None


def chosen_part(config: RunConfig) -> str:
    """The data that evaluations score, and so choose by: what is held out of the train set, else the test data."""
    return "validation" if config.validation or config.fold is not None else "test"


def check_goals(config: RunConfig, in_script: bool) -> None:
    """Check goals as far as it is possible without the task."""
    if config.target is not None and config.target_accuracy is not None:
        raise UserError("--target and --target-accuracy both end the run: leave one out")
    asked = {"target-accuracy": config.target_accuracy, "target": config.target, "best": config.best}
    goal_of(config), measure_of(config)
    for flag, value in asked.items():
        if value is not None and config.eval_every is None and not in_script:
            raise UserError(f"--{flag} is checked at evaluations only: add --eval-every, as in --eval-every 1")


def why_missed(config: RunConfig, result: Mapping[str, Any]) -> str | None:
    """Say that a finished run did not reach its target, and what the metric was; None if it did or has none."""
    goal = goal_of(config)
    if goal is None or result["status"] != "finished" or result["reason"] == goal.reason:
        return None
    asked = goal.reason.removesuffix(" reached")
    if is_script(config):
        reported = result.get("metrics") or {}
        if goal.metric not in reported:
            found = f"reported were {', '.join(sorted(reported))}" if reported else "session.report(...) does that"
            return f"{asked} was never checked, as no worker reported {goal.metric}: {found}"
        last = reported[goal.metric]
    else:
        part = chosen_part(config)
        last = (result.get(f"{part}_metrics") or {}).get(goal.metric, result.get(f"{part}_{goal.metric}"))
    if goal.is_met(last):
        return None
    return f"{asked} was not reached" + (f": at the end it was {last:.4g}" if last is not None else "")


def require_measured(config: RunConfig, known: Iterable[str], has_test: bool) -> None:
    """Check that the task measures the metrics of the goal and of the best weights on data to choose by."""
    goal, measure = goal_of(config), measure_of(config)
    has_test = has_test or chosen_part(config) != "test"
    if goal is not None:
        asked = f"--target '{config.target}'" if config.target is not None else f"--target-accuracy {goal.value:g}"
        _require(asked, goal.metric, tuple(known), has_test)
    if config.best is not None and measure is not None:
        _require(f"--best {config.best}", measure.metric, tuple(known), has_test)


def _require(asked: str, metric: str, known: tuple[str, ...], has_test: bool) -> None:
    if not has_test:
        what = "this task has no test data to measure it on"
        raise UserError(f"{asked}: {what}; give it test=(inputs, targets), or hold out --validation 0.1")
    if metric not in known:
        why = ", as its targets are no class numbers" if metric == "accuracy" else ""
        meant = next(iter(nearest_names(metric, known)), known[-1])
        way = _direction(meant)
        best = f"--best {'max' if way == '>=' else 'min'}:{meant}"
        instead = f"--target '{meant}{way}VALUE'" if asked.startswith("--target") else best
        raise UserError(f"{asked}: this task has no {metric}{why}; it measures {', '.join(known)}, as in {instead}")
