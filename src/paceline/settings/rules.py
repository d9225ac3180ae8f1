"""The rules by name: what each can be combined with, and how to build it. Importing this imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, cast

from paceline.config import RunConfig, is_script, max_workers_of
from paceline.errors import UserError
from paceline.settings.features import Feature
from paceline.settings.notation import name_and_argument, whole_number
from paceline.settings.preprocessing import split_of
from paceline.settings.strategies import require_feature, strategy_of

if TYPE_CHECKING:
    from paceline.core.optimizers import GradientTransform, Optimizer, RoundOptimizer
    from paceline.interfaces import Rule

SKEWED = 0.3  # from this distance on, the labels of workers count as skewed
MAX_AT_FULL_STEP = 10  # workers up to which a step that is not measured keeps its length
MAX_WARMUP, WARMUP_OF_MANY = 0.1, 1.6  # a tenth of the run; many workers have few rounds, and warm up for fewer
GROWING = 40.0  # updates over which steps that do not shrink with the gradient grow, for each other worker
MAX_GROWING = 0.2  # of the run
AUTOMATIC = ("auto", "auto-counted")
EVENLY, IN_SHARES, WHOLE = "data divided evenly", "data divided by --shard-weights", "all data at each"
"""How data is divided by a split that does not look at labels."""


@dataclass(frozen=True)
class RuleChoice:
    """The rule that `auto` chose, and from how many workers on its steps are shortened (0: by no count of workers)."""

    rule: str
    most: int
    why: str
    is_measured: bool = False  # whether steps are limited by what the server measures (`StepLimit`)

    def step(self, workers: int) -> float:
        """The factor of the learning rate."""
        return min(1.0, self.most / workers) if self.most else 1.0

    def warmup(self, workers: int) -> float | None:
        """The share of the run over which lr grows, if the user gives none: networks are sharpest when they start."""
        return min(MAX_WARMUP, WARMUP_OF_MANY / workers) if self.is_measured else None

    def line(self, workers: int) -> str:
        """The line that tells the user."""
        shorter = f", steps x {self.step(workers):.2g}" if self.step(workers) < 1.0 else ""
        measured = ", steps shortened where the loss is sharply curved" if self.is_measured else ""
        return f"rule auto: {self.rule}{shorter} ({self.why}){measured}"


def choose(
    workers: int, skew: float | None, optimizer: str, is_measured: bool = True, data: str | None = None
) -> RuleChoice:
    """Choose a rule by the number of workers, the skew of their labels (None: unknown) and the optimizer.

    `data` says how the data is divided if labels play no part in that: targets need not be labels.

    Measured on a validation split of Fashion-MNIST (docs/rules-evidence.md): foresight is best or level with the best
    at the user's lr and momentum. If labels are skewed, foresight-fair makes the data of slow workers count as much as
    that of fast ones. Both step with any built-in optimizer; with plain SGD they limit their steps by what they
    measure, if `is_measured`. The optimizer of the user's own loop keeps its decays: `ahead` tries a step of it, and
    skewed labels need the cached gradients of `cached`.

    >>> [choose(workers, 0.9, optimizer).rule for workers, optimizer in ((10, "adam"), (1, "sgd"), (4, "script"))]
    ['foresight-fair', 'plain', 'cached']
    >>> choose(30, 0.0, "sgd").line(30)
    'rule auto: foresight (30 workers, labels spread evenly), steps shortened where the loss is sharply curved'
    >>> choose(30, 0.0, "sgd", is_measured=False, data="data divided evenly").line(30)
    'rule auto: foresight, steps x 0.33 (30 workers, data divided evenly)'
    """
    if workers == 1:
        return RuleChoice("plain", 0, "one worker: nothing is stale")
    skewed = skew is None or skew >= SKEWED
    spread = "unknown" if skew is None else f"{skew:.0%} from the whole" if skewed else "spread evenly"
    why = f"{workers} workers, {data or f'labels {spread}'}"
    if optimizer == "script":
        return RuleChoice("cached" if skewed else "ahead", MAX_AT_FULL_STEP, f"{why}, {optimizer} inside")
    is_sgd = optimizer == "sgd"
    is_limited, why = is_measured and is_sgd, why if is_sgd else f"{why}, {optimizer} inside"
    rule = "foresight-fair" if skewed else "foresight"
    return RuleChoice(rule, 0 if is_limited else MAX_AT_FULL_STEP, why, is_limited)


PUBLISHED = ("plain", "plain-early")  # rules of published systems, which evaluate the live weights


@dataclass(frozen=True)
class RuleTraits:
    """What is known of a rule before it is built."""

    text: str
    letter: str = ""  # stands for the number behind the colon
    knows_workers: bool = False  # keeps a row for each worker, so it cannot step on the mean of a round
    steps_itself: bool = False  # brings its own momentum, so it takes no other optimizer
    around_others: bool = False  # another form of it steps with any other built-in optimizer
    drops: bool = False
    sends_others: bool = False  # sends workers other weights than the live ones
    for_drifts: bool = False  # steps on the drifts of local steps only


_look_ahead = partial(RuleTraits, knows_workers=True, steps_itself=True, sends_others=True)
RULES = {
    "auto": RuleTraits("chosen for the workers, their labels and the optimizer", knows_workers=True, sends_others=True),
    "auto-counted": RuleTraits(
        "auto, steps shortened by the number of workers, for several servers", knows_workers=True, sends_others=True
    ),
    "plain": RuleTraits("one shared optimizer stepped on each push"),
    "plain-early": RuleTraits("plain, answered before the push is applied", sends_others=True),
    "damped": RuleTraits("lr / staleness"),
    "gap": RuleTraits("each coordinate divided by how far it has moved since", knows_workers=True),
    "compensated": RuleTraits("stale gradients carried to the newest weights", knows_workers=True),
    "dana": _look_ahead("each worker's momentum, and a look ahead by all of it"),
    "dana-slim": RuleTraits("each worker's momentum, applied ahead", knows_workers=True, steps_itself=True),
    "cached": RuleTraits("the mean of the latest gradients of all workers", knows_workers=True),
    "ringleader": RuleTraits("one step for each worker a round", knows_workers=True, steps_itself=True),
    "ringmaster": RuleTraits("plain, pushes of staleness R and more dropped: ringmaster:R", letter="R", drops=True),
    "buffered": RuleTraits("one step for every K pushes: buffered:K", letter="K", steps_itself=True),
    "delayed": RuleTraits("drifts as they come, momentum once a round", steps_itself=True, for_drifts=True),
    "ahead": RuleTraits("steps of two pushes, and weights after a step that is only tried", sends_others=True),
    "foresight-cached": _look_ahead("cached, and weights of the time a push counts"),
    "foresight": _look_ahead("the newest gradient, and weights of the time a push counts", around_others=True),
    "foresight-fair": _look_ahead("foresight, every worker's data counting alike", around_others=True),
}


class NamedRule(NamedTuple):
    """A rule as the user names it, and the number behind its colon."""

    name: str
    number: int

    @property
    def traits(self) -> RuleTraits:
        return RULES[self.name]


@cache
def _parse(text: str) -> NamedRule:
    if text in RULES and not RULES[text].letter:
        return NamedRule(text, 0)
    name, argument = name_and_argument("rule", text, {name: traits.letter for name, traits in RULES.items()})
    return NamedRule(name, whole_number("rule", text, argument, 1))


def rule_of(source: RunConfig | str) -> NamedRule:
    """The rule of a config or of its text, parsed once.

    >>> rule_of("buffered:4")
    NamedRule(name='buffered', number=4)
    """
    return _parse(source if isinstance(source, str) else source.rule)


def check_rule(config: RunConfig) -> None:
    """Refuse a rule that the chosen strategy or optimizer cannot be combined with, naming both."""
    name, traits, asked = rule_of(config).name, rule_of(config).traits, f"--rule {config.rule}"
    if traits.for_drifts:
        require_feature(config, Feature.DRIFT_RULE, asked)
    elif name != strategy_of(config).kind.default_rule:
        require_feature(config, Feature.GRADIENT_RULE, asked)
    if traits.knows_workers:
        require_feature(config, Feature.WORKER_RULE, asked)
    if traits.drops:
        require_feature(config, Feature.DROPPING_RULE, asked)
    if not traits.steps_itself or strategy_of(config).is_local or steps_with_another(config):
        return
    if config.optimizer != "sgd":
        instead = "cached" if config.optimizer == "script" else "foresight"
        raise UserError(
            f"rule {config.rule} brings its own momentum, which optimizer {config.optimizer} cannot replace: "
            f"use --optimizer sgd, or --rule {instead} with {config.optimizer}"
        )
    if config.nesterov:
        raise UserError(f"rule {config.rule} has its own momentum, and --nesterov another: leave out one of the two")


def steps_with_another(config: RunConfig) -> bool:
    """Whether a look-ahead rule steps with a built-in optimizer other than classical momentum, and keeps no rows."""
    is_another = config.nesterov or config.optimizer not in ("sgd", "script")
    return is_another and rule_of(config).traits.around_others


def warmup_of(config: RunConfig, updates: float) -> float:
    """The share of a run of so many updates over which its lr grows: the user's, or what the rule needs.

    Under a look-ahead rule, the first steps of Adam move all coordinates together, and overshoot if they are stale.

    >>> adam = RunConfig(workers=8, optimizer="adam", split="iid")
    >>> [round(warmup_of(adam, updates), 3) for updates in (500, 2800, 28_000)]
    [0.2, 0.1, 0.01]
    >>> warmup_of(replace(adam, warmup=0.0), 500), warmup_of(replace(adam, optimizer="sgd"), 500)
    (0.0, 0.0)
    """
    if config.warmup is not None:
        return config.warmup
    if config.rule in AUTOMATIC:
        config = replace(config, rule=chosen(config, None).rule)
    if config.nesterov or strategy_of(config).is_local or not steps_with_another(config):
        return 0.0
    return min(MAX_GROWING, GROWING * (num_workers(config) - 1) / max(1.0, updates))


def num_workers(config: RunConfig) -> int:
    """The workers that a run begins with; one that others may join counts as two."""
    return max(config.workers or 1, min(max_workers_of(config), 2))


def average_horizon(config: RunConfig) -> float | None:
    """The horizon of the running mean of weights, in updates: None without averaging, inf for a growing horizon.

    `auto` averages if pushes are applied one by one, unless the rule is a published one or the loop is the user's own,
    which computes its figures on the live weights.
    """
    if config.average in (None, "auto"):
        is_usual = strategy_of(config).is_stale and config.rule not in PUBLISHED and not is_script(config)
        return math.inf if is_usual else None
    if config.average in ("none", "on"):
        return math.inf if config.average == "on" else None
    try:
        horizon = float(config.average or "")
    except ValueError:
        horizon = 0.0
    if not 1.0 <= horizon < math.inf:
        raise UserError(f"--average '{config.average}': give auto, none, on or a number of updates, at least 1")
    return horizon


def average_in_words(config: RunConfig) -> str:
    """The averaging of a run in one word: none, on or the horizon."""
    horizon = average_horizon(config)
    return "none" if horizon is None else "on" if math.isinf(horizon) else f"{horizon:g}"


def rows_nbytes(config: RunConfig, num_floats: int) -> int:
    """Bytes that the per-worker rows of the rule take on the server."""
    keeps_rows = rule_of(config).traits.knows_workers and not steps_with_another(config)
    return 4 * num_floats * max_workers_of(config) if keeps_rows else 0


def chosen(config: RunConfig, skew: float | None) -> RuleChoice:
    """The rule that `auto` chooses for this run.

    `skew` is that of the work assignment. A split that does not look at labels has none, whatever is known of them.

    >>> [chosen(RunConfig(workers=4, split=split), None).rule for split in ("iid", "full", "labels")]
    ['foresight', 'foresight', 'foresight-fair']
    >>> chosen(RunConfig(workers=4, split="iid"), 0.0).why
    '4 workers, data divided evenly'
    """
    data = {"iid": IN_SHARES if config.shard_weights else EVENLY, "full": WHOLE}.get(split_of(config).kind)
    skew = 0.0 if data is not None else skew
    return choose(
        num_workers(config),
        skew,
        "nesterov" if config.nesterov else config.optimizer,
        config.rule != "auto-counted",
        data,
    )


def build_rule(
    config: RunConfig,
    max_workers: int,
    optimizer: Callable[[], Optimizer],
    prepared: Callable[[], GradientTransform],
    skew: float | None = None,
    grouped: Callable[[Rule], Rule] | None = None,
    is_limited: bool = False,
) -> Rule:
    """Build the rule of a config, with rows for `max_workers` workers and, if asked for, averaged weights.

    `grouped` wraps a rule with momentum of its own, which does not know parameter groups. `is_limited` gives a
    foresight rule a step limit.
    """
    from paceline.core.rules.averaged import Averaged

    rule: Rule
    if config.rule in AUTOMATIC:
        from paceline.core.rules.step_limit import LrScaling

        choice = chosen(config, skew)
        inner = replace(config, rule=choice.rule, average="none")
        rule = build_rule(inner, max_workers, optimizer, prepared, grouped=grouped, is_limited=choice.is_measured)
        rule = LrScaling(rule, choice.most) if choice.most else rule
    elif strategy_of(config).is_local or rule_of(config).traits.for_drifts:
        rule = _on_drifts(config)
    elif rule_of(config).traits.steps_itself and not steps_with_another(config):
        rule = _stepping_itself(config, max_workers, prepared(), is_limited)
        rule = grouped(rule) if grouped is not None else rule
    else:
        rule = _around(config, max_workers, optimizer)
    horizon = average_horizon(config)
    return rule if horizon is None else Averaged(rule, horizon if math.isfinite(horizon) else None)


def _on_drifts(config: RunConfig) -> Rule:
    from paceline.core.optimizers import Sgd
    from paceline.core.rules.buffered import Delayed, OuterMomentum
    from paceline.core.rules.plain import Plain

    momentum, warmup = config.outer_momentum or 0.0, config.outer_warmup or 0
    if config.rule == "delayed":
        return Delayed(momentum, warmup)
    return OuterMomentum(momentum, warmup) if warmup else Plain(Sgd(momentum, nesterov=True))


def _around(config: RunConfig, max_workers: int, make_optimizer: Callable[[], Optimizer]) -> Rule:
    from paceline.core.rules.cached import Cached
    from paceline.core.rules.foresight import Ahead
    from paceline.core.rules.plain import Plain, ReplyBeforeApply
    from paceline.core.rules.staleness_aware import Compensated, Damped, Gap
    from paceline.core.rules.step_foresight import StepForesight

    optimizer = make_optimizer()

    def look_ahead(fair: bool) -> Rule:
        known = cast("RoundOptimizer", optimizer)  # `check_rule` has refused those of own loops
        if config.nesterov:
            return StepForesight(known, max_workers, fair, holds_back=False)  # its steps do shrink
        return StepForesight(known, max_workers, fair)

    rules: dict[str, Callable[[], Rule]] = {
        "plain": lambda: Plain(optimizer),
        "plain-early": lambda: ReplyBeforeApply(optimizer),
        "ringmaster": lambda: Plain(optimizer),  # its policy drops stale pushes
        "damped": lambda: Damped(optimizer),
        "gap": lambda: Gap(optimizer, max_workers),
        "compensated": lambda: Compensated(optimizer, max_workers),
        "cached": lambda: Cached(optimizer, max_workers),
        "ahead": lambda: Ahead(optimizer, make_optimizer(), max_workers),
        "foresight": partial(look_ahead, fair=False),
        "foresight-fair": partial(look_ahead, fair=True),
    }
    return rules[rule_of(config).name]()


def _stepping_itself(config: RunConfig, max_workers: int, prepared: GradientTransform, is_limited: bool) -> Rule:
    from paceline.core.rules.buffered import Buffered
    from paceline.core.rules.dana import Dana, DanaSlim
    from paceline.core.rules.foresight import Foresight, ForesightCached, ForesightFair
    from paceline.core.rules.ringleader import Ringleader
    from paceline.core.rules.step_limit import LIMITED_HORIZON, StepLimit

    name, number = rule_of(config)
    if name == "buffered":
        return Buffered(number, config.momentum, prepared)
    rules: dict[str, Callable[[float, int, GradientTransform], Rule]] = {
        "dana": Dana,
        "dana-slim": DanaSlim,
        "ringleader": Ringleader,
    }
    foresight: dict[str, type[ForesightCached]] = {
        "foresight-cached": ForesightCached,
        "foresight": Foresight,
        "foresight-fair": ForesightFair,
    }
    if name in foresight:
        if is_limited:
            return foresight[name](
                config.momentum, max_workers, prepared, LIMITED_HORIZON, limit=StepLimit(max_workers)
            )
        return foresight[name](config.momentum, max_workers, prepared)
    return rules[name](config.momentum, max_workers, prepared)


def trim_of(config: RunConfig) -> int | None:
    """How many of the lowest and the highest values of a round `--aggregate` leaves out: K, 0, or None for a median."""
    letters = {"mean": "", "median": "", "trimmed": "K"}
    name, argument = name_and_argument("aggregate", config.aggregate or "mean", letters)
    if name == "trimmed":
        return whole_number("aggregate", config.aggregate or "", argument, 1)
    return None if name == "median" else 0


def check_aggregate(config: RunConfig, workers: int) -> None:
    """Refuse a way to combine pushes that the strategy does not have, or that leaves no push."""
    trim, asked = trim_of(config), f"--aggregate {config.aggregate}"
    if trim == 0:
        return
    require_feature(config, Feature.AGGREGATE, asked)
    pushes = strategy_of(config).pushes_per_update(workers)
    if trim is not None and 2 * trim >= pushes:
        what = f"a round of --strategy {config.strategy} with {workers} workers has {pushes} pushes"
        raise UserError(f"{asked}: {what}, and {2 * trim} are left out; use more than {2 * trim}, or a lower K")
