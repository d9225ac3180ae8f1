"""Settings completed and checked before anything starts: the tables of names, what goes with what. No torch here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from paceline.config import RunConfig
from paceline.data.datasets import DATASETS
from paceline.data.partition import parse_fold, parse_split
from paceline.errors import UserError, unknown_name
from paceline.settings.codecs import parse_codec
from paceline.settings.durations import count, parse_delays
from paceline.settings.preprocessing import check_preparation, ways_of
from paceline.settings.rules import check_rule, rule_for
from paceline.settings.stopping import check_goals
from paceline.settings.strategies import OUTER, RINGS, Strategy, on_ring, on_star, parse_strategy, pushes_in_a_step
from paceline.settings.trackers import check_tracker
from paceline.system.cpu import cores

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
OPTIMIZERS = {"sgd": 0.005, "adam": 0.001, "adamw": 0.001, "lars": 1.0}
SCHEDULES = {"constant": None, "exponential": 0.9, "cosine": None}
EPOCH_MODES = ("shared", "own")
DEVICES = ("cpu", "cuda")
SCORES = ("all", "test", "none")
RECOVERIES = ("log", "checkpoint")
PRECISIONS = ("fp32", "bf16")
LOCAL_STEPS = ("even", "speed")
PATHS = ("star", "ring")
AUTO_WARMUP = 0.05


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
