"""Names to objects: the only tables. Importing this file imports no torch, so mistakes are found at once."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.codebook import parse_codec
from paceline.config import RunConfig, places_of
from paceline.core.schedules import Inside, Schedule
from paceline.data.datasets import DATASETS
from paceline.data.partition import parse_fold, parse_split
from paceline.delays import parse_delays
from paceline.errors import UserError, name_and_argument, unknown_name, whole_number
from paceline.goals import check_goals
from paceline.preparation import check_preparation, ways_of
from paceline.quantities import count
from paceline.rulebook import LOCAL, OUTER, build_rule, check_rule, parse_rule, rule_for
from paceline.tracking.names import check_tracker

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.core.optimizers import Optimizer, Prepared
    from paceline.interfaces import Layout, Policy, Rule

MODELS = {
    "lenet5": "paceline.models.lenet:LeNet5",
    "cnn": "paceline.models.cnn:Cnn",
    "resnet18": "paceline.models.resnet:resnet18",
    "resnet34": "paceline.models.resnet:resnet34",
    "resnet50": "paceline.models.resnet:resnet50",
    "resnet101": "paceline.models.resnet:resnet101",
    "resnet18-gn": "paceline.models.resnet:resnet18_gn",
    "resnet34-gn": "paceline.models.resnet:resnet34_gn",
    "resnet50-gn": "paceline.models.resnet:resnet50_gn",
    "resnet101-gn": "paceline.models.resnet:resnet101_gn",
    "inception-28-small": "paceline.models.inception:Inception28Small",
    "inception-bn": "paceline.models.inception:InceptionBN",
    "transformer": "paceline.models.transformer:Transformer",
}
TEXT_MODELS = ("transformer",)
"""Models that read token ids; the others look at images."""
STRATEGIES = {
    "classic": "one worker, no process",
    "sync": "replies when all have pushed",
    "async": "replies at once",
    "backup": "replies when all but B have pushed: backup:B",
    "bounded": "replies while within S steps of the slowest: bounded:S",
    "allreduce": "all exchange with all, in step",
    "local": "H steps each, then the mean of their drifts: local:H",
    "diloco": "H steps each, then Nesterov's momentum on the mean drift: diloco:H",
    "async-local": "H steps each, each drift applied at once, momentum once a round: async-local:H",
}
ARGUMENTS = {"backup": ("B", 1), "bounded": ("S", 0), **dict.fromkeys(LOCAL, ("H", 1))}
"""What stands behind a strategy's colon, and the least it can be."""
OPTIMIZERS = {"sgd": 0.005, "adam": 0.001, "adamw": 0.001, "lars": 1.0}
SCHEDULES = {"constant": None, "exponential": 0.9, "cosine": None}
EPOCH_MODES = ("shared", "own")
DEVICES = ("cpu", "cuda")
SCORES = ("all", "test", "none")
RECOVERIES = ("log", "checkpoint")
PRECISIONS = ("fp32", "bf16")
LOCAL_STEPS = ("even", "speed")
PATHS = ("star", "ring")
RINGS = ("allreduce", "local", "diloco")
"""Strategies that need no server."""
AUTO_WARMUP = 0.05


@dataclass(frozen=True)
class Strategy:
    """A strategy's name and the number behind its colon."""

    name: str
    number: int = 0

    @property
    def in_rounds(self) -> bool:
        """Whether several pushes make one update."""
        return self.name in ("sync", "backup", "allreduce", "local", "diloco")

    @property
    def is_local(self) -> bool:
        """Whether a worker pushes the drift of steps of its own."""
        return self.name in LOCAL

    @property
    def local_steps(self) -> int:
        """Steps a worker makes for one push."""
        return self.number if self.is_local else 1


def on_ring(config: RunConfig) -> bool:
    """Whether workers exchange with each other instead of with a server."""
    return config.path != "star" and parse_strategy(config.strategy).name in RINGS


def on_star(config: RunConfig) -> bool:
    """Whether workers exchange with a server, over a wire that codecs can relieve."""
    return not on_ring(config) and parse_strategy(config.strategy).name != "classic"


def keeps_own(config: RunConfig) -> bool:
    """Whether a worker's next push depends on earlier ones of its own: an optimizer inside local steps."""
    stateless = config.optimizer == "sgd" and not config.momentum
    return parse_strategy(config.strategy).is_local and not stateless


def require_gradients(config: RunConfig) -> None:
    """Refuse strategies whose workers step by themselves, where the user's own loop does the stepping."""
    if parse_strategy(config.strategy).is_local:
        raise UserError(
            f"strategy {config.strategy} steps inside its workers, and your own loop pushes gradients: "
            "use sync, async or bounded:S, or paceline.train with a task"
        )


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def parse_strategy(text: str) -> Strategy:
    """`sync`, `backup:1`, `bounded:3`; a clear error for anything else.

    >>> parse_strategy("bounded:3")
    Strategy(name='bounded', number=3)
    """
    letters = {name: ARGUMENTS[name][0] if name in ARGUMENTS else "" for name in STRATEGIES}
    name, argument = name_and_argument("strategy", text, letters)
    if name not in ARGUMENTS:
        return Strategy(name)
    return Strategy(name, whole_number("strategy", text, argument, ARGUMENTS[name][1]))


def parse_schedule(text: str) -> tuple[str, float]:
    """`constant`, `cosine`, `exponential` or `exponential:FACTOR`, as (kind, factor)."""
    kind, colon, argument = text.partition(":")
    if kind not in SCHEDULES:
        raise unknown_name("schedule", kind, SCHEDULES)
    if not colon:
        return kind, SCHEDULES[kind] or 1.0
    try:
        factor = float(argument)
    except ValueError:
        factor = 0.0
    if kind != "exponential" or not 0.0 < factor <= 1.0:
        raise UserError(f"schedule '{text}': only exponential takes a factor, above 0 and at most 1")
    return kind, factor


def lr_scale(config: RunConfig) -> float:
    """What the learning rate is multiplied by."""
    strategy = parse_strategy(config.strategy)
    if config.scale_lr == "none":
        return 1.0
    if config.scale_lr == "auto":
        return float(pushes_in_a_step(strategy, config.workers or 1))
    try:
        factor = float(config.scale_lr)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < float("inf"):
        raise UserError(f"--scale-lr '{config.scale_lr}': give none, auto or a positive factor")
    return factor


def pushes_per_update(strategy: Strategy, workers: int) -> int:
    """How many pushes make one update."""
    if not strategy.in_rounds:
        return 1
    return workers - strategy.number if strategy.name == "backup" else workers


def pushes_in_a_step(strategy: Strategy, workers: int) -> int:
    """Over how many pushes a step is averaged: under async-local, those of a round each count for their share."""
    return workers if strategy.name == "async-local" else pushes_per_update(strategy, workers)


def resolve(config: RunConfig, launched: bool = False) -> RunConfig:
    """Fill in what depends on other settings, and check every name and combination. Starts nothing.

    `launched` says that a launcher started this process, as one rank of several.
    """
    strategy = parse_strategy(config.strategy)
    config = dataclasses.replace(config, rule=rule_for(config))
    check_names(config)
    workers = config.workers or (1 if strategy.name == "classic" else 2)
    _check_combinations(config, strategy, workers)
    resolved = dataclasses.replace(
        config,
        workers=workers,
        codec=_codec(config, "codec", strategy, launched),
        pull_codec=_codec(config, "pull_codec", strategy),
        lr=config.lr if config.lr is not None else OPTIMIZERS[config.optimizer],
        threads=config.threads or max(1, cores() // workers),
        channels_last=_channels_last(config),
        augment=",".join(ways_of(config)) or "none",
        **_local_settings(config, strategy),
        task=_anchored(config.task),
        data_dir=os.path.abspath(config.data_dir) if config.data_dir is not None else None,  # noqa: PTH100
    )
    if lr_scale(resolved) > 1.0 and not resolved.warmup and resolved.scale_lr == "auto":
        resolved = dataclasses.replace(resolved, warmup=AUTO_WARMUP)
    return resolved


def _channels_last(config: RunConfig) -> bool:
    """As asked; else where tensor cores want it."""
    if config.channels_last is not None:
        return config.channels_last
    return config.device == "cuda" and config.precision == "bf16"


def _local_settings(config: RunConfig, strategy: Strategy) -> dict[str, Any]:
    """What local steps need to know, where the user has not said it."""
    found: dict[str, Any] = {}
    if strategy.is_local and config.local_steps is None:
        found["local_steps"] = "speed" if strategy.name == "async-local" else "even"
    if strategy.name in OUTER:
        lr, momentum = OUTER[strategy.name]
        found["outer_lr"] = config.outer_lr if config.outer_lr is not None else lr
        found["outer_momentum"] = config.outer_momentum if config.outer_momentum is not None else momentum
    return found


def _codec(config: RunConfig, setting: str, strategy: Strategy, launched: bool = False) -> str | None:
    """A codec that this run can use, or None for none."""
    text: str | None = getattr(config, setting)
    flag = f"--{setting.replace('_', '-')} {text}"
    if text is None or parse_codec(text)[0] == "none":
        return None
    if launched:
        return text
    if not on_star(config):
        alone = strategy.name == "classic" or setting == "pull_codec"
        where = "has none" if alone else "has one only between ranks, as torchrun starts them"
        star = ", or add --path star" if strategy.is_local else ""
        raise UserError(
            f"{flag} relieves a wire, and strategy {config.strategy} {where}: leave it out, or choose sync, backup, "
            f"async or bounded{star}"
        )
    if config.device != "cpu":
        raise UserError(f"{flag}: workers that share a GPU have no wire between them; leave out one of the two")
    if config.parameters is not None and parse_codec(text)[0] == "lowrank":
        raise UserError(f"{flag} needs the shapes of a model's matrices: give --model instead of --parameters")
    if config.parameters is not None and count(config.parameters) >= 1 << 31:
        raise UserError(f"{flag}: codecs take up to 2^31 parameters, --parameters {config.parameters} are more")
    return text


def refuse_codecs(config: RunConfig) -> None:
    """A script's own loop pushes gradients as they are."""
    asked = config.codec or config.pull_codec
    if asked is not None:
        raise UserError(
            f"codec {asked}: a loop of your own exchanges floats as they are; leave it out, or 'paceline train --task'"
        )


def refuse_newcomers(config: RunConfig) -> None:
    """A script's own loop keeps the data it began with."""
    if config.max_workers is not None:
        raise UserError(
            f"--max-workers {config.max_workers}: a loop of your own keeps its workers and their data; leave it out, "
            "or 'paceline train --task'"
        )


def _anchored(task: str | None) -> str | None:
    """A task in a file, by its whole path, so that the run can be replayed from anywhere."""
    if task is None or ".py:" not in task:
        return task
    file, _, name = task.rpartition(":")
    return f"{os.path.abspath(file)}:{name}"  # noqa: PTH100


def check_names(config: RunConfig) -> None:
    """Every setting that is a name out of a few must be one of them."""
    named: list[tuple[str, str, Iterable[str]]] = [
        ("optimizer", config.optimizer, OPTIMIZERS),
        ("epoch mode", config.epoch_mode, EPOCH_MODES),
        ("device", config.device, DEVICES),
        ("score", config.score, SCORES),
        ("recovery", config.recovery, RECOVERIES),
        ("precision", config.precision, PRECISIONS),
        ("local steps", config.local_steps or "even", LOCAL_STEPS),
        ("path", config.path or "star", PATHS),
    ]
    if config.task is None:
        named += [("model", config.model, MODELS), ("dataset", config.dataset, DATASETS)]
    for kind, asked, known in named:
        if asked not in known:
            raise unknown_name(kind, asked, known)
    if config.task is None:
        _check_model_fits(config)
    check_preparation(config)
    parse_split(config.split)
    if config.fold is not None:
        parse_fold(config.fold)
    parse_schedule(config.schedule)
    check_rule(config)
    for name in config.track or ():
        check_tracker(name)


def _check_model_fits(config: RunConfig) -> None:
    """A model of images on images, a model of text on text."""
    shape: tuple[int, ...] = DATASETS[config.dataset].image_shape
    if (config.model in TEXT_MODELS) != (len(shape) == 1):
        reads = "token ids" if config.model in TEXT_MODELS else "images"
        holds = "sentences" if len(shape) == 1 else f"images of {' x '.join(map(str, shape))}"
        fitting = [name for name in MODELS if (name in TEXT_MODELS) == (len(shape) == 1)]
        raise UserError(
            f"model {config.model} reads {reads}, and dataset {config.dataset} holds {holds}: "
            f"choose --model {' or '.join(fitting[:2])}, or another dataset"
        )


def _check_combinations(config: RunConfig, strategy: Strategy, workers: int) -> None:
    parse_delays(config.delay or [], config.max_workers or workers)
    _check_step(config)
    if config.max_workers is not None:
        _check_elastic(config, strategy, workers)
    if strategy.name == "classic" and workers != 1:
        raise UserError(f"strategy classic is one worker, got --workers {workers}: choose sync or async for more")
    if strategy.name == "backup" and strategy.number >= workers:
        raise UserError(
            f"strategy {config.strategy} with {workers} worker{'s' if workers > 1 else ''} leaves nobody to wait for: "
            f"use more than {strategy.number} workers"
        )
    check_goals(config, in_script=config.task is not None and config.task.startswith("script"))
    if config.eval_train and config.eval_every is None:
        raise UserError("--eval-train is for evaluations on the way: add --eval-every, as in --eval-every 1")
    if config.steps is not None and config.epoch_mode == "own":
        raise UserError("--steps counts updates of all workers together: leave out --epoch-mode own")
    if config.shard_weights is not None and len(config.shard_weights) != workers:
        raise UserError(f"--shard-weights gives {len(config.shard_weights)} weights for {workers} workers: one each")
    _check_local(config, strategy)
    if config.nesterov and not config.momentum:
        raise UserError("--nesterov needs a momentum above 0")
    if config.fold is not None and config.validation:
        raise UserError(f"--fold {config.fold} holds out a part already: leave out --validation")
    if config.fold is not None and config.eval_every is not None:
        raise UserError(f"--fold {config.fold} leaves the test set alone, which --eval-every scores: leave out one")


def _check_elastic(config: RunConfig, strategy: Strategy, workers: int) -> None:
    """Where workers cannot come and go."""
    asked = f"--max-workers {config.max_workers}"
    if config.max_workers is not None and config.max_workers < workers:
        raise UserError(f"{asked} is below --workers {workers}, who begin: give at least as many")
    if strategy.name == "classic" or on_ring(config):
        alone = "is one worker" if strategy.name == "classic" else "is a ring, which nobody joins"
        raise UserError(f"{asked}: strategy {config.strategy} {alone}; use sync, async or bounded, or leave it out")
    if config.epoch_mode == "own":
        raise UserError(f"{asked}: under --epoch-mode own everybody passes over data of its own; use shared")
    if config.shard_weights is not None:
        raise UserError(f"{asked}: --shard-weights are for workers that stay; leave out one of the two")
    if config.device != "cpu":
        raise UserError(f"{asked}: workers that share a GPU are one process, which nobody joins; leave out one")


def _check_step(config: RunConfig) -> None:
    """Settings of how a step is computed."""
    if config.accumulate > config.batch_size:
        raise UserError(
            f"--accumulate {config.accumulate} parts of a batch of {config.batch_size}: a part needs a sample at least"
        )
    if config.capture and config.device != "cuda":
        raise UserError(f"--capture is for a GPU, and --device is {config.device}: add --device cuda, or leave it out")
    if config.capture and on_ring(config):
        raise UserError(f"--capture: strategy {config.strategy} exchanges inside its step; leave out one of the two")


def _check_local(config: RunConfig, strategy: Strategy) -> None:
    """Settings that only strategies with local steps have, and paths that only some strategies can take."""
    if config.local_steps is not None and not strategy.is_local:
        raise UserError(
            f"--local-steps {config.local_steps}: strategy {config.strategy} has none; use local:H or its kin"
        )
    for name in ("outer_lr", "outer_momentum"):
        if getattr(config, name) is not None and strategy.name not in OUTER:
            flag, what = (
                name.replace("_", "-"),
                "takes the mean of drifts as it is" if strategy.is_local else "has no drifts",
            )
            raise UserError(f"--{flag} {getattr(config, name):g}: strategy {config.strategy} {what}; use diloco:H")
    if config.path == "ring" and strategy.name not in RINGS:
        raise UserError(f"--path ring: strategy {config.strategy} needs a server; use allreduce, local:H or diloco:H")
    if config.local_steps == "speed" and on_ring(config):
        raise UserError("--local-steps speed: a ring has nobody who compares speeds; add --path star")
    if config.path == "star" and strategy.name == "allreduce":
        raise UserError("--path star: allreduce is an exchange around a ring; over a star it is --strategy sync")


def make_policy(config: RunConfig) -> Policy:
    """The reply policy of the config's strategy."""
    from paceline.core.policies import AtOnce, Bounded, Fresh, Rounds

    strategy, (rule, number) = parse_strategy(config.strategy), parse_rule(config.rule)
    if strategy.in_rounds:
        spare = strategy.number if strategy.name == "backup" else 0
        return Rounds(spare, at_the_door=config.max_workers is not None)
    if strategy.name == "bounded":
        return Bounded(strategy.number)
    return Fresh(number) if rule == "ringmaster" else AtOnce()


def make_schedule(config: RunConfig) -> Schedule:
    """The learning rate of an update over the budget; that of a drift is the outer one, and constant."""
    if parse_strategy(config.strategy).is_local:
        return Schedule(config.outer_lr if config.outer_lr is not None else 1.0)
    return _schedule(config)


def make_inside(config: RunConfig) -> Inside | None:
    """What workers do between two pushes, under strategies with local steps."""
    strategy = parse_strategy(config.strategy)
    return Inside(strategy.number, _schedule(config)) if strategy.is_local else None


def _schedule(config: RunConfig) -> Schedule:
    """The learning rate that gradients are stepped with."""
    kind, factor = parse_schedule(config.schedule)
    return Schedule((config.lr or 0.0) * lr_scale(config), kind, factor, config.warmup)


def make_rule(config: RunConfig, layout: Layout, places: int | None = None, skew: float | None = None) -> Rule:
    """The update rule, with rows for `places` workers (the config's, unless said) where it keeps some."""

    def prepared() -> Prepared:
        from paceline.core.optimizers import Prepared

        return Prepared(config.weight_decay, config.clip, _decay_mask(layout) if config.weight_decay else None)

    return build_rule(config, places or places_of(config), lambda: make_optimizer(config, layout), prepared, skew)


def make_optimizer(config: RunConfig, layout: Layout) -> Optimizer:
    """The optimizer that gradients are stepped with."""
    from paceline.core.optimizers import Adam, AdamW, Lars, Sgd

    mask = _decay_mask(layout) if config.weight_decay else None
    optimizer: Optimizer
    if config.optimizer in ("adam", "adamw"):
        beta1, beta2 = config.betas
        kind = Adam if config.optimizer == "adam" else AdamW
        optimizer = kind((beta1, beta2), weight_decay=config.weight_decay, clip=config.clip, decay_mask=mask)
    elif config.optimizer == "lars":
        decay, clip = config.weight_decay, config.clip
        optimizer = Lars(layout, config.momentum, weight_decay=decay, clip=clip, decay_mask=mask)
    else:
        optimizer = Sgd(
            config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            clip=config.clip,
            decay_mask=mask,
        )
    return optimizer


def _decay_mask(layout: Layout) -> Tensor | None:
    """Ones where weight decay applies; None when it applies everywhere."""
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
