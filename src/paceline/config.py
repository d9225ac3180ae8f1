"""Define every setting of a run once: its field gives the flag, the TOML key, the check and the help."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UserError, unknown_name
from paceline.interfaces import MAX_WORKERS

Check = Callable[[str, Any], None]


def _check(passes: Callable[[Any], bool], must: str) -> Check:
    """Make a check that refuses a value with the flag, what it must be and what it is."""

    def check(name: str, value: Any) -> None:
        if not passes(value):
            raise UserError(f"--{name} {must}, got {value}")

    return check


_positive = _check(lambda value: math.isfinite(value) and value > 0, "must be a positive number")
_not_negative = _check(lambda value: math.isfinite(value) and value >= 0, "must be zero or more")
_sensible = _check(lambda value: 1e-6 <= value <= 1e9, "must be a number from 0.000001 to 1000000000")
_fraction = _check(lambda value: 0.0 <= value < 1.0, "must be at least 0 and below 1")
_at_least_one = _check(lambda value: value >= 1, "must be at least 1")
_at_most = _check(lambda value: value <= MAX_WORKERS, f"must be at most {MAX_WORKERS}")
_seed = _check(lambda value: 0 <= value < 2**63, "must be between 0 and 2^63 - 1")
_percent = _check(lambda value: 0.0 < value <= 100.0, "is in percent, above 0 and at most 100")
_betas = _check(
    lambda value: len(value) == 2 and all(0.0 <= beta < 1.0 for beta in value),
    "takes two numbers from 0 to below 1, as in .9,.999",
)


def _workers(name: str, value: int) -> None:
    _at_least_one(name, value)
    _at_most(name, value)


def _folder_name(name: str, value: str) -> None:
    if "/" in value or value in (".", ".."):
        raise UserError(f"--{name} '{value}' is not a folder name: use letters, digits, dots and dashes")


def setting(
    default: Any,
    group: str,
    text: str,
    check: Check | None = None,
    metavar: str | None = None,
    alias: str | None = None,
) -> Any:
    """Make a field of RunConfig with all that the command line needs; `alias` is a second name for its flag."""
    metadata = {"group": group, "help": text, "check": check, "metavar": metavar, "alias": alias}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run. `resolve` fills in the fields that are left at None."""

    dataset: str = setting(
        "fashion-mnist", "data", "fashion-mnist, mnist, cifar10, sst5, imagenet or fashion-mnist-sample"
    )
    split: str = setting(
        "iid", "data", "how workers share the data: full, iid, labels or dirichlet:ALPHA", alias="shard"
    )
    shard_weights: list[float] | None = setting(
        None, "data", "relative shard sizes, one for each worker, as in 1,1,2", metavar="W,W,..."
    )
    validation: float = setting(0.0, "data", "fraction of the train set to hold out and score", _fraction)
    fold: str | None = setting(
        None, "data", "hold out fold I of K of the train set and score it, not the test set, as in 2/5", metavar="I/K"
    )
    data_dir: str | None = setting(None, "data", "folder that holds the data sets", metavar="DIR")
    augment: str = setting(
        "auto",
        "data",
        "augment training images: crop, mirror, crop,mirror or none (auto: both for cifar10 and imagenet)",
        metavar="WAYS",
    )
    max_length: int = setting(64, "data", "maximum number of words of a sentence", _at_least_one)
    image_size: int = setting(224, "data", "width and height of the images of imagenet, in pixels", _at_least_one)
    model: str = setting(
        "lenet5",
        "model",
        "lenet5, cnn, resnet18, resnet34, resnet50 or resnet101 (with -gn: group norm instead of batch norm), "
        "inception-28-small, inception-bn, or transformer (for text)",
    )
    task: str | None = setting(
        None, "model", "your own task instead of model and dataset: MODULE:FUNCTION or FILE.py:FUNCTION", metavar="TASK"
    )
    strategy: str = setting(
        "async", "strategy", "classic, sync, async, backup:B, bounded:S, allreduce, local:H, diloco:H or async-local:H"
    )
    workers: int | None = setting(None, "strategy", "number of workers (default 2; classic has 1)", _workers)
    max_workers: int | None = setting(
        None,
        "strategy",
        "let workers join and leave during the run, at most this many at once; the data is divided again each "
        "time (default: --workers)",
        _workers,
    )
    rule: str = setting(
        "auto",
        "strategy",
        "how the server applies a push: auto, plain, plain-early, damped, gap, compensated, dana, dana-slim, "
        "cached, ringleader, ringmaster:R, buffered:K, foresight, foresight-fair or foresight-cached; with "
        "async-local: delayed",
    )
    average: str | None = setting(
        None,
        "strategy",
        "evaluate and save a running average of the weights: none, on, auto or a horizon in updates (default: on "
        "for async, bounded and async-local, unless the rule is plain or plain-early)",
    )
    local_steps: str | None = setting(
        None,
        "strategy",
        "for strategies with :H: even (H steps each) or speed (H steps for the fastest worker, fewer for slower "
        "ones, so that all push at the same time; default for async-local)",
        metavar="even|speed",
    )
    outer_lr: float | None = setting(
        None, "strategy", "outer learning rate of diloco and async-local (default .7; async-local .4)", _positive
    )
    outer_momentum: float | None = setting(
        None, "strategy", "outer Nesterov momentum of diloco and async-local (default .9; async-local .8)", _fraction
    )
    path: str | None = setting(
        None, "strategy", "topology: star, or ring (default for allreduce, local and diloco)", metavar="star|ring"
    )
    codec: str | None = setting(
        None, "strategy", "compress pushes: none, fp16, bf16, int8, sign, topk:F or lowrank:R (default none)"
    )
    pull_codec: str | None = setting(
        None, "strategy", "compress replies: the change of the weights, with the same codecs (default none)"
    )
    optimizer: str = setting(
        "sgd", "optimizer", "sgd, adam, adamw or lars: on the server or, with local steps, one in each worker"
    )
    lr: float | None = setting(
        None, "optimizer", "learning rate (default .005 for sgd, .001 for adam and adamw, 1 for lars)", _positive
    )
    momentum: float = setting(0.9, "optimizer", "momentum of sgd and lars", _fraction)
    nesterov: bool = setting(False, "optimizer", "Nesterov momentum for sgd")
    betas: list[float] = setting([0.9, 0.999], "optimizer", "betas of adam and adamw", _betas, metavar="B1,B2")
    weight_decay: float = setting(
        0.0, "optimizer", "weight decay added to the gradient (adamw: to the step)", _not_negative
    )
    clip: float | None = setting(None, "optimizer", "maximum gradient norm; scale larger gradients down", _positive)
    schedule: str = setting(
        "constant", "optimizer", "learning rate schedule: constant, cosine or exponential[:FACTOR per epoch]"
    )
    warmup: float = setting(0.0, "optimizer", "fraction of the run over which lr grows from 0", _fraction)
    scale_lr: str = setting(
        "none", "optimizer", "multiply lr: none, auto (by the number of pushes that one update averages) or a factor"
    )
    batch_size: int = setting(32, "length", "samples in one batch of one worker", _at_least_one)
    epochs: float = setting(6.0, "length", "number of epochs", _sensible)
    epoch_mode: str = setting(
        "shared", "length", "count epochs of all workers together (shared) or of each worker's own shard (own)"
    )
    steps: int | None = setting(None, "length", "stop after this many updates instead of --epochs", _at_least_one)
    max_seconds: float | None = setting(
        None,
        "length",
        "stop after this many seconds of training, not counting loading and evaluation (simulate: virtual seconds)",
        _sensible,
    )
    target_accuracy: float | None = setting(
        None, "length", "stop once the test accuracy reaches this percentage (needs --eval-every)", _percent
    )
    target: str | None = setting(
        None,
        "length",
        "stop once a metric of the test data reaches a value: 'METRIC<=VALUE' or 'METRIC>=VALUE'; METRIC is "
        "loss, accuracy or a metric of your task (needs --eval-every), or one that your own loop reports",
        metavar="GOAL",
    )
    best: str | None = setting(
        None,
        "length",
        "how to choose the best weights at evaluations: min:METRIC or max:METRIC (default: the metric of "
        "--target, else accuracy, else loss)",
        metavar="BEST",
    )
    eval_every: float | None = setting(
        None, "length", "evaluate every this many epochs; this does not count as training time", _sensible
    )
    eval_train: bool = setting(False, "length", "score the train data too at each of these evaluations")
    score: str = setting("all", "length", "what to score at the end: all, test or none")
    seed: int = setting(0, "machine", "seed of all random choices", _seed)
    device: str = setting("cpu", "machine", "cpu or cuda")
    threads: int | None = setting(None, "machine", "threads of each worker (default: cores / workers)", _at_least_one)
    precision: str = setting("fp32", "machine", "fp32, or bf16 (autocast; the weights stay fp32)")
    compile: bool = setting(False, "machine", "compile the step with torch.compile: a slower start, then faster steps")
    capture: bool = setting(False, "machine", "capture the step as a CUDA graph; needs --device cuda")
    channels_last: bool | None = setting(None, "machine", "store images channels last (default: with bf16 on cuda)")
    accumulate: int = setting(
        1, "machine", "compute each batch in this many parts, one after the other, to save memory", _at_least_one
    )
    delay: list[str] | None = setting(
        None,
        "machine",
        "slow workers down on purpose: 30ms or normal:60ms,5ms for all, 30ms@1,3 for workers 1 and 3; may be repeated",
        metavar="TIME[@WORKERS]",
    )
    faults: str | None = setting(
        None, "cluster", "TOML file of faults to inject: kill, stop and slow processes", metavar="FILE"
    )
    speeds: str | None = setting(
        None,
        "cluster",
        "time of a step: 30ms, 1,1,1,4 (seconds of each worker), lognormal:30ms,.3 or exponential:30ms [1s]",
        metavar="SPEEDS",
    )
    link: str | None = setting(
        None, "cluster", "link of the server: bandwidth and latency each way, as in 1gbit,0.2ms", metavar="LINK"
    )
    server_time: str | None = setting(
        None, "cluster", "time that the server takes for a push, as in 2ms [none]", metavar="TIME"
    )
    cores: int | None = setting(
        None, "cluster", "number of cores that all workers and the server share (default: one each)", _at_least_one
    )
    like: str | None = setting(
        None, "cluster", "take settings, times and cores from this run; --speeds then gives factors", metavar="RUN"
    )
    timing_only: bool = setting(False, "cluster", "compute no gradients, only times, staleness and traffic")
    parameters: str | None = setting(
        None, "cluster", "number of parameters for --timing-only, as in 25.6M (default: of --model)", metavar="COUNT"
    )
    checkpoint_every: float = setting(60.0, "run folder", "seconds between checkpoints", _positive)
    keep: int = setting(2, "run folder", "number of checkpoints to keep", _at_least_one)
    restart: int = setting(
        0, "run folder", "restart a killed server from its checkpoint and log, at most this many times", _not_negative
    )
    recovery: str = setting(
        "log", "run folder", "after a crash: recompute pushes (log) or drop them (checkpoint)", metavar="log|checkpoint"
    )
    durable: bool = setting(
        False, "run folder", "sync the log to disk before each reply, so that a power failure loses no push"
    )
    snapshots: float | None = setting(
        None,
        "run folder",
        "save the weights this many times per epoch, for 'paceline landscape'; each takes 4 bytes per parameter "
        "(default none)",
        _sensible,
    )
    track: list[str] | None = setting(
        None,
        "run folder",
        "send metrics to a tracker: csv, tensorboard, mlflow, wandb or MODULE:CLASS; may be repeated",
        metavar="NAME",
    )
    name: str | None = setting(
        None, "run folder", "name of the run (default: strategy, model, workers and time)", _folder_name
    )
    runs: str = setting("runs", "run folder", "folder that holds the runs", metavar="DIR")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, check = getattr(self, spec.name), spec.metadata["check"]
            if value is None:
                continue
            value = coerce(spec, value)
            object.__setattr__(self, spec.name, value)
            if check is not None:
                check(spec.name.replace("_", "-"), value)


def max_workers_of(config: RunConfig) -> int:
    """How many workers a run has room for: worker numbers are below it, and rules keep a row for each."""
    return config.max_workers or config.workers or 1


def is_simulated(config: RunConfig) -> bool:
    """Whether the run was made by `paceline simulate`, which always records its speeds."""
    return config.speeds is not None or config.like is not None


SCHEMA = 2  # version of run folders and their config.toml. 2: `foresight` is the rule that was `farsight` before.
SIMULATED_ONLY = ("speeds", "link", "server_time", "cores", "like", "timing_only", "parameters")
"""Settings of a simulated cluster."""

UPKEEP = ("keep", "restart", "recovery", "durable", "track")
"""Settings of the files of a run, not of its training: `paceline resume` may change them."""

SCRIPT_MAY_DECIDE = ("optimizer", "lr", "momentum", "nesterov", "betas", "weight_decay", "epochs", "epoch_mode")
"""Settings that a script may decide itself, by handing over its optimizer or its number of epochs."""


def given(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Which of these settings differ from their defaults."""
    untouched = RunConfig()
    return [name for name in names if getattr(config, name) != getattr(untouched, name)]


FIELDS = {spec.name: spec for spec in dataclasses.fields(RunConfig)}
ALIASES = {spec.metadata["alias"]: name for name, spec in FIELDS.items() if spec.metadata["alias"]}
_KINDS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def coerce(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Convert a value to the type of its field, so that equal settings are written alike."""
    wanted = str(spec.type).partition(" ")[0]
    if wanted == "list[str]" and isinstance(value, str):
        return [value]
    if wanted.startswith("list") and isinstance(value, list | tuple):
        item = wanted[5:-1]
        if all(_is_a(item, part) for part in value):
            return [float(part) if item == "float" else part for part in value]
    elif wanted in _KINDS and _is_a(wanted, value):
        return float(value) if wanted == "float" else value
    elif spec.name in ("scale_lr", "average") and _is_a("float", value):
        return str(value)
    raise UserError(f"{spec.name} = {value!r} is not of type {wanted}")


def _is_a(kind: str, value: Any) -> bool:
    """Whether a value has a type; True and False are not numbers."""
    return isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))


def parse_toml(path: Path, wanted: str) -> dict[str, Any]:
    """Read a TOML file; if there is none, the error ends with `wanted`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {path}: {wanted}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file; unknown keys and wrong types are errors that name the file."""
    raw = parse_toml(path, "give a TOML file of settings, or flags alone")
    values = {}
    for key, value in raw.items():
        name = ALIASES.get(key, key.replace("-", "_"))
        if name == "schema":
            if value != SCHEMA:
                why = f"has schema {value}, this version reads {SCHEMA}, in which rules have other names"
                raise UserError(f"{path} {why}: train again, or use the version that wrote it")
            continue
        if name not in FIELDS:
            raise UserError(f"{path}: {unknown_name('setting', key, FIELDS)}")
        try:
            values[name] = coerce(FIELDS[name], value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return values


def _toml(value: Any) -> str:
    """Write a value as TOML, which is JSON for all that settings hold but one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_toml(config: RunConfig, left_out: tuple[str, ...] = ()) -> str:
    """Write the config as TOML, without settings that are None."""
    lines = []
    for name in FIELDS:
        value = getattr(config, name)
        if value is not None and name not in left_out:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of `to_dict`."""
    return RunConfig(**values)
