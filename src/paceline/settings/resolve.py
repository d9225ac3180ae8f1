"""Complete and check the settings of a run before anything starts. Importing this imports no torch.

A setting with a notation of its own is parsed only if it was given: its default needs no check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import SCRIPT, SIMULATED_ONLY, RunConfig, given, is_script
from paceline.data.catalog import DATASETS
from paceline.errors import UserError, unknown_name
from paceline.settings.codecs import codec_of
from paceline.settings.features import Feature
from paceline.settings.imports import check_mirror, check_tracker
from paceline.settings.notation import delays_of, parameters_of
from paceline.settings.preprocessing import check_augmentation, check_train_score, fold_of, split_of, ways_of
from paceline.settings.rules import average_horizon, check_aggregate, check_rule, chosen, trim_of
from paceline.settings.stopping import check_goals
from paceline.settings.strategies import (
    OUTER_WARMUP,
    Strategy,
    Topology,
    Waiting,
    in_this_process,
    require_feature,
    strategy_of,
)
from paceline.system.sealed_weights import read_weights

MODELS = {
    "lenet5": "paceline.models.lenet:LeNet5",
    "cnn": "paceline.models.cnn:Cnn",
    "resnet20": "paceline.models.resnet20:ResNet20",
    "resnet20-gn": "paceline.models.resnet20:resnet20_gn",
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
TEXT_MODELS = ("transformer",)  # models that read token ids; the others look at images
OPTIMIZERS = {"sgd": 0.005, "adam": 0.001, "adamw": 0.001, "rmsprop": 0.0001, "lars": 1.0, "muon": 0.001}
SCHEDULES = {"constant": None, "exponential": 0.9, "cosine": None, "steps": None}
STEP_FACTOR = 0.1
AUTO_WARMUP = 0.05
_NAMED = {
    "optimizer": tuple(OPTIMIZERS),
    "epoch_mode": ("shared", "own"),
    "device": ("cpu", "cuda"),
    "score": ("all", "test", "none"),
    "recovery": ("log", "checkpoint", "skip-batch"),
    "precision": ("fp32", "bf16"),
    "local_steps": ("even", "speed"),
    "path": ("star", "ring"),
}
"""Settings that are one of a few names, and these names."""


class ScheduleForm(NamedTuple):
    """A parsed schedule: its kind, its factor, and the epochs at which `steps` multiplies lr by it."""

    kind: str
    factor: float = 1.0
    milestones: tuple[float, ...] = ()


@cache
def _parse_schedule(text: str) -> ScheduleForm:
    kind, colon, argument = text.partition(":")
    if kind not in SCHEDULES:
        raise unknown_name("schedule", kind, SCHEDULES)
    if kind == "steps":
        return ScheduleForm(kind, STEP_FACTOR, _milestones(text, argument))
    if not colon:
        return ScheduleForm(kind, SCHEDULES[kind] or 1.0)
    try:
        factor = float(argument)
    except ValueError:
        factor = 0.0
    if kind != "exponential" or not 0.0 < factor <= 1.0:
        raise UserError(f"schedule '{text}': only exponential takes a factor, above 0 and at most 1")
    return ScheduleForm(kind, factor)


def _milestones(text: str, argument: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in argument.split(","))
    except ValueError:
        found = ()
    if not found or any(not 0.0 < epoch < float("inf") for epoch in found) or list(found) != sorted(set(found)):
        raise UserError(f"schedule '{text}': give the epochs at which lr is divided by 10, growing, as in steps:80,120")
    return found


def schedule_of(config: RunConfig) -> ScheduleForm:
    """The learning rate schedule: `constant`, `cosine`, `exponential[:FACTOR]` or `steps:EPOCH,...`."""
    return _parse_schedule(config.schedule)


def lr_scale(config: RunConfig) -> float:
    """The factor of the learning rate: none, auto (the pushes that one step averages) or a number."""
    if config.scale_lr == "none":
        return 1.0
    if config.scale_lr == "auto":
        return float(strategy_of(config).pushes_per_step(config.workers or 1))
    try:
        factor = float(config.scale_lr)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < float("inf"):
        raise UserError(f"--scale-lr '{config.scale_lr}': give none, auto or a positive factor")
    return factor


def resolve(config: RunConfig, launched: bool = False) -> RunConfig:
    """Fill in what depends on other settings, and check every name and combination. Start nothing.

    `launched` says that a launcher started this process, as one rank of several.
    """
    strategy = strategy_of(config)
    if config.rule == "auto":
        config = dataclasses.replace(config, rule=strategy.kind.default_rule)
    check_names(config)
    workers = config.workers or (1 if strategy.waiting is Waiting.NONE else 2)
    _check_combinations(config, strategy, workers)
    fast_on_gpu = config.device == "cuda" and config.precision == "bf16"  # tensor cores want channels last
    resolved = dataclasses.replace(
        config,
        workers=workers,
        codec=_codec(config, "codec", None if launched else Feature.CODEC),
        pull_codec=_codec(config, "pull_codec", Feature.PULL_CODEC),
        lr=config.lr if config.lr is not None else OPTIMIZERS.get(config.optimizer),
        threads=config.threads or max(1, len(os.sched_getaffinity(0)) // workers),
        channels_last=fast_on_gpu if config.channels_last is None else config.channels_last,
        augment=_augment(config),
        aggregate=None if trim_of(config) == 0 else config.aggregate,
        **_local_settings(config, strategy, workers),
        task=_anchored(config.task),
        **_weights(config),
        data_dir=os.path.abspath(config.data_dir) if config.data_dir is not None else None,  # noqa: PTH100
    )
    if lr_scale(resolved) > 1.0 and resolved.warmup is None and resolved.scale_lr == "auto":
        resolved = dataclasses.replace(resolved, warmup=AUTO_WARMUP)
    if resolved.rule == "auto" and resolved.warmup is None and not is_script(resolved):
        resolved = dataclasses.replace(resolved, warmup=chosen(resolved, None).warmup(workers))
    return resolved


def _weights(config: RunConfig) -> dict[str, Any]:
    """The file to begin from, by its absolute path, and its hash: later commands and other processes compare it."""
    if config.weights is None:
        for name in given(config, ("weights_partial", "weights_sha256")):
            raise UserError(f"--{name.replace('_', '-')} is about the file of --weights: add --weights FILE")
        return {}
    path = Path(config.weights).absolute()
    content = read_weights(path, config.weights_sha256)
    return {"weights": str(path), "weights_sha256": hashlib.sha256(content).hexdigest()}


def _augment(config: RunConfig) -> str:
    if config.augment == "auto" and (config.task is not None or not DATASETS[config.dataset].augment):
        return "none"
    return ",".join(ways_of(config)) or "none"


def _local_settings(config: RunConfig, strategy: Strategy, workers: int) -> dict[str, Any]:
    """The defaults of local steps and of the outer optimizer."""
    found: dict[str, Any] = {}
    if strategy.is_local and config.local_steps is None:
        found["local_steps"] = "even" if strategy.in_rounds else "speed"
    if strategy.kind.outer is not None:
        lr, momentum = strategy.kind.outer(workers)
        found["outer_lr"] = config.outer_lr if config.outer_lr is not None else lr
        found["outer_momentum"] = config.outer_momentum if config.outer_momentum is not None else momentum
        found["outer_warmup"] = config.outer_warmup if config.outer_warmup is not None else OUTER_WARMUP
    return found


def _codec(config: RunConfig, setting: str, feature: Feature | None) -> str | None:
    """A codec that this run can use, or None for none; `feature` is what the strategy must allow for it."""
    text: str | None = getattr(config, setting)
    if text is None or codec_of(text).name == "none":
        return None
    if feature is None:
        return text
    flag = f"--{setting.replace('_', '-')} {text}"
    require_feature(config, feature, flag)
    if config.device != "cpu":
        raise UserError(f"{flag}: workers that share a GPU have no network between them; leave out one of the two")
    if config.parameters is not None and codec_of(text).name == "lowrank":
        raise UserError(f"{flag} needs the shapes of a model's matrices: give --model instead of --parameters")
    if (parameters_of(config) or 0) >= 1 << 31:
        raise UserError(f"{flag}: codecs take up to 2^31 parameters, --parameters {config.parameters} are more")
    return text


def resolve_own_loop(config: RunConfig) -> RunConfig:
    """`resolve` for a script that makes the steps itself; refuse what it cannot have. It exchanges with a server."""
    if config.weights is not None:
        how = "model.load_state_dict(safetensors.torch.load_file(FILE)) before session.prepare"
        raise UserError(f"--weights {config.weights}: your own loop loads its weights itself, by {how}; leave it out")
    if Topology.STAR in strategy_of(config).kind.axes.topologies and config.path is None:
        config = dataclasses.replace(config, path="star")
    for name in given(config, ("schedule", "warmup", "scale_lr")):
        require_feature(config, Feature.SCHEDULE, f"--{name.replace('_', '-')} {getattr(config, name)}")
    if config.epoch_mode == "own":
        require_feature(config, Feature.OWN_EPOCHS, "--epoch-mode own")
    return resolve(config)


def refuse_simulated(config: RunConfig) -> None:
    """Refuse settings that only a simulated cluster has."""
    for name in given(config, SIMULATED_ONLY):
        raise UserError(f"{name} = {getattr(config, name)!r} is for 'paceline simulate': real machines have theirs")


def check_processes(config: RunConfig, launched: bool = False) -> None:
    """Refuse faults and restarts if the workers are not processes that this command starts."""
    restarts = ("restart", Feature.RESTART), ("restart_workers", Feature.RESTART_WORKERS)
    for setting, feature in (("faults", Feature.FAULTS), *restarts):
        value = getattr(config, setting)
        if not value:
            continue
        asked = f"--{setting.replace('_', '-')} {value}"
        if launched:
            raise UserError(f"{asked}: a launcher started these processes, so this command cannot kill or start any")
        require_feature(config, feature, asked)
        if in_this_process(config):
            raise UserError(f"{asked}: with --device {config.device} all workers are in this process; leave out one")


def _check_stall(config: RunConfig) -> None:
    """Refuse `--stall` if no worker can leave the run without the others."""
    asked = f"--stall {config.stall:g}"
    require_feature(config, Feature.DRAIN, asked)
    if in_this_process(config):
        raise UserError(f"{asked}: the workers of this run are one process, and none can be dropped: leave it out")


def _anchored(task: str | None) -> str | None:
    """A task in a file by its absolute path, so that the run can be replayed from anywhere."""
    if task is None or ".py:" not in task:
        return task
    file, _, name = task.rpartition(":")
    return f"{os.path.abspath(file)}:{name}"  # noqa: PTH100


def check_names(config: RunConfig) -> None:
    """Check every setting that is one of a few names, or that has a notation of its own."""
    named = _NAMED if config.task is not None else {**_NAMED, "model": tuple(MODELS), "dataset": tuple(DATASETS)}
    for setting, known in named.items():
        value = getattr(config, setting)
        if value is not None and value not in known and not (setting == "optimizer" and _is_loops_own(config)):
            raise unknown_name(setting.replace("_", " "), value, known)
    if config.task is None:
        _check_model_fits(config)
    for name in given(config, PARSED):
        PARSED[name](config)
    for name in config.track or ():
        check_tracker(name)
    check_mirror(config.mirror)


def _is_loops_own(config: RunConfig) -> bool:
    """Whether the optimizer is one that a user's own loop has handed over."""
    return config.optimizer == "script" and config.task is not None and config.task.startswith(SCRIPT)


def _check_model_fits(config: RunConfig) -> None:
    """Check that a model of images gets images, and a model of text gets text."""
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
    if config.delay:
        delays_of(config, config.max_workers or workers)
    _check_step(config)
    if config.max_workers is not None:
        _check_elastic(config, workers)
    if workers != 1:
        require_feature(config, Feature.SEVERAL_WORKERS, f"--workers {workers}")
    if strategy.num_backup >= workers:
        enough = f"use more than {strategy.num_backup} workers"
        raise UserError(f"--workers {workers}: strategy {config.strategy} would leave no worker to wait for; {enough}")
    if (config.target, config.target_accuracy, config.best) != (None, None, None):
        check_goals(config, in_script=config.task is not None and config.task.startswith("script"))
    if config.eval_train and config.eval_every is None:
        raise UserError("--eval-train is for evaluations on the way: add --eval-every, as in --eval-every 1")
    if config.steps is not None and config.epoch_mode == "own":
        raise UserError("--steps counts updates of all workers together: leave out --epoch-mode own")
    if config.shard_weights is not None and len(config.shard_weights) != workers:
        raise UserError(f"--shard-weights gives {len(config.shard_weights)} weights for {workers} workers: one each")
    _check_paths(config)
    check_aggregate(config, workers)
    if config.robust:
        require_feature(config, Feature.ROBUST, "--robust")
    if config.nesterov and not config.momentum:
        raise UserError("--nesterov needs a momentum above 0")


def _check_fold(config: RunConfig) -> None:
    """Check the settings that a fold leaves no place for; then parse it."""
    if config.validation:
        raise UserError(f"--fold {config.fold} holds out a part already: leave out --validation")
    fold_of(config)


def _check_elastic(config: RunConfig, workers: int) -> None:
    """Refuse settings under which workers cannot join and leave."""
    asked = f"--max-workers {config.max_workers}"
    if config.max_workers is not None and config.max_workers < workers:
        raise UserError(f"{asked} is below the --workers {workers} that begin: give at least as many")
    require_feature(config, Feature.ELASTIC, asked)
    if config.epoch_mode == "own":
        raise UserError(f"{asked}: under --epoch-mode own each worker passes over its own data; use shared")
    if config.shard_weights is not None:
        raise UserError(f"{asked}: --shard-weights are for workers that stay; leave out one of the two")
    if config.device != "cpu":
        raise UserError(f"{asked}: workers that share a GPU are one process, which no worker joins; leave out one")


def _check_step(config: RunConfig) -> None:
    parts, size = config.accumulate, config.batch_size
    if parts > size:
        raise UserError(f"--accumulate {parts} parts of a batch of {size}: a part needs a sample at least")
    if config.capture and config.device != "cuda":
        raise UserError(f"--capture is for a GPU, and --device is {config.device}: add --device cuda, or leave it out")
    if config.capture:
        require_feature(config, Feature.CAPTURE, "--capture")


def _check_paths(config: RunConfig) -> None:
    """Check settings that only some strategies have: a path, local steps, an outer optimizer."""
    if config.local_steps is not None:
        require_feature(config, Feature.LOCAL_STEPS, f"--local-steps {config.local_steps}")
    if config.outer_lr is not None:
        require_feature(config, Feature.OUTER_OPTIMIZER, f"--outer-lr {config.outer_lr}")
    if config.path is not None:
        feature = Feature.RING_PATH if config.path == "ring" else Feature.STAR_PATH
        require_feature(config, feature, f"--path {config.path}")
    if config.local_steps == "speed":
        require_feature(config, Feature.STEPS_BY_SPEED, "--local-steps speed")
    if config.outer_momentum is not None:
        require_feature(config, Feature.OUTER_OPTIMIZER, f"--outer-momentum {config.outer_momentum:g}")
    if config.outer_warmup is not None:
        require_feature(config, Feature.OUTER_OPTIMIZER, f"--outer-warmup {config.outer_warmup}")


PARSED: dict[str, Callable[[RunConfig], object]] = {
    "split": split_of,
    "fold": _check_fold,
    "schedule": schedule_of,
    "average": average_horizon,
    "rule": check_rule,
    "augment": check_augmentation,
    "max_length": check_augmentation,
    "stall": _check_stall,
    "aggregate": trim_of,
    "train_score": check_train_score,
    "parameters": parameters_of,
}
"""Settings with a notation of their own, and what parses and checks each."""
