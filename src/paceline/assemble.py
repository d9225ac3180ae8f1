"""Names to objects: the only tables. Importing this file imports no torch, so mistakes are found at once."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.codebook import parse_codec
from paceline.config import RunConfig
from paceline.core.schedules import Schedule
from paceline.data.datasets import DATASETS
from paceline.data.partition import parse_fold, parse_split
from paceline.delays import parse_delays
from paceline.errors import UserError, name_and_argument, unknown_name, whole_number
from paceline.quantities import count
from paceline.rulebook import ON_ARRIVAL, build_rule, check_rule, parse_rule

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
    "local": "H steps each, then the drift is exchanged: local:H",
}
ARGUMENTS = {"backup": ("B", 1), "bounded": ("S", 0), "local": ("H", 1)}
"""What stands behind a strategy's colon, and the least it can be."""
OPTIMIZERS = {"sgd": 0.005, "adam": 0.001, "lars": 1.0}
SCHEDULES = {"constant": None, "exponential": 0.9, "cosine": None}
EPOCH_MODES = ("shared", "own")
DEVICES = ("cpu", "cuda")
SCORES = ("all", "test", "none")
PRECISIONS = ("fp32", "bf16")
AUTO_WARMUP = 0.05


@dataclass(frozen=True)
class Strategy:
    """A strategy's name and the number behind its colon."""

    name: str
    number: int = 0

    @property
    def in_rounds(self) -> bool:
        """Whether several pushes make one update."""
        return self.name in ("sync", "backup", "allreduce", "local")

    @property
    def on_ring(self) -> bool:
        """Whether workers exchange with each other instead of with a server."""
        return self.name in ("allreduce", "local")

    @property
    def local_steps(self) -> int:
        """Steps a worker makes for one push."""
        return self.number if self.name == "local" else 1

    @property
    def on_star(self) -> bool:
        """Whether workers exchange with a server, over a wire that codecs can relieve."""
        return not self.on_ring and self.name != "classic"


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
        return float(pushes_per_update(strategy, config.workers or 1))
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


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what depends on other settings, and check every name and combination. Starts nothing."""
    strategy = parse_strategy(config.strategy)
    if config.rule == "auto" and strategy.name not in ON_ARRIVAL:
        config = dataclasses.replace(config, rule="plain")  # nothing is stale
    _check_names(config)
    workers = config.workers or (1 if strategy.name == "classic" else 2)
    _check_combinations(config, strategy, workers)
    resolved = dataclasses.replace(
        config,
        workers=workers,
        codec=_codec(config, "codec", strategy),
        pull_codec=_codec(config, "pull_codec", strategy),
        lr=config.lr if config.lr is not None else OPTIMIZERS[config.optimizer],
        threads=config.threads or max(1, cores() // workers),
        channels_last=_channels_last(config),
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


def _codec(config: RunConfig, setting: str, strategy: Strategy) -> str | None:
    """A codec that this run can use, or None for none."""
    text: str | None = getattr(config, setting)
    flag = f"--{setting.replace('_', '-')} {text}"
    if text is None or parse_codec(text)[0] == "none":
        return None
    if not strategy.on_star:
        wire = "has no wire" if strategy.name == "classic" else "exchanges around a ring, where no codec works so far"
        raise UserError(f"{flag}: strategy {config.strategy} {wire}; choose sync, backup, async or bounded, or none")
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


def _anchored(task: str | None) -> str | None:
    """A task in a file, by its whole path, so that the run can be replayed from anywhere."""
    if task is None or ".py:" not in task:
        return task
    file, _, name = task.rpartition(":")
    return f"{os.path.abspath(file)}:{name}"  # noqa: PTH100


def _check_names(config: RunConfig) -> None:
    named: list[tuple[str, str, Iterable[str]]] = [
        ("optimizer", config.optimizer, OPTIMIZERS),
        ("epoch mode", config.epoch_mode, EPOCH_MODES),
        ("device", config.device, DEVICES),
        ("score", config.score, SCORES),
        ("precision", config.precision, PRECISIONS),
    ]
    if config.task is None:
        named += [("model", config.model, MODELS), ("dataset", config.dataset, DATASETS)]
    for kind, asked, known in named:
        if asked not in known:
            raise unknown_name(kind, asked, known)
    if config.task is None:
        _check_model_fits(config)
    parse_split(config.split)
    if config.fold is not None:
        parse_fold(config.fold)
    parse_schedule(config.schedule)
    check_rule(config)


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
    parse_delays(config.delay or [], workers)
    _check_step(config)
    if strategy.name == "classic" and workers != 1:
        raise UserError(f"strategy classic is one worker, got --workers {workers}: choose sync or async for more")
    if strategy.name == "backup" and strategy.number >= workers:
        raise UserError(
            f"strategy {config.strategy} with {workers} worker{'s' if workers > 1 else ''} leaves nobody to wait for: "
            f"use more than {strategy.number} workers"
        )
    if config.target_accuracy is not None and config.eval_every is None:
        raise UserError("--target-accuracy is only seen at evaluations: add --eval-every, as in --eval-every 1")
    if config.eval_train and config.eval_every is None:
        raise UserError("--eval-train is for evaluations on the way: add --eval-every, as in --eval-every 1")
    if config.steps is not None and config.epoch_mode == "own":
        raise UserError("--steps counts updates of all workers together: leave out --epoch-mode own")
    if config.shard_weights is not None and len(config.shard_weights) != workers:
        raise UserError(f"--shard-weights gives {len(config.shard_weights)} weights for {workers} workers: one each")
    if strategy.name == "local" and (config.schedule != "constant" or config.warmup or config.scale_lr != "none"):
        raise UserError("strategy local keeps one lr inside its steps: leave out --schedule, --warmup and --scale-lr")
    if config.nesterov and not config.momentum:
        raise UserError("--nesterov needs a momentum above 0")
    if config.fold is not None and config.validation:
        raise UserError(f"--fold {config.fold} holds out a part already: leave out --validation")
    if config.fold is not None and config.eval_every is not None:
        raise UserError(f"--fold {config.fold} leaves the test set alone, which --eval-every scores: leave out one")


def _check_step(config: RunConfig) -> None:
    """Settings of how a step is computed."""
    if config.accumulate > config.batch_size:
        raise UserError(
            f"--accumulate {config.accumulate} parts of a batch of {config.batch_size}: a part needs a sample at least"
        )
    if config.capture and config.device != "cuda":
        raise UserError(f"--capture is for a GPU, and --device is {config.device}: add --device cuda, or leave it out")
    if config.capture and parse_strategy(config.strategy).on_ring:
        raise UserError(f"--capture: strategy {config.strategy} exchanges inside its step; leave out one of the two")


def make_policy(config: RunConfig) -> Policy:
    """The reply policy of the config's strategy."""
    from paceline.core.policies import AtOnce, Bounded, Fresh, Rounds

    strategy, (rule, number) = parse_strategy(config.strategy), parse_rule(config.rule)
    if strategy.in_rounds:
        return Rounds(spare=strategy.number if strategy.name == "backup" else 0)
    if strategy.name == "bounded":
        return Bounded(strategy.number)
    return Fresh(number) if rule == "ringmaster" else AtOnce()


def make_schedule(config: RunConfig) -> Schedule:
    """The learning rate over the budget."""
    kind, factor = parse_schedule(config.schedule)
    if parse_strategy(config.strategy).name == "local":
        return Schedule(1.0)  # the drift is applied as it is; the learning rate belongs to the steps inside
    return Schedule((config.lr or 0.0) * lr_scale(config), kind, factor, config.warmup)


def make_rule(config: RunConfig, layout: Layout, places: int | None = None, skew: float | None = None) -> Rule:
    """The update rule, with rows for `places` workers (the config's, unless said) where it keeps some."""

    def prepared() -> Prepared:
        from paceline.core.optimizers import Prepared

        return Prepared(config.weight_decay, config.clip, _decay_mask(layout) if config.weight_decay else None)

    return build_rule(config, places or config.workers or 1, lambda: make_optimizer(config, layout), prepared, skew)


def make_optimizer(config: RunConfig, layout: Layout) -> Optimizer:
    """The optimizer that gradients are stepped with."""
    from paceline.core.optimizers import Adam, Lars, Sgd

    mask = _decay_mask(layout) if config.weight_decay else None
    optimizer: Optimizer
    if config.optimizer == "adam":
        beta1, beta2 = config.betas
        optimizer = Adam((beta1, beta2), weight_decay=config.weight_decay, clip=config.clip, decay_mask=mask)
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
