"""Settings to objects. Importing this file imports no torch, so mistakes are found at once."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.config import RunConfig, max_workers_of
from paceline.core.schedules import Budget, InnerLoop, Schedule, Training
from paceline.settings.resolve import MODELS, lr_scale, schedule_of
from paceline.settings.rules import build_rule, rule_of, trim_of, warmup_of
from paceline.settings.strategies import Waiting, strategy_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.core.optimizers import GradientTransform, Optimizer
    from paceline.core.server import TrimmedMean
    from paceline.interfaces import Layout, Policy, Rule


def make_policy(config: RunConfig) -> Policy:
    """The reply policy of the config's strategy."""
    from paceline.core.policies import Async, Barrier, DropStale, StaleSynchronous

    strategy, rule = strategy_of(config), rule_of(config)
    match strategy.waiting:
        case Waiting.BARRIER:
            return Barrier(strategy.num_backup, config.max_workers is not None, config.workers or 0)
        case Waiting.BOUNDED:
            return StaleSynchronous(strategy.max_lead)
    return DropStale(rule.number) if rule.traits.drops else Async()


def make_training(config: RunConfig, budget: Budget) -> Training:
    """How long training lasts, the learning rate of its updates, and its local steps, if any.

    The rate of a drift is the outer one, and constant; that of the local steps has the schedule.
    """
    form, strategy = schedule_of(config), strategy_of(config)
    updates = math.inf if not budget.is_known else float(budget.steps or budget.samples / config.batch_size)
    passes = config.epochs if config.epoch_mode == "own" else None
    base = (config.lr or 0.0) * lr_scale(config)
    schedule = Schedule(base, form.kind, form.factor, warmup_of(config, updates), passes, form.milestones)
    if not strategy.is_local:
        return Training(budget, schedule)
    outer = Schedule(config.outer_lr if config.outer_lr is not None else 1.0)
    return Training(budget, outer, InnerLoop(strategy.local_steps, schedule))


def make_rule(
    config: RunConfig,
    layout: Layout,
    max_workers: int | None = None,
    skew: float | None = None,
    optimizer: Callable[[], Optimizer] | None = None,
    grouped: Callable[[Rule], Rule] | None = None,
) -> Rule:
    """The update rule; if it keeps a row for each worker, for `max_workers` of them (default: the config's).

    A user's own loop brings its `optimizer`, and wraps a rule with momentum of its own by `grouped`.
    """

    def prepared() -> GradientTransform:
        from paceline.core.optimizers import GradientTransform

        return GradientTransform(config.weight_decay, config.clip, _decay_mask(layout) if config.weight_decay else None)

    places = max_workers or max_workers_of(config)
    return build_rule(config, places, optimizer or (lambda: make_optimizer(config, layout)), prepared, skew, grouped)


def make_aggregate(config: RunConfig) -> TrimmedMean | None:
    """How the pushes of a round are combined; None: their mean."""
    from paceline.core.server import TrimmedMean

    trim = trim_of(config)
    return None if trim == 0 else TrimmedMean(trim)


def make_optimizer(config: RunConfig, layout: Layout) -> Optimizer:
    """The optimizer that gradients are stepped with."""
    from paceline.core.muon import Muon
    from paceline.core.optimizers import Adam, AdamW, Lars, RmsProp, Sgd

    decay, clip, mask = config.weight_decay, config.clip, _decay_mask(layout) if config.weight_decay else None
    beta1, beta2 = config.betas
    if config.optimizer in ("adam", "adamw"):
        kind = Adam if config.optimizer == "adam" else AdamW
        return kind((beta1, beta2), weight_decay=decay, clip=clip, decay_mask=mask)
    if config.optimizer == "rmsprop":
        return RmsProp(config.momentum, weight_decay=decay, clip=clip, decay_mask=mask)
    if config.optimizer == "muon":
        return Muon(layout, config.momentum, (beta1, beta2), weight_decay=decay, clip=clip, decay_mask=mask)
    if config.optimizer == "lars":
        return Lars(layout, config.momentum, weight_decay=decay, clip=clip, decay_mask=mask)
    return Sgd(config.momentum, nesterov=config.nesterov, weight_decay=decay, clip=clip, decay_mask=mask)


def _decay_mask(layout: Layout) -> Tensor | None:
    """Ones for parameters with weight decay, zeros for the others; None if all have it."""
    import torch

    if all(parameter.decay for parameter in layout.parameters):
        return None
    mask = torch.zeros(layout.size)
    views = layout.views(mask)
    for parameter in layout.parameters:
        views[parameter.name].fill_(float(parameter.decay))
    return mask


def make_model(name: str, input_shape: tuple[int, ...], num_classes: int = 10) -> nn.Module:
    """A built-in model for images of `input_shape` (channels, height, width), or sentences of (length,)."""
    module, _, attribute = MODELS[name].partition(":")
    model: nn.Module = getattr(importlib.import_module(module), attribute)(input_shape, num_classes)
    return model
